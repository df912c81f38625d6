import pytest
import torch

from capi.runtime.randomness import Stream, permuted, sample_keys, source_seed, step_seed, uniforms


def test__draws_depend_on_seed_step_sample_and_stream() -> None:
    index = torch.arange(3)
    base = uniforms(sample_keys(1, 2, index), Stream.MASK, 4)
    assert torch.equal(base, uniforms(sample_keys(1, 2, index), Stream.MASK, 4))
    for other in (
        uniforms(sample_keys(2, 2, index), Stream.MASK, 4),
        uniforms(sample_keys(1, 3, index), Stream.MASK, 4),
        uniforms(sample_keys(1, 2, index + 3), Stream.MASK, 4),
        uniforms(sample_keys(1, 2, index), Stream.ROLL, 4),
    ):
        assert not (base == other).any()


def test__draws_of_a_sample_are_the_same_alone_and_in_a_batch() -> None:
    together = uniforms(sample_keys(1, 2, torch.arange(5)), Stream.MASK, 6)
    alone = uniforms(sample_keys(1, 2, torch.tensor([3])), Stream.MASK, 6)
    assert torch.equal(together[3:4], alone)


def test__more_draws_begin_with_the_same() -> None:
    keys = sample_keys(1, 2, torch.arange(5))
    assert torch.equal(uniforms(keys, Stream.MASK, 9)[:, :4], uniforms(keys, Stream.MASK, 4))


def test__draws_are_uniform_and_uncorrelated() -> None:
    draws = uniforms(sample_keys(0, 0, torch.arange(200_000)), Stream.MASK, 3)
    assert draws.dtype == torch.float64
    assert draws.min() >= 0
    assert draws.max() < 1
    buckets = torch.histc(draws.flatten(), bins=100, min=0, max=1)
    expected = draws.numel() / 100
    # The chi-square statistic of 99 degrees of freedom has mean 99 and deviation 14.
    assert 30 < ((buckets - expected) ** 2 / expected).sum() < 170
    neighbors = torch.stack([draws[:-1, 0], draws[1:, 0], draws[:-1, 1]])
    correlation = torch.corrcoef(neighbors) - torch.eye(3, dtype=torch.float64)
    assert correlation.abs().max() < 5 / 200_000**0.5


def test__steps_are_independent() -> None:
    index = torch.arange(50_000)
    first, second = (uniforms(sample_keys(0, step, index), Stream.MASK, 1)[:, 0] for step in (0, 1))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 5 / 50_000**0.5


def shuffle(size: int, seed: int = 0, epoch: int = 0) -> torch.Tensor:
    return permuted(torch.arange(size), size, seed, torch.full((size,), epoch))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 1000, 4097])
def test__a_shuffle_holds_every_number_once(size: int) -> None:
    assert sorted(shuffle(size).tolist()) == list(range(size))


def test__shuffles_differ_by_seed_and_epoch_and_one_position_needs_no_other() -> None:
    base = shuffle(1000)
    assert (base == shuffle(1000, epoch=1)).sum() < 20
    assert (base == shuffle(1000, seed=1)).sum() < 20
    alone = permuted(torch.tensor([613, 2]), 1000, 0, torch.tensor([0, 1]))
    assert alone.tolist() == [base[613], shuffle(1000, epoch=1)[2]]


def test__every_image_comes_at_every_place_equally_often() -> None:
    size, epochs = 13, 4000
    places = torch.stack([shuffle(size, epoch=epoch) for epoch in range(epochs)])
    counts = torch.stack([torch.bincount(places[:, place], minlength=size) for place in range(size)]).double()
    expected = epochs / size
    # 144 degrees of freedom: mean 144, deviation 17.
    assert 70 < ((counts - expected) ** 2 / expected).sum() < 230
    # Neighbors in one epoch are no neighbours in the data.
    steps = (places[:, 1:] - places[:, :-1]) % size
    shares = torch.bincount(steps.flatten(), minlength=size)[1:].double() / steps.numel()
    assert (shares - 1 / (size - 1)).abs().max() < 0.01


def test__a_data_set_of_billions_needs_no_memory() -> None:
    size = 3 * 10**9
    order = permuted(torch.arange(100_000), size, 0, torch.zeros(100_000, dtype=torch.int64))
    assert len(set(order.tolist())) == 100_000
    assert order.min() >= 0
    assert order.max() < size
    assert abs(order.double().mean() / size - 0.5) < 0.01


def test__seeds_of_steps_differ() -> None:
    seeds = {step_seed(seed, step, process) for seed in range(5) for step in range(50) for process in range(4)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(step_seed(0, 10))


def test__streams_of_shuffles_and_seeds_of_sources_differ() -> None:
    positions, epoch = torch.arange(50), torch.zeros(50, dtype=torch.int64)
    streams = [Stream.ORDER, Stream.BLOCKS, Stream.WINDOW, Stream.PACKING]
    shuffles = [permuted(positions, 50, 0, epoch, stream=stream).tolist() for stream in streams]
    assert all(sorted(each) == list(range(50)) for each in shuffles)
    assert len({tuple(each) for each in shuffles}) == 4
    assert len({source_seed(seed, number) for seed in range(10) for number in range(10)}) == 100
    assert source_seed(3, 4) == source_seed(3, 4)
