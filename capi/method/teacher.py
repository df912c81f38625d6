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
    def follow(self, student: Student, momentum: float, skipped: Float[Tensor, ""] | None = None) -> None:
        """average = momentum * average + (1 - momentum) * student; where `skipped` is 1 the momentum is 1."""
        mine: list[Tensor] = list(self.average.parameters())
        theirs: list[Tensor] = list(student.parameters())
        share = (1 - momentum) * (1 - (torch.zeros((), device=mine[0].device) if skipped is None else skipped))
        if share.device.type == "cpu":
            torch._foreach_lerp_(mine, theirs, [share] * len(mine))
        else:
            # A lerp by a tensor would be one kernel for each parameter. The gradients are freed by now, so that the
            # differences need no memory that the backward pass did not.
            change = torch._foreach_sub(theirs, mine)
            torch._foreach_mul_(change, share)
            torch._foreach_add_(mine, change)
