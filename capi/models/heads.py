"""Heads: from a prediction to what the target asks for, prototype logits or plain values.

- `linear`, CAPI's own: one linear map of the normalised prediction, its rows of a learned length.
- `mlp` (DINO, ICCV 2021; iBOT, ICLR 2022): three linear layers with GELU between, down to a bottleneck, and then that
  map.
- Where the target is no distribution over prototypes (features, pixels) there is a linear map alone.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.models.costs import FLOAT32, ActivationPolicy
from capi.models.layers import LinearLayer
from capi.types import Float

INITIAL_HEAD_STD = 0.02
MLP_HIDDEN, MLP_BOTTLENECK = 2048, 256


class Head(nn.Module):
    """The contract: a map from predictions to outputs, which knows its sizes and what it costs."""

    # Its name in descriptions of a model.
    kind: ClassVar[str]
    # The arguments, beside widths, that an equal one is built with.
    size_names: ClassVar[tuple[str, ...]] = ()
    # Whether the layout of the published weights has a place for it.
    in_released_layout: ClassVar[bool] = False

    @property
    @abstractmethod
    def outputs(self) -> int:
        """How many logits or values it gives."""

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes by `size_names`."""
        return {}

    def flop(self, tokens: int) -> int:
        """FLOP of the map from so many predictions; a learned length is no matrix product."""
        matrices = {name: weight for name, weight in self.named_parameters() if weight.ndim == 2}
        return 2 * tokens * sum(weight.numel() for name, weight in matrices.items() if not name.endswith("length"))

    @abstractmethod
    def activation_bytes(self, predictions: int, policy: ActivationPolicy) -> int:
        """What it keeps for its backward pass, with the loss to targets in float32."""


class LinearHead(Head):
    """L2-normalised predictions through a linear map whose rows have a learned length."""

    kind, in_released_layout = "linear", True

    def __init__(self, *, width: int, outputs: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(outputs, width))
        self.length = nn.Parameter(torch.empty(outputs, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.direction, std=INITIAL_HEAD_STD)
        nn.init.ones_(self.length)

    @property
    def outputs(self) -> int:
        return len(self.direction)

    def activation_bytes(self, predictions: int, policy: ActivationPolicy, given: int = FLOAT32) -> int:
        """Predictions as they are given, so many bytes a value, and normalised, the weight as its lengths make it."""
        outputs, width = self.direction.shape
        normed = predictions * (width * (given + policy.compute_bytes) + 2 * FLOAT32)
        weight = outputs * (policy.compute_bytes * width + 3 * FLOAT32)
        return normed + weight + predictions * 2 * FLOAT32 * outputs

    def forward(self, predictions: Float[Tensor, "b p d"]) -> Float[Tensor, "b p k"]:
        weight = self.direction * (self.length / (self.direction.norm(dim=1, keepdim=True) + 1e-8))
        return F.linear(F.normalize(predictions, dim=-1, eps=1e-12), weight)


class MlpHead(Head):
    """Three linear layers, then the normalised linear map from the bottleneck to the logits."""

    kind, size_names = "mlp", ("hidden", "bottleneck")

    def __init__(self, *, width: int, outputs: int, hidden: int = MLP_HIDDEN, bottleneck: int = MLP_BOTTLENECK) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        self.reset_parameters()
        self.last = LinearHead(width=bottleneck, outputs=outputs)

    def reset_parameters(self) -> None:
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=INITIAL_HEAD_STD)
                nn.init.zeros_(layer.bias)

    @property
    def outputs(self) -> int:
        return self.last.outputs

    @property
    def sizes(self) -> dict[str, Any]:
        return {"hidden": self.layers[0].out_features, "bottleneck": self.layers[-1].out_features}

    def activation_bytes(self, predictions: int, policy: ActivationPolicy) -> int:
        first, c = self.layers[0], policy.compute_bytes
        assert isinstance(first, nn.Linear)
        layers = c * predictions * (first.in_features + 4 * first.out_features)
        copies = c * sum(w.numel() for w in self.layers.parameters() if w.ndim == 2) if policy.mixed else 0
        return layers + copies + self.last.activation_bytes(predictions, policy, given=c)

    def forward(self, predictions: Float[Tensor, "b p d"]) -> Float[Tensor, "b p k"]:
        logits: Tensor = self.last(self.layers(predictions))
        return logits


class LinearMap(Head):
    """Predictions to values as they are; no bias, as in all linear maps of the networks (ours)."""

    kind = "map"

    def __init__(self, *, width: int, outputs: int) -> None:
        super().__init__()
        self.weight = LinearLayer(width, outputs).weight

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)

    @property
    def outputs(self) -> int:
        return len(self.weight)

    def activation_bytes(self, predictions: int, policy: ActivationPolicy) -> int:
        outputs, width = self.weight.shape
        copy = policy.compute_bytes * self.weight.numel() if policy.mixed else 0
        return predictions * (policy.compute_bytes * width + 2 * FLOAT32 * outputs) + copy

    def forward(self, predictions: Float[Tensor, "b p d"]) -> Float[Tensor, "b p k"]:
        return F.linear(predictions, self.weight)


HEADS: dict[str, type[Head]] = {"linear": LinearHead, "mlp": MlpHead}
