"""The teacher: an exponential moving average of the student that sees the whole image."""

import copy

import torch
from torch import Tensor, nn

from capi.method.student import Student
from capi.types import Float


class Teacher(nn.Module):
    """Averages encoder, predictor and head of a student. Never trained by a loss, never drops a branch."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.average = copy.deepcopy(student).requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> "Teacher":  # noqa: ARG002 - the signature is torch's
        """Stays in evaluation mode, whatever the modules around it are set to."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "b c height width"]) -> Float[Tensor, "b n d"]:
        """The patch tokens of whole images."""
        encoder = self.average.encoder
        return encoder.patches(encoder(images))

    @torch.no_grad()
    def follow(self, student: Student, momentum: float) -> None:
        """average = momentum * average + (1 - momentum) * student."""
        mine: list[Tensor] = list(self.average.parameters())
        theirs: list[Tensor] = list(student.parameters())
        torch._foreach_lerp_(mine, theirs, 1 - momentum)
