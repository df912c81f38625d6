"""One iteration of CAPI. Whoever reads this file has read the method."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW

from capi.method.clustering import OnlineClustering
from capi.method.health import NoObserver, Observer
from capi.method.losses import prototype_use, soft_cross_entropy, target_entropy
from capi.method.student import Student
from capi.method.teacher import Teacher
from capi.train.optimizer import set_learning_rate
from capi.types import Float, MaskedBatch


@dataclass
class Learner:
    """Everything that one iteration reads and changes."""

    student: Student
    teacher: Teacher
    clustering: OnlineClustering
    student_optimizer: AdamW
    clustering_optimizer: AdamW
    learning_rate: Callable[[int], float]
    teacher_momentum: Callable[[int], float]
    student_temperature: float
    precision: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        return self.clustering.prototypes.device

    def autocast(self) -> AbstractContextManager[None]:
        """Matrix products in the run's precision; weights, losses and the clustering stay in float32."""
        return torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32)


class StepMetrics(NamedTuple):
    """Of a batch before the update, as tensors so that nothing waits for them. Entropies are in nat."""

    student_loss: Float[Tensor, ""]
    clustering_loss: Float[Tensor, ""]
    target_entropy: Float[Tensor, ""]
    prototype_use: Float[Tensor, ""]


def train_step(
    learner: Learner, batches: Sequence[MaskedBatch], step: int, observer: Observer | None = None
) -> StepMetrics:
    """Targets from the teacher, prediction by the student, both updates, then the teacher follows.

    Several micro-batches are one batch: their patches are balanced together and their gradients added up. Where a loss
    is not finite nothing is updated; whoever reads the metrics decides what then happens.
    """
    observer = observer or NoObserver()
    # The teacher sees the whole image; its patches are assigned to prototypes, balanced over the batch.
    with learner.autocast():
        tokens = [learner.teacher(batch.images) for batch in batches]
    observer.tokens(tokens, learner.clustering)
    clustering_loss, all_targets = learner.clustering(tokens, [batch.predict_index for batch in batches])
    clustering_loss.backward()

    # The student sees the visible patches and predicts the assignments of some hidden ones.
    parts = []
    for batch, targets in zip(batches, all_targets, strict=True):
        with learner.autocast():
            logits = learner.student(batch.images, batch.visible_index, batch.predict_index)
        loss = soft_cross_entropy(logits, targets, temperature=learner.student_temperature)
        (loss / len(batches)).backward()
        parts.append((loss.detach(), target_entropy(targets), targets.mean((0, 1))))
    student_loss, entropy, assigned = (torch.stack(part).mean(0) for part in zip(*parts, strict=True))

    observer.gradients(learner.student, learner.teacher, learner.clustering)

    # The two losses reach disjoint parameters, so neither optimiser disturbs the other.
    optimizers = (learner.student_optimizer, learner.clustering_optimizer)
    if torch.isfinite(student_loss + clustering_loss):
        for optimizer in optimizers:
            set_learning_rate(optimizer, learner.learning_rate(step))
            optimizer.step()
        learner.teacher.follow(learner.student, learner.teacher_momentum(step))
    for optimizer in optimizers:
        optimizer.zero_grad()
    return StepMetrics(student_loss, clustering_loss.detach(), entropy, prototype_use(assigned))
