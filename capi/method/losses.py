"""Losses to soft assignments and to plain values, and the entropy of assignments (paper: loss formulation)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.types import Float


def soft_cross_entropy(
    logits: Float[Tensor, "*batch k"], targets: Float[Tensor, "*batch k"], *, temperature: float
) -> Float[Tensor, ""]:
    """Mean over tokens of the cross-entropy of softmax(logits / temperature) to `targets`, in float32 or better."""
    log_probabilities = F.log_softmax(_at_least_float32(logits) / temperature, dim=-1)
    return -(targets * log_probabilities).sum(-1).mean()


def huber(outputs: Float[Tensor, "*batch e"], targets: Float[Tensor, "*batch e"]) -> Float[Tensor, ""]:
    """Mean of error^2 / 2 where the error is below 1, of |error| - 1/2 elsewhere, in float32 or better."""
    return F.huber_loss(_at_least_float32(outputs), targets, delta=1.0)


def squared_error(outputs: Float[Tensor, "*batch e"], targets: Float[Tensor, "*batch e"]) -> Float[Tensor, ""]:
    """Mean of error^2, in float32 or better."""
    return F.mse_loss(_at_least_float32(outputs), targets)


def target_entropy(targets: Float[Tensor, "*batch k"]) -> Float[Tensor, ""]:
    """Mean entropy of the targets in nat: how undecided the clustering is. The released recipe settles near 0.5."""
    return torch.special.entr(targets).sum(-1).mean()


def prototype_use(mean_assignment: Float[Tensor, " k"]) -> Float[Tensor, ""]:
    """The share of the prototypes that the targets make use of: the perplexity of their mean, over k."""
    share = mean_assignment / mean_assignment.sum()
    return torch.special.entr(share).sum().exp() / len(share)


def _at_least_float32(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()
