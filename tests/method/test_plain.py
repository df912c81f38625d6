import torch
from torch import Tensor

from capi.method.clustering import plain
from capi.method.clustering.plain import EPS, assign, kernel_of, normalized, sinkhorn
from capi.types import OneProcess


def slow_sinkhorn(kernel: Tensor, iterations: int) -> Tensor:
    """The definition, one number at a time: first each prototype, then each sample, divided by its sum."""
    matrix = kernel.double().tolist()
    samples, prototypes = kernel.shape
    for _ in range(iterations):
        for prototype in range(prototypes):
            total = sum(matrix[sample][prototype] for sample in range(samples)) + EPS
            for sample in range(samples):
                matrix[sample][prototype] /= total
        for sample in range(samples):
            total = sum(matrix[sample]) + EPS
            matrix[sample] = [value / total for value in matrix[sample]]
    return torch.tensor(matrix, dtype=torch.float64)


def balanced(kernel: Tensor, iterations: int) -> Tensor:
    assignments, sums = assign(kernel.clone(), *sinkhorn(kernel, iterations, OneProcess()))
    torch.testing.assert_close(sums, assignments.sum(-1, keepdim=True))
    return assignments


def test__sinkhorn_equals_the_slow_definition_in_every_group() -> None:
    values = torch.rand(3, 7, 5)
    for iterations in (1, 3, 6):
        assignments = balanced(values, iterations)
        expected = torch.stack([slow_sinkhorn(group, iterations) for group in values]).float()
        torch.testing.assert_close(assignments, expected, rtol=1e-5, atol=1e-7)


def test__eps_is_reproduced_for_samples_far_from_every_prototype() -> None:
    values = torch.rand(1, 6, 4)
    values[0, 2] *= 1e-24
    values[0, 3] = 0
    assignments = balanced(values, 3)[0]
    torch.testing.assert_close(assignments, slow_sinkhorn(values[0], 3).float(), rtol=1e-4, atol=1e-7)
    assert 0.1 < assignments[2].sum() < 0.9
    assert assignments[3].sum() == 0


def test__rows_sum_to_one_and_prototypes_are_used_evenly() -> None:
    values = torch.exp(torch.randn(2, 60, 8))
    assignments = balanced(values, 20)
    torch.testing.assert_close(assignments.sum(2), torch.ones(2, 60))
    torch.testing.assert_close(assignments.sum(1), torch.full((2, 8), 60 / 8), rtol=1e-3, atol=0)


def test__factors_stay_finite_over_many_iterations_with_few_samples() -> None:
    """u would grow by prototypes / samples in each iteration, and leave the range of float32 after some ten."""
    values = torch.exp(torch.randn(1, 2, 400))
    assignments = balanced(values, 40)[0]
    torch.testing.assert_close(assignments, slow_sinkhorn(values[0], 40).float(), rtol=1e-3, atol=1e-6)


def test__samples_that_no_prototype_reaches_change_nothing_over_many_iterations() -> None:
    logits = torch.randn(1, 8, 4096, generator=torch.Generator().manual_seed(0))
    logits[:, 4:] = -torch.inf
    kernel = plain.kernel_of(logits, logits.amax(1, keepdim=True), 0.06)
    alone = plain.kernel_of(logits[:, :4], logits.amax(1, keepdim=True), 0.06)
    targets, _ = plain.assign(
        kernel[:, :4].clone(), *(each[:, :4] for each in plain.sinkhorn(kernel, 50, OneProcess()))
    )
    expected, _ = plain.assign(alone.clone(), *plain.sinkhorn(alone, 50, OneProcess()))
    assert targets.isfinite().all()
    torch.testing.assert_close(targets, expected)


def test__groups_do_not_see_each_other() -> None:
    values = torch.rand(4, 5, 6)
    u, v = sinkhorn(values, 3, OneProcess())
    changed = values.clone()
    changed[0] = torch.rand(5, 6)
    u_changed, v_changed = sinkhorn(changed, 3, OneProcess())
    assert torch.equal(u[1:], u_changed[1:])
    assert torch.equal(v[1:], v_changed[1:])
    assert not torch.equal(u[0], u_changed[0])


def test__the_kernel_is_the_exponential_of_shifted_logits_and_zero_where_floats_end() -> None:
    logits, shift = torch.randn(3, 5, 7), torch.randn(3, 1, 7)
    expected = torch.exp((logits.double() - shift.double()) / 0.06)
    torch.testing.assert_close(kernel_of(logits, shift, 0.06).double(), expected, rtol=1e-4, atol=1e-30)
    far = torch.linspace(-200, 0, 2001).view(1, 1, -1)
    values = kernel_of(far, torch.zeros(1, 1, 2001), 1.0)
    assert ((values == 0) | (values > torch.finfo(torch.float32).smallest_normal)).all()
    assert (values > 0).equal(far > -83.177)


def test__tokens_have_length_one_and_zeros_stay() -> None:
    # Lengths are bounded from below by 1e-7, which a faint token does not come near.
    tokens = torch.cat([torch.randn(3, 8), 1e-5 * torch.randn(1, 8), torch.zeros(1, 8)]).bfloat16()
    directions = normalized(tokens)
    assert directions.dtype == torch.float32
    torch.testing.assert_close(directions.norm(dim=1), torch.tensor([1.0, 1, 1, 1, 0]))
