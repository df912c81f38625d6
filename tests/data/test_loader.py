from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from capi.data.crops import flips
from capi.data.decoding import Decoder
from capi.data.loader import REPLACEMENTS, BatchShare, Cropping, LoadedBatch, TrainingBatches, load_batches, made_ahead
from capi.data.reader import ImageReader
from capi.data.sources import EncodedImages
from capi.method.masking import MaskSampler, PatchGrid
from capi.runtime.randomness import sample_keys
from tests.data.pictures import encoded, photo

SAMPLER = MaskSampler(kind="inverse_block", ratio=0.5, roll=True, predict=3)
PLAIN = [encoded(np.full((12, 12, 3), number, dtype=np.uint8), "PNG") for number in range(23)]
PHOTOS = [encoded(photo(40 + number, 50, seed=number), "PNG") for number in range(11)]


def draw(keys: Tensor) -> tuple[Tensor, Tensor]:
    return SAMPLER(PatchGrid(4, 4), keys)


def batches(
    contents: list[bytes], share: BatchShare, *, seed: int = 0, cache: int = 0, flip: bool = True
) -> TrainingBatches:
    source = EncodedImages([f"{number}.png" for number in range(len(contents))], contents)
    cropping = Cropping(size=(16, 12), flip=flip)
    return TrainingBatches(
        ImageReader(source, Decoder(smallest_side=4), cache), cropping=cropping, share=share, masks=draw, seed=seed
    )


def same(left: LoadedBatch, right: LoadedBatch) -> bool:
    tensors = zip(left[:3], right[:3], strict=True)
    return all(torch.equal(tensor, other) for tensor, other in tensors) and left[3:] == right[3:]


def shown(batch: LoadedBatch) -> list[int]:
    """The plain images that a batch holds."""
    assert (batch.images == batch.images[:, :1, :1, :1]).all()
    return batch.images[:, 0, 0, 0].tolist()


def test__every_image_comes_once_an_epoch_in_another_order() -> None:
    # 23 steps of 5 images are 5 times around, whose ends fall within steps.
    epochs, others = (
        torch.tensor([shown(data[step]) for step in range(23)]).view(5, 23)
        for data in (batches(PLAIN, BatchShare(5), cache=10**6, seed=seed) for seed in (0, 1))
    )
    assert torch.equal(epochs.sort(dim=1).values, torch.arange(23).expand(5, 23))
    assert len({tuple(epoch) for epoch in torch.cat([epochs, others]).tolist()}) == 10


def test__a_batch_larger_than_the_data_goes_around() -> None:
    numbers = shown(batches(PLAIN[:4], BatchShare(12))[0])
    assert [sorted(numbers[start : start + 4]) for start in (0, 4, 8)] == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("cache", [0, 10**6])
def test__items_do_not_depend_on_the_order_they_are_asked_in(cache: int) -> None:
    share = BatchShare(6, micro_batches=2)
    forwards, backwards = batches(PHOTOS, share), batches(PHOTOS, share, cache=cache)
    expected = [forwards[item] for item in range(8)]
    for item in [7, 0, 5, 5, 3, 6, 1, 2, 4]:
        assert same(backwards[item], expected[item])
    assert not any(torch.equal(expected[0].images, other.images) for other in expected[1:])


# A machine may have fewer cores than workers.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "start"), [(0, 3), (1, 0), (3, 0), (3, 3)])
def test__neither_workers_nor_the_start_change_a_step(workers: int, start: int) -> None:
    data = batches([*PHOTOS, b"no image"], BatchShare(6, micro_batches=2))
    steps = list(load_batches(data, start, 6, workers=workers))
    assert len(steps) == 6 - start
    for step, loaded in enumerate(steps, start):
        assert len(loaded) == 2
        assert all(same(batch, data[2 * step + micro_batch]) for micro_batch, batch in enumerate(loaded))
    assert any(batch.broken for loaded in steps for batch in loaded)


def joined(parts: list[LoadedBatch], field: Callable[[LoadedBatch], Tensor]) -> Tensor:
    return torch.cat([field(part) for part in parts])


@pytest.mark.parametrize(("micro_batches", "processes"), [(4, 1), (1, 2), (2, 2), (1, 4)])
def test__micro_batches_and_processes_share_the_global_batch(micro_batches: int, processes: int) -> None:
    whole = batches(PHOTOS, BatchShare(8))
    parts = [batches(PHOTOS, BatchShare(8, micro_batches, process, processes)) for process in range(processes)]
    for step in (0, 5):
        loaded = [data[step * micro_batches + number] for number in range(micro_batches) for data in parts]
        assert {len(part.images) for part in loaded} == {8 // (micro_batches * processes)}
        for field in (lambda part: part.images, lambda part: part.visible_index, lambda part: part.predict_index):
            assert torch.equal(joined(loaded, field), field(whole[step]))


def test__masks_are_those_of_the_samples_keys() -> None:
    batch = batches(PHOTOS, BatchShare(4), seed=9)[3]
    visible, predict = SAMPLER(PatchGrid(4, 4), sample_keys(9, 3, torch.arange(4)))
    assert torch.equal(batch.visible_index, visible)
    assert torch.equal(batch.predict_index, predict)


def test__flipped_images_are_mirrors_of_the_others() -> None:
    plain, flipped = (batches(PHOTOS, BatchShare(16), flip=flip)[0].images for flip in (False, True))
    mirrored = flips(sample_keys(0, 0, torch.arange(16)))
    assert 0 < sum(mirrored) < 16
    for before, after, mirror in zip(plain, flipped, mirrored, strict=True):
        assert torch.equal(after, before.flip(2) if mirror else before)


def test__broken_images_are_replaced_alike_for_everyone_and_reported() -> None:
    spoilt = [b"no image" if number in (3, 8, 20) else content for number, content in enumerate(PLAIN)]
    good, repaired = (batches(contents, BatchShare(23), cache=10**6) for contents in (PLAIN, spoilt))
    wanted, shown_instead = shown(good[0]), shown(repaired[0])
    replaced = [new for old, new in zip(wanted, shown_instead, strict=True) if old != new]
    assert len(replaced) == 3
    assert not {3, 8, 20} & set(shown_instead)
    assert repaired[0].broken == dict.fromkeys(["3.png", "8.png", "20.png"], "no image that can be read")
    assert repaired[0].failure is None
    # In parts, and in another order.
    parts = batches(spoilt, BatchShare(24, micro_batches=3))
    third, second, first = (shown(parts[item]) for item in (5, 4, 3))
    assert shown(batches(spoilt, BatchShare(24))[1]) == first + second + third
    # Each time around another image comes instead.
    instead = [shown(repaired[step])[shown(good[step]).index(3)] for step in range(6)]
    assert len(set(instead)) > 1


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("workers", [0, 1])
def test__when_all_images_are_broken_the_batch_says_so(count: int, workers: int) -> None:
    whole = PHOTOS[0]
    data = batches([whole[: len(whole) // 2]] * count, BatchShare(2))
    ((batch,),) = load_batches(data, 0, 1, workers=workers)
    assert batch.failure is not None
    assert batch.failure.startswith(
        f"none of {REPLACEMENTS + 1} images drawn one after the other could be read, the last was "
    )
    assert "truncated" in batch.failure
    assert set(batch.broken) <= {f"{number}.png" for number in range(count)}
    assert len(batch.broken) >= min(count, 2)
    assert len(batch.images) == 0


def test__deeper_images_make_the_whole_batch_floats() -> None:
    deep = encoded(np.full((12, 12), 30_000, dtype=np.uint16), "PNG")
    batch = batches([*PLAIN[:3], deep], BatchShare(4))[0]
    assert batch.images.dtype == torch.float32
    values = sorted(batch.images[:, 0, 0, 0].tolist())
    assert values == pytest.approx([0, 1, 2, 30_000 / 257], abs=1e-3)


@pytest.mark.parametrize("workers", [0, 2])
def test__items_are_made_ahead_in_order(workers: int) -> None:
    data = batches(PLAIN, BatchShare(4))
    made = list(made_ahead(data, range(3, 8), workers=workers))
    assert len(made) == 5
    assert all(same(item, data[number]) for item, number in zip(made, range(3, 8), strict=True))
