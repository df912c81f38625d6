"""RMSNorm, with a learned scale in blocks and without one at the end of encoder and predictor.

On accelerators it is one kernel of torch's. On a CPU torch makes it of many steps, each over all tokens, and keeps a
normalised copy for the backward pass: there it is a function of its own, which keeps its input alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from capi.types import Float

NORM_EPS = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square norm over channels with a learned scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        # Shards may hand out a rounded weight; norms are computed as their input is.
        return _rms_norm(x, self.weight.to(x.dtype))


def final_norm(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """The norm at the end of encoder and predictor: no learned scale."""
    return _rms_norm(x, None)


def _rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    own = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    # What is compiled or exported is fused by whoever reads the graph.
    if not own or torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return F.rms_norm(x, x.shape[-1:], weight, NORM_EPS)
    normed: Tensor = _Norm.apply(x, weight)
    return normed


class _Norm(torch.autograd.Function):
    """x / rms(x) * weight.

    With r = 1 / rms(x) and a gradient g the gradients are

        of x        r g weight - x r^3 (g . (weight x)) / d
        of weight   the sum over tokens of r g x
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse.div_(x.shape[-1]).add_(NORM_EPS).rsqrt_()
        ctx.save_for_backward(x, inverse, weight)
        # Row by row also where x is not: products want it so.
        normed = torch.mul(x, inverse, out=x.new_empty(x.shape))
        return normed if weight is None else normed.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, inverse, weight = ctx.saved_tensors
        # One product serves both: its rows are summed for x, its columns for the weight.
        product = (gradient * x).reshape(-1, x.shape[-1])
        agreement = product.sum(1) if weight is None else product.mv(weight)
        weight_gradient = None if weight is None else product.t().mv(inverse.flatten())
        share = (agreement.view_as(inverse) / -x.shape[-1]).mul_(inverse.pow(3))
        result = torch.mul(gradient, inverse, out=product.view(x.shape))
        if weight is not None:
            result.mul_(weight)
        return result.addcmul_(x, share), weight_gradient
