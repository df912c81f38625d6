"""Online clustering of the teacher's patch tokens: prototypes, balanced assignments, clustering loss.

The logits of a token are its products with the prototypes. Sinkhorn-Knopp turns them into assignments; the loss is
the cross-entropy between those and softmax(logits / T_prediction), and trains the prototypes alone. The assignments
of the patches that the student predicts are its targets. `bounded.py` computes all of it in bounded memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from capi.method.bounded import ClusteringSettings, cluster
from capi.method.sinkhorn import OneProcess
from capi.types import Float, Int, Reduction


class Clustered(NamedTuple):
    """The clustering loss, and the assignments of the patches that the student predicts."""

    loss: Float[Tensor, ""]
    targets: Float[Tensor, "b p k"]


class OnlineClustering(nn.Module):
    """The prototypes. Called with teacher tokens it gives targets, and a loss that trains the prototypes alone."""

    def __init__(
        self,
        *,
        width: int,
        prototypes: int,
        bias: bool = True,
        settings: ClusteringSettings | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings or ClusteringSettings()
        self.reduction = reduction or OneProcess()
        self.prototypes = nn.Parameter(torch.randn(prototypes, width))
        self.bias = nn.Parameter(torch.zeros(prototypes)) if bias else None

    def forward(self, tokens: Float[Tensor, "b n d"], predict_index: Int[Tensor, "b p"]) -> Clustered:
        # Sinkhorn amplifies rounding by 1 / T_target: always in float32, also under autocast.
        with torch.autocast(tokens.device.type, enabled=False):
            loss, targets = _ClusteringLoss.apply(
                self.prototypes, self.bias, tokens.detach(), predict_index, self.settings, self.reduction
            )
        return Clustered(loss, targets)


class _ClusteringLoss(torch.autograd.Function):
    """Computes the gradient together with the loss, and hands it out in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        prototypes: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        predict_index: Tensor,
        settings: ClusteringSettings,
        reduction: Reduction,
    ) -> tuple[Tensor, Tensor]:
        totals = cluster(tokens, predict_index, prototypes, bias, settings, reduction)
        ctx.save_for_backward(totals.prototype_gradient, totals.bias_gradient)
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(totals.targets)
        return totals.loss, totals.targets

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        prototype_gradient, bias_gradient = ctx.saved_tensors
        bias_result = bias_gradient * loss_gradient if ctx.has_bias else None
        return prototype_gradient * loss_gradient, bias_result, None, None, None, None
