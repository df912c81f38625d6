import torch
from torch import Tensor

from capi.method.sinkhorn import EPS, OneProcess, balance


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


def test__balance_equals_the_slow_definition_in_every_group() -> None:
    kernel = torch.rand(3, 7, 5)
    for iterations in (1, 3, 6):
        u, v, _ = balance(kernel, iterations, OneProcess())
        assignments = kernel * u[:, None] * v[..., None]
        expected = torch.stack([slow_sinkhorn(group, iterations) for group in kernel]).float()
        torch.testing.assert_close(assignments, expected, rtol=1e-5, atol=1e-7)


def test__eps_is_reproduced_for_samples_far_from_every_prototype() -> None:
    kernel = torch.rand(1, 6, 4)
    kernel[0, 2] *= 1e-24
    kernel[0, 3] = 0
    u, v, _ = balance(kernel, 3, OneProcess())
    assignments = (kernel * u[:, None] * v[..., None])[0]
    torch.testing.assert_close(assignments, slow_sinkhorn(kernel[0], 3).float(), rtol=1e-4, atol=1e-7)
    assert 0.1 < assignments[2].sum() < 0.9
    assert assignments[3].sum() == 0


def test__rows_sum_to_one_and_prototypes_are_used_evenly() -> None:
    kernel = torch.exp(torch.randn(2, 60, 8))
    u, v, _ = balance(kernel, 20, OneProcess())
    assignments = kernel * u[:, None] * v[..., None]
    torch.testing.assert_close(assignments.sum(2), torch.ones(2, 60))
    torch.testing.assert_close(assignments.sum(1), torch.full((2, 8), 60 / 8), rtol=1e-3, atol=0)


def test__factors_stay_finite_over_many_iterations_with_few_samples() -> None:
    """u would grow by prototypes / samples in each iteration, and leave the range of float32 after some ten."""
    kernel = torch.exp(torch.randn(1, 2, 400))
    u, v, _ = balance(kernel, 40, OneProcess())
    assignments = (kernel * u[:, None] * v[..., None])[0]
    torch.testing.assert_close(assignments, slow_sinkhorn(kernel[0], 40).float(), rtol=1e-3, atol=1e-6)


def test__groups_do_not_see_each_other() -> None:
    kernel = torch.rand(4, 5, 6)
    u, v, _ = balance(kernel, 3, OneProcess())
    changed = kernel.clone()
    changed[0] = torch.rand(5, 6)
    u_changed, v_changed, _ = balance(changed, 3, OneProcess())
    assert torch.equal(u[1:], u_changed[1:])
    assert torch.equal(v[1:], v_changed[1:])
    assert not torch.equal(u[0], u_changed[0])
