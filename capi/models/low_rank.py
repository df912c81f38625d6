"""LoRA (Hu et al., ICLR 2022): a projection stays as it is, and a product of two thin matrices beside it is trained.

    y = x W^T + scale (x A^T) B^T,   A (r, inputs), B (outputs, r) = 0 at first

Merged it is one matrix again, W + scale B A. Only A and B have gradients, moments and their memory.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.models.weightless import without_weights
from capi.types import Float


class LowRank(nn.Linear):
    """A linear map with thin matrices beside it, under the names of the map: its weight, its bias, and `down`, `up`."""

    def __init__(self, plain: nn.Linear, *, rank: int, scale: float) -> None:
        with without_weights():
            super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None)
        self.weight, self.bias, self.scale = plain.weight, plain.bias, scale
        weight = plain.weight
        self.down = nn.Parameter(weight.new_empty(rank, plain.in_features).normal_(std=plain.in_features**-0.5))
        self.up = nn.Parameter(weight.new_zeros(plain.out_features, rank))

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.down), self.up)

    def merged(self) -> nn.Linear:
        """One map that computes the same."""
        with without_weights():
            plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        with torch.no_grad():
            plain.weight = nn.Parameter(self.weight + self.scale * self.up @ self.down)
        plain.bias = self.bias
        return plain


def add_low_rank(block: nn.Module, *, rank: int, scale: float) -> None:
    """Put thin matrices beside every projection of attention and MLP, in place."""
    for owner, name, layer in _linear_maps(block):
        setattr(owner, name, LowRank(layer, rank=rank, scale=scale))


def merge_low_rank(module: nn.Module) -> None:
    """Make every map of a module one matrix again, in place."""
    for owner, name, layer in _linear_maps(module):
        if isinstance(layer, LowRank):
            setattr(owner, name, layer.merged())


def _linear_maps(module: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [
        (owner, name, child)
        for owner in module.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.Linear)
    ]
