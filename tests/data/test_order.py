import numpy as np
import pytest
import torch

from capi.data.order import LARGEST_TOTAL, Interleaved, Order, Shuffle, WindowShuffle, order_of
from capi.data.sources import EncodedImages, Mixture
from capi.errors import CapiError
from capi.runtime.randomness import permuted

ENDS = np.cumsum([5, 1, 0, 9, 4, 4, 7, 3])


def take(order: Order, start: int, end: int) -> list[int]:
    return order.images(torch.arange(start, end)).tolist()


def memory(size: int) -> EncodedImages:
    return EncodedImages([str(number) for number in range(size)], [b""] * size)


class Blocks(EncodedImages):
    """Images in blocks of four."""

    usual_window = 8

    def __init__(self, size: int) -> None:
        super().__init__([str(number) for number in range(size)], [b""] * size)
        self.block_ends = np.minimum(np.arange(4, size + 4, 4), size)


def test__folders_are_shuffled_as_ever() -> None:
    positions = torch.arange(40, 90)
    expected = permuted(positions % 23, 23, 5, positions // 23)
    assert torch.equal(order_of(memory(23), 5, window=4).images(positions), expected)


@pytest.mark.parametrize("window", [1, 6, 12, 33, 10**6])
def test__in_windows_every_image_comes_once_a_pass(window: int) -> None:
    order = WindowShuffle(ENDS, 3, window)
    passes = [take(order, 33 * number, 33 * (number + 1)) for number in range(4)]
    assert all(sorted(images) == list(range(33)) for images in passes)
    assert len({tuple(images) for images in passes}) == 4
    assert take(WindowShuffle(ENDS, 4, window), 0, 33) != passes[0]


def test__positions_can_be_asked_in_any_way() -> None:
    order = WindowShuffle(ENDS, 3, 10)
    together = take(order, 0, 200)
    for place in (170, 33, 32, 5, 0):
        assert take(WindowShuffle(ENDS, 3, 10), place, place + 2) == together[place : place + 2]
    # One order that was asked for many passes in turns, more than it remembers.
    assert [take(order, place, place + 1)[0] for place in (199, 0, 150, 40, 80, 120, 1)] == [
        together[place] for place in (199, 0, 150, 40, 80, 120, 1)
    ]


def test__a_window_holds_whole_blocks_and_no_others() -> None:
    ends = np.arange(10, 1010, 10)
    order = WindowShuffle(ends, 0, 60)
    assert np.diff(order.window_blocks).max() in {6, 7}
    row, start = take(order, 0, 1000), 0
    for blocks in np.diff(order.window_blocks):
        part = row[start : start + 10 * int(blocks)]
        assert len(part) >= 60
        assert sorted({number // 10 * 10 for number in part}) == sorted({number for number in part if number % 10 == 0})
        assert len({number // 10 for number in part}) == blocks
        start += len(part)
    assert start == 1000
    # Within a window images of all its blocks are mixed, and other windows meet in the next pass.
    assert len({number // 10 for number in row[:15]}) > 3
    first, second = ({number // 10 for number in take(order, begin, begin + 60)} for begin in (0, 1000))
    assert len(first & second) < 6


def test__one_window_of_all_blocks_shuffles_evenly() -> None:
    order = WindowShuffle(np.array([50, 100]), 0, 100)
    places = np.array([np.argsort(take(order, 100 * number, 100 * (number + 1))) for number in range(80)])
    # The mean place of each image is that of a uniform draw, with a deviation of 100 / 12 ** 0.5 / 80 ** 0.5.
    assert np.abs(places.mean(0) - 49.5).max() < 5 * 3.23


def test__what_comes_instead_is_of_the_same_window_or_source() -> None:
    order = WindowShuffle(np.arange(10, 210, 10), 0, 20)
    positions, draws = torch.arange(200), torch.rand(200, 30, dtype=torch.float64)
    others, row = order.instead(positions, draws), take(order, 0, 200)
    for start in range(0, 200, 20):
        assert {number // 10 for number in others[start : start + 20].flatten().tolist()} == {
            number // 10 for number in row[start : start + 20]
        }
    mixed = Interleaved([Shuffle(10, 0), Shuffle(90, 0)], [10, 90], [1.0, 1.0])
    chosen = mixed.images(positions) < 10
    assert torch.equal(mixed.instead(positions, draws) < 10, chosen[:, None].expand(200, 30))
    assert torch.equal(Shuffle(7, 0).instead(positions, draws), (draws * 7).long())


def reference_shares(units: list[int], count: int) -> list[tuple[int, int]]:
    """Whole numbers of any size, one position after the other."""
    met, row = [0] * len(units), []
    for position in range(count):
        left, total = position, sum(units)
        for source, size in enumerate(units):
            if source == len(units) - 1 or (left + 1) * size // total > left * size // total:
                break
            left, total = left - left * size // total, total - size
        row.append((source, met[source]))
        met[source] += 1
    return row


@pytest.mark.parametrize("units", [[1, 1], [3, 1], [5, 2, 9], [1, 100, 1, 7]])
def test__sources_take_turns_and_meet_their_own_positions_in_order(units: list[int]) -> None:
    orders = [Shuffle(size, 0) for size in units]
    chosen, own = Interleaved(orders, units, None).sources(np.arange(500))
    assert list(zip(chosen.tolist(), own.tolist(), strict=True)) == reference_shares(units, 500)


def test__by_size_every_image_of_every_source_comes_once_a_pass() -> None:
    source = Mixture(["a", "b", "c"], [memory(13), Blocks(21), memory(6)], None)
    order = order_of(source, 1)
    passes = [take(order, 40 * number, 40 * (number + 1)) for number in range(3)]
    assert all(sorted(images) == list(range(40)) for images in passes)
    assert len({tuple(images) for images in passes}) == 3


def test__weights_are_kept_in_every_stretch_and_each_source_has_passes_of_its_own() -> None:
    order = order_of(Mixture(["a", "b"], [memory(10), memory(30)], [3.0, 1.0]), 0)
    row = np.array(take(order, 0, 4000))
    small = row < 10
    assert all(abs(small[start : start + 40].sum() - 30) <= 1 for start in range(0, 4000, 40))
    own = row[small]
    assert all(sorted(own[start : start + 10].tolist()) == list(range(10)) for start in range(0, 3000, 10))
    other = row[~small] - 10
    assert all(sorted(other[start : start + 30].tolist()) == list(range(30)) for start in range(0, 990, 30))


def test__sources_of_one_size_are_not_shuffled_alike() -> None:
    order = order_of(Mixture(["a", "b"], [memory(50), memory(50)], None), 0)
    row = np.array(take(order, 0, 100))
    assert row[row < 50].tolist() != (row[row >= 50] - 50).tolist()


def test__far_positions_and_many_images_stay_exact() -> None:
    sizes = [LARGEST_TOTAL - 12, 12]
    order = Interleaved([Shuffle(size, 0) for size in sizes], sizes, None)
    far = 10**12 + np.arange(3)
    chosen, own = order.sources(far)
    for position, source, place in zip(far.tolist(), chosen.tolist(), own.tolist(), strict=True):
        before, after = (number * sizes[0] // LARGEST_TOTAL for number in (position, position + 1))
        assert (source, place) == ((0, before) if after > before else (1, position - before))
    with pytest.raises(CapiError, match="too many to mix by size: give weights"):
        Interleaved([Shuffle(size, 0) for size in (LARGEST_TOTAL, 5)], [LARGEST_TOTAL, 5], None)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test__shares_of_processes_hold_every_image_once_a_pass(processes: int) -> None:
    from capi.data.loader import BatchShare

    order, batch = WindowShuffle(ENDS, 0, 9), 6
    seen: list[int] = []
    for step in range(11):
        for process in range(processes):
            samples = BatchShare(batch, 1, process, processes).samples(0)
            seen += order.images(step * batch + samples).tolist()
    assert sorted(seen) == sorted(2 * list(range(33)))
