"""From a prediction to what the target asks for: prototype logits, or plain values.

- `linear`, CAPI's own: one linear map of the normalised prediction, its rows of a learned length.
- `mlp` (DINO, ICCV 2021; iBOT, ICLR 2022): three linear layers with GELU between, down to a bottleneck, and then that
  map.
- Where the target is no distribution over prototypes (features, pixels) there is a linear map alone.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.models.layers import linear
from capi.types import Float

HeadKind = Literal["linear", "mlp"]

INITIAL_HEAD_STD = 0.02
MLP_HIDDEN, MLP_BOTTLENECK = 2048, 256


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


class MlpHead(nn.Module):
    """Three linear layers, then the normalised linear map from the bottleneck to the logits."""

    def __init__(
        self, *, width: int, prototypes: int, hidden: int = MLP_HIDDEN, bottleneck: int = MLP_BOTTLENECK
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=INITIAL_HEAD_STD)
                nn.init.zeros_(layer.bias)
        self.last = LinearHead(width=bottleneck, prototypes=prototypes)

    def forward(self, predictions: Float[Tensor, "b p d"]) -> Float[Tensor, "b p k"]:
        logits: Tensor = self.last(self.layers(predictions))
        return logits


class LinearMap(nn.Module):
    """Predictions to values as they are; no bias, as in all linear maps of the networks (ours)."""

    def __init__(self, *, width: int, outputs: int) -> None:
        super().__init__()
        self.weight = linear(width, outputs).weight

    def forward(self, predictions: Float[Tensor, "b p d"]) -> Float[Tensor, "b p k"]:
        return F.linear(predictions, self.weight)


HEADS: dict[HeadKind, type[LinearHead] | type[MlpHead]] = {"linear": LinearHead, "mlp": MlpHead}
