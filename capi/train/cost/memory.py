"""The memory that one process of a run needs, part by part, and when in an iteration each part is there.

Some parts are there always; the others belong to one of four phases, and the largest phase makes the peak:

    teacher      the teacher encodes whole images
    clustering   targets are made from its tokens
    student      forward and backward pass
    update       the optimizers step
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import nn

from capi.config.schema import Config
from capi.method.clustering import OnlineClustering
from capi.method.clustering.walk import plan_slices
from capi.models.costs import FLOAT32, ActivationPolicy, Counts
from capi.models.encoder import PatchEncoder
from capi.models.heads import Head
from capi.models.layers import Block
from capi.train.cost.activations import student_activations
from capi.train.optimizer import Optimizer
from capi.train.recomputation import Recomputation
from capi.train.step import Learner

# The plain clustering holds logits, assignments, probabilities, a product and a gradient at the least: in
# benchmarks/clustering.py it was measured at 5.1 to 7.1 arrays of b x n x k.
PLAIN_ARRAYS = 5
BFLOAT16 = 2
ALWAYS, TEACHER, CLUSTERING, STUDENT, UPDATE = "always", "teacher", "clustering", "student", "update"
PHASES = (TEACHER, CLUSTERING, STUDENT, UPDATE)


@dataclass(frozen=True)
class Saving:
    """What a run does against shortage of memory.

    `shards` processes hold one copy of the student's weights, their gradients, moments and the teacher together.
    """

    shards: int = 1
    mixed_precision: bool = False
    checkpointing: Recomputation = "off"
    micro_batches: int = 1
    bounded_clustering: bool = True

    @property
    def policy(self) -> ActivationPolicy:
        return ActivationPolicy(BFLOAT16 if self.mixed_precision else FLOAT32, self.checkpointing)


class Part(NamedTuple):
    """A part of the memory, in bytes, and the phase that it belongs to."""

    name: str
    bytes: int
    phase: str


@dataclass(frozen=True)
class MemoryPlan:
    """The parts; their peak is what is always there and the largest of the phases."""

    parts: list[Part] = field(default_factory=list)

    def of_phase(self, phase: str) -> int:
        return sum(part.bytes for part in self.parts if part.phase == phase)

    @cached_property
    def phases(self) -> dict[str, int]:
        """Bytes of each phase with what is always there."""
        return {phase: self.of_phase(ALWAYS) + self.of_phase(phase) for phase in PHASES}

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peak(self) -> int:
        return self.phases[self.peak_phase]


@dataclass(frozen=True)
class Planned:
    """The networks of a config on the meta device, and the tokens of its images."""

    config: Config
    learner: Learner
    counts: Counts
    accelerator: bool = True

    @cached_property
    def encoder_parameters(self) -> int:
        return _parameters(self.learner.student.encoder)

    @cached_property
    def trained_parameters(self) -> int:
        return _parameters(self.learner.student) + _parameters(self.learner.target)

    @cached_property
    def student_bytes(self) -> int:
        return FLOAT32 * _parameters(self.learner.student)

    @cached_property
    def target_bytes(self) -> int:
        return FLOAT32 * _parameters(self.learner.target)

    @cached_property
    def student_moments(self) -> int:
        return _moments(self.learner.student_optimizer)

    @cached_property
    def target_moments(self) -> int:
        return _moments(self.learner.target_optimizer)

    @cached_property
    def block_parameters(self) -> int:
        return _parameters(self.learner.student.encoder.blocks[0])

    @cached_property
    def outputs(self) -> int:
        """The width of what the student's head gives."""
        head = self.learner.student.head
        assert isinstance(head, Head)
        return head.outputs

    def memory(self, images: int, saving: Saving) -> MemoryPlan:
        """Of a process that works on so many images in an iteration, over all its micro-batches."""
        at_once = -(-images // saving.micro_batches)
        everywhere = [*self._held(images, saving), *self._teacher(images, at_once, saving)]
        made = [*self._clustering(images, saving), *self._student(at_once, saving)]
        return MemoryPlan([*everywhere, *made, *self._update(saving)])

    def _held(self, images: int, saving: Saving) -> list[Part]:
        student, target = self.student_bytes // saving.shards, self.target_bytes
        height, width = self.config.data.height_and_width
        pixels = FLOAT32 * self.config.model.channels * height * width
        return [
            Part("student's weights", student, ALWAYS),
            Part("student's moments", self.student_moments // saving.shards, ALWAYS),
            Part("teacher's weights", student, ALWAYS),
            Part("prototypes", target, ALWAYS),
            Part("prototypes' moments", self.target_moments, ALWAYS),
            Part("images", images * pixels, ALWAYS),
            Part("queue of earlier tokens", self._queued(images), ALWAYS),
            Part("block gathered from all shards", self._gathered(saving), ALWAYS),
        ]

    @property
    def _earlier_batches(self) -> int:
        """Batches in the queue, which are balanced together with the one that is trained on."""
        queue = getattr(self.learner.target, "queue", None)
        return 0 if queue is None else queue.shape.batches

    def _queued(self, images: int) -> int:
        """Whole batches of the teacher's patches in bfloat16."""
        tokens = self._earlier_batches * images * self.counts.patches
        return BFLOAT16 * tokens * self.config.model.width

    def _gathered(self, saving: Saving) -> int:
        """One block in use and the next one on its way, as a sharded run has them."""
        if saving.shards == 1:
            return 0
        size = BFLOAT16 if saving.mixed_precision else FLOAT32
        return 2 * size * self.block_parameters

    def _teacher(self, images: int, at_once: int, saving: Saving) -> list[Part]:
        if not self.learner.target.reads_teacher:
            return []
        working = at_once * _encoding(self.learner.student.encoder, self.counts, saving.policy)
        return [
            Part("teacher's forward pass", working, TEACHER),
            # Beside it the one that is added, normalized.
            Part("running mean of the teacher's layers", 2 * self._layer(at_once), TEACHER),
            *(Part("teacher's tokens", self._tokens(images), phase) for phase in (TEACHER, CLUSTERING, STUDENT)),
        ]

    def _layer(self, images: int) -> int:
        """The patches of one layer in float32, where targets are made from several."""
        if self.learner.teacher.layers == "last":
            return 0
        return FLOAT32 * images * self.counts.patches * self.config.model.width

    def _tokens(self, images: int) -> int:
        """The teacher's output in float32, registers included: patches are a view of it."""
        tokens = self.counts.registers + self.counts.patches
        return FLOAT32 * images * tokens * self.config.model.width

    def _clustering(self, images: int, saving: Saving) -> list[Part]:
        target = self.learner.target
        if not isinstance(target, OnlineClustering):
            return []
        patches, width = self.counts.patches, self.config.model.width
        at_once = -(-images // saving.micro_batches)
        groups = patches if target.settings.sinkhorn == "positionwise" else 1
        samples = images * (1 + self._earlier_batches) * patches
        factors = FLOAT32 * (2 * groups * len(target.prototypes) + samples)
        together = FLOAT32 * images * patches * width if saving.micro_batches > 1 else 0
        return [
            Part("clustering's working memory", self._walk(target, images, saving), CLUSTERING),
            Part("tokens of all micro-batches in one", together, CLUSTERING),
            Part("prototypes' gradient", 2 * FLOAT32 * target.prototypes.numel(), CLUSTERING),
            *(Part("factors that rebuild targets", factors, phase) for phase in (CLUSTERING, STUDENT)),
            Part("targets", FLOAT32 * at_once * self.counts.predicted * self.outputs, STUDENT),
        ]

    def _walk(self, target: OnlineClustering, images: int, saving: Saving) -> int:
        """A slice of the clustering, or the arrays of the plain one."""
        prototypes, width = target.prototypes.shape
        images *= 1 + self._earlier_batches
        if not saving.bounded_clustering:
            return PLAIN_ARRAYS * FLOAT32 * images * self.counts.patches * prototypes
        budget = target.settings.chunk_bytes
        return plan_slices(
            images, self.counts.patches, prototypes, width, chunk_bytes=budget, accelerator=self.accelerator
        ).bytes

    def _student(self, at_once: int, saving: Saving) -> list[Part]:
        policy = saving.policy
        activations = student_activations(self.learner.student, self.counts, at_once, policy)
        # A sharded run gathers blocks in the precision of the products, and keeps no copies.
        copies = 0 if saving.shards > 1 else activations.weight_copies
        gradients = self.student_bytes // saving.shards
        return [
            # Gradients come while activations go; but what is freed has other sizes than what is needed, so both count.
            Part("student's gradients", gradients, STUDENT),
            Part("prototypes' gradients", self.target_bytes, STUDENT),
            Part("activations of the encoder", activations.encoder, STUDENT),
            Part("activations of the predictor", activations.predictor, STUDENT),
            Part("activations of head and loss", activations.head, STUDENT),
            Part("recomputed block", activations.recomputed, STUDENT),
            Part("rounded copies of weights", copies, STUDENT),
            Part("working memory of the backward pass", self._backward(at_once, policy), STUDENT),
        ]

    def _update(self, saving: Saving) -> list[Part]:
        working = self.learner.student_optimizer.working_values() * FLOAT32
        return [
            Part("student's gradients", self.student_bytes // saving.shards, UPDATE),
            Part("prototypes' gradients", self.target_bytes, UPDATE),
            Part("optimizer's working memory", working // saving.shards, UPDATE),
        ]

    def _backward(self, at_once: int, policy: ActivationPolicy) -> int:
        """Logits with two gradients of them, or the gradients of one hidden layer and of its input."""
        block = self.learner.student.encoder.blocks[0]
        assert isinstance(block, Block)
        tokens, hidden = self.counts.context, block.mlp.expand.out_features
        in_block = tokens * (2 * policy.compute_bytes * hidden + 2 * FLOAT32 * self.config.model.width)
        in_loss = self.counts.predicted * self.outputs * (policy.compute_bytes + 2 * FLOAT32)
        return at_once * max(in_block, in_loss)


def _parameters(module: nn.Module | PatchEncoder) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _moments(optimizer: Optimizer | None) -> int:
    """What an optimizer keeps of all its parameters; counts of steps are not worth counting."""
    if optimizer is None:
        return 0
    states = [optimizer.initial_state(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return FLOAT32 * sum(value.numel() for state in states for value in state.values() if value.ndim)


def _encoding(encoder: PatchEncoder, counts: Counts, policy: ActivationPolicy) -> int:
    """One image without gradients: residual stream, norm, and the hidden layer before and after its GELU."""
    block = encoder.blocks[0]
    assert isinstance(block, Block)
    width, hidden = encoder.width, block.mlp.expand.out_features
    rounded = policy.compute_bytes * width if policy.mixed else 0
    tokens = counts.registers + counts.patches
    return tokens * (2 * FLOAT32 * width + rounded + 2 * policy.compute_bytes * hidden)
