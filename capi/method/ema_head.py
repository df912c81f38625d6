"""Targets from a moving average of the student's own head: iBOT (ICLR 2022), after DINO (ICCV 2021).

The teacher's patch tokens go through the teacher's head, which is the average of the student's. Against collapse the
logits are either centred, by a moving average of their mean, or balanced by Sinkhorn-Knopp (as in DINOv2, TMLR 2024),
and sharpened by a temperature that rises while the learning rate does. The student learns by cross-entropy. There are
no prototypes beside the head's, and no loss of their own.

Logits are computed, centred and balanced at the predicted patches alone (ours; DINOv2 balances the masked ones): every
patch is predicted equally often, and b x n x k values never exist. The paper saw this loss fail with a split predictor.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.method.clustering import plain
from capi.method.losses import soft_cross_entropy
from capi.method.targets import (
    OF_THE_RUN,
    OF_THE_TEACHER,
    RunContext,
    Target,
    Targets,
    at_predicted,
    no_own_loss,
)
from capi.method.teacher import Teacher
from capi.models.costs import Counts
from capi.models.heads import Head
from capi.types import Float, Int, OneProcess, Reduction

AgainstCollapse = Literal["centering", "sinkhorn"]


def rising_temperature(step: int, *, start: float, end: float, steps: int) -> float:
    """Linear over so many steps, both ends included, then constant."""
    return start + (end - start) * min(step / max(steps - 1, 1), 1.0)


class EmaHead(Target):
    """The teacher's head on the teacher's tokens. It is *given* that head, as a function, and owns no weights."""

    name = "ema_head"
    loss_name, loss_unit = "Cross-entropy", "nat"
    description = "the moving average of its own outputs (iBOT's loss)"
    reads = ("target.ema_head",)
    has_prototypes = True
    measures = (*OF_THE_RUN, *OF_THE_TEACHER, "target_entropy")
    advice: ClassVar = {
        "target_entropy": (
            "Raise target.ema_head.temperature and target.ema_head.first_temperature.",
            "Train longer, lower target.ema_head.temperature, or use fewer with clustering.prototypes.",
        )
    }
    centre: Tensor

    def __init__(
        self,
        *,
        head: Callable[[Tensor], Tensor],
        prototypes: int,
        teacher_temperature: Callable[[int], float],
        student_temperature: float = 0.1,
        balance: AgainstCollapse = "centering",
        center_momentum: float = 0.9,
        iterations: int = 3,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__()
        # Wrapped, so that a module given as head is not taken for a part of this one.
        self._head = (head,)
        self.teacher_temperature, self.student_temperature = teacher_temperature, student_temperature
        self.balance, self.center_momentum, self.iterations = balance, center_momentum, iterations
        self.reduction = reduction or OneProcess()
        # Spelt as in checkpoints.
        self.register_buffer("centre", torch.zeros(prototypes))
        self._seen: list[Tensor] = []

    @classmethod
    def build(
        cls,
        run: RunContext,
        teacher: Teacher,
        *,
        first_temperature: float,
        temperature: float,
        **settings: Any,
    ) -> "EmaHead":
        """The target of a run; its temperature rises from the one to the other in the warm-up of the learning rate."""
        if run.predictor_width != run.width:
            raise CapiError(
                "target.kind=ema_head puts one head on predictions and on the encoder's tokens, but "
                f"model.predictor.width is {run.predictor_width} and model.width {run.width}: make them equal"
            )
        return cls(
            head=teacher.average.head,
            prototypes=run.prototypes,
            teacher_temperature=partial(
                rising_temperature, start=first_temperature, end=temperature, steps=run.warmup_steps
            ),
            **settings,
        )

    def flop(self, counts: Counts, head: Head) -> int:
        return head.flop(counts.predicted)

    def forward(
        self, tokens: Sequence[Float[Tensor, "_ n e"]], predict_index: Sequence[Int[Tensor, "_ p"]], step: int = 0
    ) -> Targets:
        self._seen = []
        make = {"centering": self._centered, "sinkhorn": self._by_sinkhorn}[self.balance]
        return Targets(no_own_loss(), make(self._logits(tokens, predict_index), self.teacher_temperature(step)))

    def student_loss(self, outputs: Float[Tensor, "b p k"], targets: Float[Tensor, "b p k"]) -> Float[Tensor, ""]:
        return soft_cross_entropy(outputs, targets, temperature=self.student_temperature)

    @torch.no_grad()
    def follow(self, skipped: Float[Tensor, ""] | None = None) -> None:
        """The centre follows the mean logits of the batch."""
        if self._seen:
            mean = self.reduction.sum(torch.stack(self._seen).mean(0)) / self.reduction.sum(self.centre.new_ones(()))
            moved = self.centre.lerp(mean, 1 - self.center_momentum)
            # Chosen, not weighted: the mean of a bad batch may be NaN.
            self.centre.copy_(moved if skipped is None else torch.where(skipped > 0, self.centre, moved))
            self._seen = []

    def _logits(self, tokens: Sequence[Tensor], predict_index: Sequence[Tensor]) -> Iterator[Float[Tensor, "_ p k"]]:
        for part, index in zip(tokens, predict_index, strict=True):
            # A temperature of 0.04 amplifies rounding: always in float32, also under autocast.
            with torch.no_grad(), torch.autocast(part.device.type, enabled=False):
                logits = self._head[0](at_predicted(part, index))
            yield logits

    def _centered(self, parts: Iterator[Tensor], temperature: float) -> Iterator[Float[Tensor, "_ p k"]]:
        """Targets by the centre as earlier batches left it, one micro-batch at a time."""
        for logits in parts:
            self._seen.append(logits.mean((0, 1)))
            yield torch.softmax((logits - self.centre) / temperature, dim=-1)

    def _by_sinkhorn(self, parts: Iterator[Tensor], temperature: float) -> Iterator[Float[Tensor, "_ p k"]]:
        """All predicted patches of the batch together."""
        every = list(parts)
        targets = sinkhorn_targets(torch.cat(every), temperature, self.iterations, self.reduction)
        yield from targets.split([*map(len, every)])


def sinkhorn_targets(
    logits: Float[Tensor, "b p k"], temperature: float, iterations: int, reduction: Reduction
) -> Float[Tensor, "b p k"]:
    """Standard Sinkhorn-Knopp: all patches of all images are one group of samples."""
    samples = logits.flatten(0, 1)[None]
    kernel = plain.kernel_of(samples, reduction.max(samples.amax(1, keepdim=True)), temperature)
    u, v = plain.sinkhorn(kernel, iterations, reduction)
    assignments, _ = plain.assign(kernel, u, v)
    return assignments.view_as(logits)
