"""From a prediction to prototype logits (paper: the linear head)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.types import Float

INITIAL_HEAD_STD = 0.02


class LinearHead(nn.Module):
    """L2-normalised predictions through a linear map whose rows have a learned length."""

    def __init__(self, *, width: int, prototypes: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(prototypes, width))
        nn.init.trunc_normal_(self.direction, std=INITIAL_HEAD_STD)
        self.length = nn.Parameter(torch.ones(prototypes, 1))

    def forward(self, predictions: Float[Tensor, "b p d"]) -> Float[Tensor, "b p k"]:
        weight = self.direction * (self.length / (self.direction.norm(dim=1, keepdim=True) + 1e-8))
        return F.linear(F.normalize(predictions, dim=-1, eps=1e-12), weight)
