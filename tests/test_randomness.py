import torch

from capi.randomness import Stream, sample_keys, uniforms


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
    neighbours = torch.stack([draws[:-1, 0], draws[1:, 0], draws[:-1, 1]])
    correlation = torch.corrcoef(neighbours) - torch.eye(3, dtype=torch.float64)
    assert correlation.abs().max() < 5 / 200_000**0.5


def test__steps_are_independent() -> None:
    index = torch.arange(50_000)
    first, second = (uniforms(sample_keys(0, step, index), Stream.MASK, 1)[:, 0] for step in (0, 1))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 5 / 50_000**0.5
