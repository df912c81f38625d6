"""The pixels of a patch as its target: MAE (CVPR 2022).

Each patch is normalised by its own mean and std, as in MAE's better variant; the prediction goes through a linear
map to the pixels of a patch; the loss is the squared error. The teacher makes no targets here: it is only the average
that is evaluated.
"""

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.method.losses import squared_error
from capi.method.targets import (
    RunContext,
    Target,
)
from capi.method.teacher import Teacher
from capi.models.features import patch_pixels
from capi.types import Float

# What MAE adds to the variance of a patch.
EPS = 1e-6


class PixelTargets(Target):
    """Normalised patches, and the squared error to them."""

    name = "pixels"
    loss_name, loss_unit = "Squared error", "normalized pixels"
    description = "the pixels (MAE's loss)"
    reads_teacher = False

    def __init__(self, *, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size

    @classmethod
    def outputs(cls, run: RunContext) -> int:
        return run.channels * run.patch_size**2

    @classmethod
    def build(cls, run: RunContext, teacher: Teacher) -> "PixelTargets":  # noqa: ARG003 - the contract
        if cls.outputs(run) == 1:
            raise CapiError("target.kind=pixels cannot normalise a patch of one value: raise model.patch_size")
        return cls(patch_size=run.patch_size)

    def tokens(self, teacher: Teacher, images: Float[Tensor, "b c height width"]) -> Float[Tensor, "b n e"]:  # noqa: ARG002 - the contract
        return patch_pixels(images, self.patch_size).flatten(1, 2)

    def make(self, rows: Float[Tensor, "b p e"]) -> Float[Tensor, "b p e"]:
        return normalized(rows)

    def student_loss(self, outputs: Float[Tensor, "b p k"], targets: Float[Tensor, "b p k"]) -> Float[Tensor, ""]:
        return squared_error(outputs, targets)


@torch.no_grad()
def normalized(patches: Float[Tensor, "b p e"]) -> Float[Tensor, "b p e"]:
    """Each patch less its mean, over its std; a patch of one colour becomes zeros."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + EPS).sqrt()
