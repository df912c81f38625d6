"""One iteration of CAPI: read `train_step`. The mathematics that it calls is in `capi/method`."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.method.health import NoObserver, Observer
from capi.method.student import Student
from capi.method.targets import Target
from capi.method.teacher import Teacher
from capi.models.features import CapiEncoder
from capi.models.low_rank import merge_low_rank
from capi.train.guard import Guard
from capi.train.optimizer import Optimizer, clip_gradients, set_learning_rate
from capi.types import Float, MaskedBatch, Statistics
from capi.zoo.build import frozen


@dataclass
class Learner:
    """Everything that one iteration reads and changes. A target without parameters has no optimiser."""

    student: Student
    teacher: Teacher
    target: Target
    student_optimizer: Optimizer
    target_optimizer: Optimizer | None
    learning_rate: Callable[[int], float]
    teacher_momentum: Callable[[int], float]
    precision: torch.dtype = torch.float32
    # The longest gradient of an optimiser; None leaves gradients as they are.
    clip: float | None = None
    # Keeps batches whose loss is not finite from the weights.
    guard: Guard = field(default_factory=Guard)
    # Means over all processes; a single one has them already, so `dict` copies them.
    average: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict
    # The tensor of which each process has a part along an axis, as a checkpoint holds it; a single one has it all.
    spread: Callable[[Tensor, int], Tensor] = lambda value, _: value
    # Of the images it is trained on, for encoders made from it.
    statistics: Statistics | None = None
    image_size: tuple[int, int] | None = None

    @property
    def device(self) -> torch.device:
        return next(self.student.parameters()).device

    @property
    def optimizers(self) -> list[Optimizer]:
        return [optimizer for optimizer in (self.student_optimizer, self.target_optimizer) if optimizer is not None]

    def as_encoder(self, weights: Literal["teacher", "student"] = "teacher") -> CapiEncoder:
        """A frozen copy of the teacher or the student for evaluation and export; training continues unchanged."""
        if self.statistics is None:
            raise CapiError("the learner does not know the mean and std of its images: set data.mean and data.std")
        network = self.teacher.average if weights == "teacher" else self.student
        encoder = frozen(copy.deepcopy(network), self.statistics, self.image_size)
        merge_low_rank(encoder)
        return encoder.eval().requires_grad_(False)

    def autocast(self) -> AbstractContextManager[None]:
        """Matrix products in the run's precision; weights, losses and the targets stay in float32."""
        return torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32)


class StepMetrics(NamedTuple):
    """Losses and metrics of a batch before the update, as tensors so that nothing waits for them."""

    student_loss: Float[Tensor, ""]
    # The loss of the target's own parameters; 0 where it has none.
    target_loss: Float[Tensor, ""]
    # What the target says of itself: entropies in nat, shares, deviations.
    described: Mapping[str, Float[Tensor, ""]]

    def values(self) -> dict[str, float]:
        """What is logged."""
        return {"student_loss": float(self.student_loss)} | {
            name: float(value) for name, value in self.described.items()
        }


def train_step(
    learner: Learner, batches: Sequence[MaskedBatch], step: int, observer: Observer | None = None
) -> StepMetrics:
    """Targets from the teacher, prediction by the student, both updates, then the teacher follows.

    Several micro-batches are one batch: their patches are balanced together and their gradients added up. Where a loss
    is not finite nothing is updated, and `learner.guard` can report it. Nothing here waits for the device.
    """
    observer = observer or NoObserver()
    target = learner.target
    # The teacher sees the whole image.
    with learner.autocast():
        tokens = [target.tokens(learner.teacher, batch.images) for batch in batches]
    observer.tokens(tokens, target)
    # CAPI assigns its patches to prototypes, balanced over the batch. Targets of a micro-batch are made when its turn
    # comes below, before any weight changes.
    target_loss, all_targets = target(tokens, [batch.predict_index for batch in batches], step)
    target_loss.backward()

    # The student sees the visible patches (in other colors with data.color_jitter) and predicts targets of hidden ones.
    parts = []
    for batch, targets in zip(batches, all_targets, strict=True):
        with learner.autocast():
            outputs = learner.student(batch.student_images, batch.visible_index, batch.predict_index)
        if outputs.shape != targets.shape:
            # They would be broadcast, and something else learnt.
            raise CapiError(
                f"{type(target).__name__} makes targets of {targets.shape[-1]} values for a patch, but the student "
                f"gives {outputs.shape[-1]}: its `outputs` must say how many"
            )
        loss = target.student_loss(outputs, targets)
        (loss / len(batches)).backward()
        parts.append({"loss": loss.detach(), **target.summary(targets)})
    means = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
    # Of the global batch, so that all processes decide alike.
    means = learner.average(means | {"target_loss": target_loss.detach()})
    student_loss, target_loss = means.pop("loss"), means.pop("target_loss")

    observer.gradients(learner.student, learner.teacher, target)

    # 1 where a loss is not finite: then nothing below changes a weight. The device decides, so nothing waits for it.
    skipped = learner.guard(student_loss + target_loss, step)
    # The two losses reach disjoint parameters, so neither optimiser disturbs the other.
    for optimizer in learner.optimizers:
        set_learning_rate(optimizer, learner.learning_rate(step), step)
        if learner.clip is not None:
            clip_gradients(optimizer, learner.clip)
        # torch's own name: where it is 1, step() changes nothing.
        optimizer.found_inf = skipped
        optimizer.step()
        optimizer.zero_grad()
    learner.teacher.follow(learner.student, learner.teacher_momentum(step), skipped)
    target.follow(skipped)
    return StepMetrics(student_loss, target_loss, target.metrics(target_loss, means))
