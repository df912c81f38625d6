"""The memory that one process of a run needs, part by part, and when in an iteration each part is there.

Some parts are there always; the others belong to one of four phases, and the largest phase makes the peak:

    teacher      the teacher encodes whole images
    clustering   targets are made from its tokens
    student      forward and backward pass
    update       the optimizers step
"""

from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from capi.config.schema import Config
from capi.models.costs import (
    ALWAYS,
    BFLOAT16,
    FLOAT32,
    PHASES,
    STUDENT,
    TEACHER,
    UPDATE,
    ActivationPolicy,
    Checkpointing,
    Counts,
    MemoryPart,
    TokenSequence,
    Workload,
    blocks_of,
    drops,
    maps_of,
)
from capi.models.encoder import PatchEncoder
from capi.models.heads import Head
from capi.models.layers import TransformerBlock
from capi.train.cost.activations import student_activations
from capi.train.optimizer import Optimizer
from capi.train.step import Learner


@dataclass(frozen=True)
class Saving:
    """How a run saves memory.

    `shards` processes hold one copy of the student's weights, their gradients, moments and the teacher together, and
    there are `replicas` of that copy.
    """

    shards: int = 1
    replicas: int = 1
    mixed_precision: bool = False
    checkpointing: Checkpointing = "off"
    micro_batches: int = 1
    bounded_clustering: bool = True

    @property
    def policy(self) -> ActivationPolicy:
        return ActivationPolicy(BFLOAT16 if self.mixed_precision else FLOAT32, self.checkpointing)


@dataclass(frozen=True)
class MemoryPlan:
    """The parts; their peak is what is always there and the largest of the phases."""

    parts: list[MemoryPart] = field(default_factory=list)

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
        return (self.gradient_bytes + self.target_bytes) // FLOAT32

    @cached_property
    def student_bytes(self) -> int:
        return FLOAT32 * _parameters(self.learner.student)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of what is trained."""
        parameters = self.learner.student.parameters()
        return FLOAT32 * sum(parameter.numel() for parameter in parameters if parameter.requires_grad)

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
        """The memory of a process that works on so many images in an iteration, over all its micro-batches."""
        work = Workload(images, saving.micro_batches, self.accelerator, saving.bounded_clustering)
        return MemoryPlan(
            [
                *self._held(images, saving),
                *self._teacher(work, saving),
                *self.learner.target.memory(self.counts, work, self.outputs),
                *self._student(work.micro_batch, saving),
                *self._update(work, saving),
            ]
        )

    def _held(self, images: int, saving: Saving) -> list[MemoryPart]:
        student, target = self.student_bytes // saving.shards, self.target_bytes
        height, width = self.config.data.height_and_width
        pixels = FLOAT32 * self.config.model.channels * height * width
        return [
            MemoryPart("student's weights", student, ALWAYS),
            MemoryPart("student's moments", self.student_moments // saving.shards, ALWAYS),
            MemoryPart("teacher's weights", student, ALWAYS),
            MemoryPart("prototypes", target, ALWAYS),
            MemoryPart("prototypes' moments", self.target_moments, ALWAYS),
            MemoryPart("images", images * pixels, ALWAYS),
            *(
                MemoryPart("block gathered from all shards", self._gathered(saving), each)
                for each in (TEACHER, STUDENT)
            ),
        ]

    def _gathered(self, saving: Saving) -> int:
        """One block in use and the next one on its way, as a sharded run has them."""
        if saving.shards == 1:
            return 0
        size = BFLOAT16 if saving.mixed_precision else FLOAT32
        return 2 * size * self.block_parameters

    def _teacher(self, work: Workload, saving: Saving) -> list[MemoryPart]:
        if not self.learner.target.reads_teacher:
            return []
        working = work.micro_batch * _encoding(self.learner.student.encoder, self.counts, saving.policy)
        # The output in float32, registers included: patches are a view of it.
        token = FLOAT32 * self.config.model.width
        tokens = work.images * (self.counts.registers + self.counts.patches) * token
        # Where targets are made from several layers, their mean, and beside it the layer that is added, normalized.
        layers = 0 if self.learner.teacher.layers == "last" else 2 * work.micro_batch * self.counts.patches * token
        return [
            MemoryPart("teacher's forward pass", working, TEACHER),
            MemoryPart("running mean of the teacher's layers", layers, TEACHER),
            *(MemoryPart("teacher's tokens", tokens, phase) for phase in PHASES),
        ]

    def _student(self, at_once: int, saving: Saving) -> list[MemoryPart]:
        policy, student = saving.policy, self.learner.student
        activations = student_activations(student, self.counts, at_once, policy)
        # Several processes gather blocks in the precision of the products, and keep no copies.
        copies = 0 if saving.shards * saving.replicas > 1 else activations.weight_copies
        # Of the micro-batches before this one.
        gradients = self.gradient_bytes // saving.shards if saving.micro_batches > 1 else 0
        outputs = at_once * self.counts.predicted * self.outputs
        # The targets, which the loss keeps too, are the target's own part.
        head = activations.head - FLOAT32 * outputs
        sequences = student.predictor.sequences(self.counts)
        encoder, predictor = (
            0 if sequence is None else _block_gradients(blocks_of(stack)[0], sequence, at_once, policy)
            for stack, sequence in zip((student.encoder, student.predictor), sequences, strict=True)
        )
        # Of every block FSDP keeps until the end what replicas add up, beside the sums of the micro-batches before.
        added = gradients if saving.replicas > 1 else 0
        added_outside = added * (self.student_bytes - FLOAT32 * self.encoder_parameters) // self.student_bytes
        rounded_outputs = policy.compute_bytes * outputs
        # Moments of the backward pass: the loss, the predictor's last block, then the encoder's, and its first one.
        moments = (
            {
                "activations of the encoder": activations.encoder,
                "activations of the predictor": activations.predictor,
                "activations of head and loss": head,
                "gradients of the outputs": rounded_outputs + 2 * FLOAT32 * outputs,
            },
            {
                "activations of the encoder": activations.encoder,
                "activations of the predictor": activations.predictor,
                "outputs of the head": rounded_outputs,
                "recomputed block": activations.recomputed_predictor,
                "gradients in a block": predictor,
            },
            {
                "activations of the encoder": activations.encoder,
                "outputs of the head": rounded_outputs,
                "recomputed block": activations.recomputed_encoder,
                "gradients in a block": encoder,
                "gradients that replicas add up": added_outside,
            },
            {
                "outputs of the head": rounded_outputs,
                "recomputed block": activations.recomputed_encoder,
                "gradients in a block": encoder,
                "gradients that replicas add up": added,
            },
        )
        parts = {
            "student's gradients": gradients,
            "prototypes' gradients": self.target_bytes,
            "rounded copies of weights": copies,
            **max(moments, key=lambda moment: sum(moment.values())),
        }
        return [MemoryPart(name, size, STUDENT) for name, size in parts.items()]

    def _update(self, work: Workload, saving: Saving) -> list[MemoryPart]:
        working = self.learner.student_optimizer.working_values() * FLOAT32
        outputs = work.micro_batch * self.counts.predicted * self.outputs
        return [
            # Those of the last micro-batch.
            MemoryPart("targets", FLOAT32 * outputs, UPDATE),
            MemoryPart("outputs of the head", saving.policy.compute_bytes * outputs, UPDATE),
            MemoryPart("student's gradients", self.gradient_bytes // saving.shards, UPDATE),
            MemoryPart("prototypes' gradients", self.target_bytes, UPDATE),
            MemoryPart("optimizer's working memory", working // saving.shards, UPDATE),
        ]


def _block_gradients(block: TransformerBlock, sequence: TokenSequence, images: int, policy: ActivationPolicy) -> int:
    """While the MLP's backward pass runs: the gradients of its hidden layer and, twice, of the residual stream."""
    width = block.attention.query.out_features
    hidden = max(layer.out_features for layer in maps_of(block))
    running = block.images_kept(images) if drops(block) else images
    # Where images are left out the branch that was added is kept, and gone by then.
    stream = FLOAT32 * width * (2 * images - (running if drops(block) else 0))
    return sequence.queries * (policy.compute_bytes * hidden * running + stream)


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
    assert isinstance(block, TransformerBlock)
    width, hidden = encoder.width, block.mlp.expand.out_features
    rounded = policy.compute_bytes * width if policy.mixed else 0
    tokens = counts.registers + counts.patches
    return tokens * (2 * FLOAT32 * width + rounded + 2 * policy.compute_bytes * hidden)
