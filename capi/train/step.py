"""One iteration of CAPI. Whoever reads this file has read the method."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.optim import AdamW

from capi.method.clustering import OnlineClustering
from capi.method.losses import soft_cross_entropy, target_entropy
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


class StepMetrics(NamedTuple):
    """Losses before the update, and the mean entropy of the targets in nat. Tensors, so that nothing waits for them."""

    student_loss: Float[Tensor, ""]
    clustering_loss: Float[Tensor, ""]
    target_entropy: Float[Tensor, ""]


def train_step(learner: Learner, batch: MaskedBatch, step: int) -> StepMetrics:
    """Targets from the teacher, prediction by the student, both updates, then the teacher follows."""
    # The teacher sees the whole image; its patches are assigned to prototypes, balanced over the batch.
    tokens = learner.teacher(batch.images)
    clustering_loss, targets = learner.clustering(tokens, batch.predict_index)

    # The student sees the visible patches and predicts the assignments of some hidden ones.
    logits = learner.student(batch.images, batch.visible_index, batch.predict_index)
    student_loss = soft_cross_entropy(logits, targets, temperature=learner.student_temperature)

    # The two losses reach disjoint parameters, so neither optimiser disturbs the other.
    clustering_loss.backward()
    student_loss.backward()
    for optimizer in (learner.student_optimizer, learner.clustering_optimizer):
        set_learning_rate(optimizer, learner.learning_rate(step))
        optimizer.step()
        optimizer.zero_grad()

    learner.teacher.follow(learner.student, learner.teacher_momentum(step))
    return StepMetrics(student_loss.detach(), clustering_loss.detach(), target_entropy(targets))
