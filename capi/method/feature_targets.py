"""The teacher's own patch tokens as targets: I-JEPA (CVPR 2023).

A target is the teacher's token of the patch, normalised over channels without a learned scale; the prediction goes
through a linear map to the encoder's width; the loss is Huber's with beta 1. There is no head and nothing is clustered,
so that only the moving average stands against collapse.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.method.losses import huber
from capi.method.targets import (
    OF_THE_RUN,
    OF_THE_TEACHER,
    RunContext,
    Target,
)
from capi.method.teacher import Teacher
from capi.types import Float


class FeatureTargets(Target):
    """Normalised tokens, and Huber's loss to them."""

    name = "features"
    loss_name, loss_unit = "Huber loss", "normalized features"
    description = "the features (I-JEPA's loss)"
    measures: ClassVar[tuple[str, ...]] = (*OF_THE_RUN, *OF_THE_TEACHER)

    @classmethod
    def build(cls, run: RunContext, teacher: Teacher, *_: Any, **__: Any) -> Target:  # noqa: ARG003 - the contract
        return cls()

    def make(self, rows: Float[Tensor, "b p e"]) -> Float[Tensor, "b p e"]:
        return normalized(rows)

    def student_loss(self, outputs: Float[Tensor, "b p k"], targets: Float[Tensor, "b p k"]) -> Float[Tensor, ""]:
        return huber(outputs, targets)


@torch.no_grad()
def normalized(tokens: Float[Tensor, "b p e"]) -> Float[Tensor, "b p e"]:
    """Each token less its mean over channels, over their std."""
    return F.layer_norm(tokens, tokens.shape[-1:])
