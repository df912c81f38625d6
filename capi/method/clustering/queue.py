"""Teacher tokens of earlier batches, which join the balancing of a small one.

Positionwise Sinkhorn-Knopp spreads the images of a batch over the prototypes at each position. Far fewer images than
prototypes say little about how often each prototype should be used. SwAV (Caron et al. 2020, "Unsupervised Learning of
Visual Features by Contrasting Cluster Assignments") keeps features of earlier batches beside a small batch; here the
teacher's patch tokens of the last batches are kept, each at its position. They are compared with the prototypes as
these are now, and balanced together with the batch, but they are as the teacher was when it saw them. Loss, gradient
and targets are of the batch alone.

The queue holds whole batches and is bounded: images x positions x width numbers in bfloat16. That is half of float32,
and rounding moves a token far less than the teacher's own steps have since. Each process keeps its own images; over all
processes that is one queue of the global batches, which any other number of processes can resume.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from capi.types import Bool, Float


class QueueShape(NamedTuple):
    """What one process keeps: so many earlier batches, of each so many images of so many positions."""

    batches: int
    images: int
    positions: int
    micro_batches: int = 1


class TokenQueue(nn.Module):
    """The tokens of the last batches. Batch number i lies in place i % batches, so that each replaces the oldest."""

    tokens: Tensor
    seen: Tensor

    def __init__(self, shape: QueueShape, width: int) -> None:
        super().__init__()
        self.shape = shape
        images = shape.batches * shape.images
        # No part of what is learnt, so that no state dict holds them; checkpoints keep them by name.
        empty = torch.zeros(images, shape.positions, width, dtype=torch.bfloat16)
        self.register_buffer("tokens", empty, persistent=False)
        # Batches that ever entered, counted on the device: a batch that is skipped does not.
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        # Places in use, counted on the CPU, which must not wait for the device to tell. After batches that were skipped
        # some of them are still empty: `absent` tells.
        self._places, self._counted = 0, self.seen._version

    @property
    def blocks(self) -> int:
        """Micro-batches that it has room for, the parts of `tokens` that processes take turns in."""
        return self.shape.batches * self.shape.micro_batches

    def earlier(self) -> Float[Tensor, "q n d"] | None:
        """What is there: None at first, then more with every batch until it is full."""
        if self.seen._version != self._counted:
            # Somebody else wrote to it: a checkpoint was loaded.
            self._places, self._counted = min(int(self.seen), self.shape.batches), self.seen._version
        return self.tokens[: self._places * self.shape.images] if self._places else None

    def absent(self, images: int) -> Bool[Tensor, " q"]:
        """Which of the first so many images belong to places that are still empty."""
        return torch.arange(images, device=self.seen.device) >= self.seen * self.shape.images

    @torch.no_grad()
    def enter(self, parts: Sequence[Float[Tensor, "_ n d"]], skipped: Float[Tensor, ""] | None = None) -> None:
        """The micro-batches of a batch replace the oldest batch, unless `skipped` is 1."""
        first = self.seen % self.shape.batches * self.shape.images
        rows = first + torch.arange(self.shape.images, device=first.device)
        newest = torch.cat(list(parts)).to(self.tokens.dtype)
        if skipped is not None:
            newest = torch.where(skipped > 0, self.tokens[rows], newest)
        self.tokens.index_copy_(0, rows, newest)
        self.seen += 1 if skipped is None else (1 - skipped).long()
        self._places, self._counted = min(self._places + 1, self.shape.batches), self.seen._version

    @torch.no_grad()
    def pretend_full(self) -> None:
        """Noise in every place, to measure what a full queue costs."""
        self.tokens.normal_()
        self.seen.fill_(self.shape.batches)
