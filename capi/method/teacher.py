"""The teacher: an exponential moving average of the student that sees the whole image."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.method.student import Student
from capi.models.encoder import PatchEncoder
from capi.runtime.devices import is_accelerator
from capi.types import Float

Layers = Literal["last", "all"] | Sequence[int]
Normalization = Literal["none", "instance", "layer"]
INSTANCE_EPS = 1e-5


class Teacher(nn.Module):
    """Averages encoder, predictor and head of a student. Never trained by a loss, never drops a branch.

    `layers` says what the tokens of an image are: the encoder's output (`last`, the paper's), or the mean of what
    several of its blocks give, before the final norm (ours); each is normalized as `normalize` says.
    """

    def __init__(self, student: Student, *, layers: Layers = "last", normalize: Normalization = "none") -> None:
        super().__init__()
        self.average = copy.deepcopy(student).requires_grad_(False)
        self.layers, self.normalize = layers, normalize
        self.train(False)

    def train(self, mode: bool = True) -> "Teacher":  # noqa: ARG002 - the signature is torch's
        """Stays in evaluation mode, whatever the modules around it are set to."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "b c height width"]) -> Float[Tensor, "b n d"]:
        """The patch tokens of whole images."""
        return layer_tokens(self.average.encoder, images, self.layers, self.normalize)

    @torch.no_grad()
    def follow(self, student: Student, momentum: float, skipped: Float[Tensor, ""] | None = None) -> None:
        """average = momentum * average + (1 - momentum) * student; where `skipped` is 1 the momentum is 1."""
        # Of sharded weights the parts that lie here, which are sharded alike.
        mine, theirs = (
            [getattr(value, "to_local", lambda value=value: value)() for value in network.parameters()]
            for network in (self.average, student)
        )
        share = (1 - momentum) * (1 - (torch.zeros((), device=mine[0].device) if skipped is None else skipped))
        if is_accelerator(share.device):
            # A lerp by a tensor would be one kernel for each parameter. The gradients are freed by now, so that the
            # differences need no memory that the backward pass did not.
            change = torch._foreach_sub(theirs, mine)
            torch._foreach_mul_(change, share)
            torch._foreach_add_(mine, change)
        else:
            torch._foreach_lerp_(mine, theirs, [share] * len(mine))


def layer_tokens(
    encoder: PatchEncoder,
    images: Float[Tensor, "b c height width"],
    layers: Layers = "last",
    normalize: Normalization = "none",
) -> Float[Tensor, "b n d"]:
    """The patch tokens of an encoder's output, or the mean of those that blocks give, in float32; see `Teacher`."""
    normalized = _NORMALIZED[normalize]
    if layers == "last":
        return normalized(encoder.patches(encoder(images)))
    numbers = range(len(encoder.blocks)) if isinstance(layers, str) else layers
    mean: Tensor | None = None

    def add(_: nn.Module, __: Any, output: Float[Tensor, "b t d"]) -> None:
        """A running mean, so that no more than one layer is there beside it."""
        nonlocal mean
        layer = normalized(output[:, encoder.num_registers :].float()) / len(numbers)
        mean = layer if mean is None else mean.add_(layer)

    hooks = [encoder.blocks[number].register_forward_hook(add) for number in numbers]
    try:
        encoder(images)
    finally:
        for hook in hooks:
            hook.remove()
    assert mean is not None
    return mean


def instance_normalized(tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
    """Each channel of each image, less its mean over the patches, over their std."""
    tokens = tokens.float()
    std, mean = torch.std_mean(tokens, dim=1, correction=0, keepdim=True)
    return (tokens - mean) / (std + INSTANCE_EPS)


_NORMALIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda tokens: tokens,
    "instance": instance_normalized,
    # Each token over its channels.
    "layer": lambda tokens: F.layer_norm(tokens.float(), tokens.shape[-1:]),
}
