import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capi.models.layers import NORM_EPS, RMSNorm, _Norm, final_norm


def slow_rms_norm(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("shape", [(8,), (5, 8), (3, 4, 8), (0, 8)])
def test__norms_divide_by_the_root_mean_square(shape: tuple[int, ...]) -> None:
    x, norm = torch.randn(shape), RMSNorm(8)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), slow_rms_norm(x) * norm.weight)
    torch.testing.assert_close(final_norm(x), slow_rms_norm(x))


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("shape", [(8,), (3, 4, 8)])
def test__gradients_are_those_of_finite_differences(scaled: bool, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True) if scaled else None
    assert torch.autograd.gradcheck(_Norm.apply, (x, weight))


@pytest.mark.parametrize("scaled", [True, False])
def test__results_and_gradients_are_those_of_torch(scaled: bool) -> None:
    # Neither the tokens nor their gradient lie row by row.
    tokens, gradient = torch.randn(5, 3, 16).transpose(0, 1), torch.randn(16, 5, 3).permute(2, 1, 0)
    results = []
    for norm in (lambda x, w: F.rms_norm(x, (16,), w, NORM_EPS), _Norm.apply):
        x = tokens.clone(memory_format=torch.preserve_format).requires_grad_()
        weight = torch.linspace(-1, 2, 16).requires_grad_() if scaled else None
        y = norm(x, weight)
        assert y.is_contiguous()
        y.backward(gradient)
        results.append([y.detach(), x.grad, weight.grad if weight is not None else torch.zeros(0)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test__tokens_of_zeros_and_tokens_that_are_not_finite_stay_so() -> None:
    x = torch.stack([torch.zeros(8), torch.full((8,), torch.nan), torch.ones(8)]).requires_grad_()
    y = final_norm(x)
    y[::2].sum().backward()
    assert torch.equal(y[0], torch.zeros(8))
    assert y[1].isnan().all()
    assert x.grad is not None
    assert torch.isfinite(x.grad[::2]).all()


def test__only_the_input_is_kept_for_the_backward_pass() -> None:
    x, norm, saved = torch.randn(40, 16, requires_grad=True), RMSNorm(16), []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        norm(x)
    large = [tensor for tensor in saved if tensor.numel() >= x.numel()]
    assert [tensor.data_ptr() for tensor in large] == [x.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test__low_precision_is_left_to_torch(dtype: torch.dtype) -> None:
    x, norm = torch.randn(4, 16).to(dtype), RMSNorm(16)
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight.to(dtype), NORM_EPS))
