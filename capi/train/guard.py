"""Batches whose loss is not finite: kept from the weights on the device, and reported when the loop asks.

Reading a loss on the CPU would make the CPU wait for the device at every step. So the device decides: a guard turns a
loss into a 0 or a 1, and where it is 1 the optimisers, the teacher and the target stay as they are. What happened is
counted on the device too; `report` reads it, and that is the only place that waits.

After more than `patience` bad batches in a row the guard is closed: no later batch updates anything. The weights are
then those of the step at which it closed, however late the loop asks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from capi.types import Float

# Without a loop that asks, every bad batch is skipped and every good one updates.
_UNLIMITED = 2**62


class NonFinite(NamedTuple):
    """The bad batches since the last report."""

    number: int
    # The step of the first of them.
    first: int
    # How many in a row the last step ended; those that a closed guard held back count too.
    in_a_row: int
    # The step at which the guard closed; None while it is open.
    closed_at: int | None


class Guard:
    """Lets batches with a finite loss through. All processes see the same losses, so all decide alike."""

    def __init__(self, device: torch.device | str = "cpu", patience: int = _UNLIMITED) -> None:
        self.patience = patience
        # See `NonFinite`.
        self.number, self.first, self.in_a_row = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(3))

    def __call__(self, loss: Float[Tensor, ""], step: int) -> Float[Tensor, ""]:
        """1 where the batch of this step must update nothing, else 0."""
        bad = ~torch.isfinite(loss)
        skipped = bad | (self.in_a_row > self.patience)
        self.first = torch.where(bad & (self.number == 0), step, self.first)
        self.number = self.number + bad
        self.in_a_row = torch.where(skipped, self.in_a_row + 1, 0)
        return skipped.float()

    def report(self, next_step: int) -> NonFinite:
        """What happened since the last report, up to the step before `next_step`. Waits for the device."""
        number, first, in_a_row = torch.stack([self.number, self.first, self.in_a_row]).tolist()
        self.number = torch.zeros_like(self.number)
        beyond = in_a_row - self.patience
        return NonFinite(number, first, in_a_row, next_step - beyond if beyond > 0 else None)

    def reopen(self, in_a_row: int = 0) -> None:
        """Start over, after so many bad batches in a row."""
        self.number, self.in_a_row = torch.zeros_like(self.number), torch.full_like(self.in_a_row, in_a_row)
