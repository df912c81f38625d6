"""The contract of a target: what the student must predict, and how its prediction is judged (paper: loss formulation).

`registry.py` lists those of the package, each in a module of its own: `clustering` (CAPI), `ema_head` (iBOT),
`features` (I-JEPA), `pixels` (MAE), `frozen` (BEiT, EVA). One iteration goes through a target in this order, for all
its micro-batches together:

    tokens          what the targets are made from, of whole images: the teacher's tokens, or something else
    forward         a loss that trains the target's own parameters, and the targets of the predicted patches
    student_loss    the student's outputs against them, one micro-batch after the other
    summary         what is to be known of the targets; averaged over micro-batches it goes to `metrics`
    follow          keep what was seen of the batch, unless its loss is not finite

Targets never carry a gradient to the teacher, and a target's own loss reaches nothing but its own parameters.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from capi.method.losses import prototype_use, target_entropy
from capi.method.teacher import Teacher
from capi.models.costs import FLOAT32, STUDENT, Counts, MemoryPart, Workload
from capi.models.heads import Head
from capi.types import Float, Int, OneProcess, Reduction, Statistics, VisionEncoder


class Targets(NamedTuple):
    """The target's own loss, and for each micro-batch the targets of the patches that the student predicts."""

    loss: Float[Tensor, ""]
    targets: Iterator[Float[Tensor, "_ p k"]]


class LossLabel(NamedTuple):
    """What the student's loss is called, and what it is measured in."""

    name: str
    unit: str

    @property
    def meaning(self) -> str:
        return f"{self.name} between predictions and targets, in {self.unit}."


@dataclass(frozen=True)
class TargetFacts:
    """What a target knows about itself, in plain values: a run writes it down, and who looks at the run reads it there.

    What each means stands at `Target`.
    """

    description: str = "what the target asks for"
    outputs: int | None = None
    reads: tuple[str, ...] = ()
    has_prototypes: bool = False
    clusters: bool = False
    reads_teacher: bool = True
    measures: tuple[str, ...] = ()
    advice: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunContext:
    """What a target may want to know of the run that it is built for."""

    width: int
    """Of the encoder's tokens."""
    patch_size: int
    channels: int
    grid: tuple[int, int]
    """Rows and columns of patches."""
    prototypes: int
    """How many distributions are over, also where the target learns none of its own."""
    batch_size: int
    micro_batches: int
    steps: int
    warmup_steps: int
    predictor_width: int
    """Of the predictions that the head gets."""
    processes: int = 1
    statistics: Statistics | None = None
    """What the images are normalised with; None where it is not known yet."""
    encoder: VisionEncoder | None = None
    """The one that `target.frozen.encoder` names."""


# What `capi.method.health` measures of any run, and of the teacher's tokens.
OF_THE_RUN = ("teacher_gap", "student_gradient")
OF_THE_TEACHER = ("position_share", "effective_rank")


class Target(nn.Module):
    """What must be predicted. Parameters are those of its own loss; buffers, what it keeps of earlier batches."""

    # Under this name its tensors lie in checkpoints.
    name: ClassVar[str] = "target"
    # The student's loss in words, for curves and reports.
    loss_name: ClassVar[str]
    loss_unit: ClassVar[str]
    # What is predicted of the hidden patches, in plain words: "the pixels".
    description: ClassVar[str]
    # The sections and keys of the config that are about it, whose values it is built with.
    reads: ClassVar[tuple[str, ...]] = ()
    # Whether the student's outputs are logits of prototypes, not values; and whether the target learns prototypes of
    # its own beside the student.
    has_prototypes: ClassVar[bool] = False
    clusters: ClassVar[bool] = False
    # Whether `tokens` are the teacher's, so that their health is that of the run.
    reads_teacher: ClassVar[bool] = True
    # Whether it is built with the encoder that `target.frozen.encoder` names.
    wants_encoder: ClassVar[bool] = False
    # Its attributes that `run.compile` compiles, functions of tensors, each with options of torch.compile's inductor.
    compiled: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # The measures of health that it has, by their names in `capi.train.health`; and for some of them what to do where
    # they are too low and too high, in the keys of its own settings.
    measures: ClassVar[tuple[str, ...]] = OF_THE_RUN
    advice: ClassVar[Mapping[str, tuple[str, str]]] = {}
    # How a statistic of this process becomes that of the global batch.
    reduction: Reduction = OneProcess()

    @classmethod
    def outputs(cls, run: RunContext, *_: Any, **settings: Any) -> int:  # noqa: ARG003 - the contract
        """How many values the student gives for a patch."""
        return run.prototypes if cls.has_prototypes else run.width

    @classmethod
    def build(cls, run: RunContext, teacher: Teacher, *_: Any, **settings: Any) -> "Target":  # noqa: ARG003 - the contract
        """The target of a run. `settings` are those of the sections that it reads, and `target.options`."""
        return cls(run, **settings)

    @classmethod
    def facts(cls, outputs: int | None = None) -> TargetFacts:
        """What is known of it without its code. `outputs` are the values that the student gives for a patch."""
        names = (each.name for each in fields(TargetFacts) if each.name != "outputs")
        return TargetFacts(outputs=outputs, **{name: getattr(cls, name) for name in names})

    def flop(self, counts: Counts, head: Head) -> int:  # noqa: ARG002 - the contract
        """FLOP of making the targets of one image from the tokens; `head` is as the student's."""
        return 0

    def memory(self, counts: Counts, work: Workload, outputs: int) -> list[MemoryPart]:
        """What making and keeping the targets takes beside parameters; the student gives `outputs` for a patch."""
        return [MemoryPart("targets", FLOAT32 * work.micro_batch * counts.predicted * outputs, STUDENT)]

    def prepare(self, device: torch.device, precision: torch.dtype) -> None:
        """Choose what depends on the device and on the precision of the run, before the first batch."""

    def pretend_full(self) -> None:
        """Become as it is after many steps, so that a measured iteration costs as much as most of a run."""

    @property
    def sharded_buffers(self) -> Mapping[str, int]:
        """Buffers that differ from process to process, by name, each with its number of blocks.

        The first axis of such a buffer is this process's part of images that are ordered by their number in the global
        batch: of each block the processes have equal parts, in order, and checkpoints keep the whole. All other buffers
        are the same on every process.
        """
        return {}

    def tokens(self, teacher: Teacher, images: Float[Tensor, "b c height width"]) -> Float[Tensor, "b n e"]:
        """What targets are made from, one row for each patch of the whole images."""
        tokens: Tensor = teacher(images)
        return tokens

    def forward(
        self,
        tokens: Sequence[Float[Tensor, "_ n e"]],
        predict_index: Sequence[Int[Tensor, "_ p"]],
        step: int = 0,  # noqa: ARG002 - the contract
    ) -> Targets:
        """Its own loss over all micro-batches, and their targets, made when their turn comes.

        Without one, and where each patch makes its own target, `make` is all that there is to write.
        """
        pairs = zip(tokens, predict_index, strict=True)
        return Targets(no_own_loss(), (self.make(at_predicted(part, index)) for part, index in pairs))

    def make(self, rows: Float[Tensor, "b p e"]) -> Float[Tensor, "b p k"]:
        """The targets of the predicted patches, from their tokens in float32."""
        raise NotImplementedError

    @abstractmethod
    def student_loss(self, outputs: Float[Tensor, "b p k"], targets: Float[Tensor, "b p k"]) -> Float[Tensor, ""]:
        """How far the student's outputs are from the targets, in float32."""

    def summary(self, targets: Float[Tensor, "b p k"]) -> dict[str, Tensor]:
        """Means over the targets of a micro-batch."""
        return distribution_summary(targets) if self.has_prototypes else value_summary(targets)

    def metrics(self, own_loss: Float[Tensor, ""], summary: Mapping[str, Tensor]) -> dict[str, Float[Tensor, ""]]:  # noqa: ARG002 - the contract
        """What is logged of a batch, by name: its own loss if it has one, and what `summary` says."""
        return distribution_metrics(summary) if self.has_prototypes else value_metrics(summary)

    def follow(self, skipped: Float[Tensor, ""] | None = None) -> None:
        """Keep what was seen of the last batch, but where `skipped` is 1, a tensor on the device, change nothing."""


def at_predicted(tokens: Float[Tensor, "b n e"], predict_index: Int[Tensor, "b p"]) -> Float[Tensor, "b p e"]:
    """The rows of the predicted patches, in float32."""
    return tokens.gather(1, predict_index[..., None].expand(-1, -1, tokens.shape[2])).float()


def no_own_loss() -> Float[Tensor, ""]:
    """The loss of a target without parameters: zero, and its gradient leads nowhere."""
    return torch.zeros((), requires_grad=True)


def distribution_summary(targets: Float[Tensor, "b p k"]) -> dict[str, Tensor]:
    """The summary of targets that are distributions over prototypes."""
    return {"target_entropy": target_entropy(targets), "mean_target": targets.mean((0, 1))}


def distribution_metrics(summary: Mapping[str, Tensor]) -> dict[str, Float[Tensor, ""]]:
    """How undecided the targets are, in nat, and which share of the prototypes they make use of."""
    return {"target_entropy": summary["target_entropy"], "prototype_use": prototype_use(summary["mean_target"])}


def value_summary(targets: Float[Tensor, "b p k"]) -> dict[str, Tensor]:
    """The summary of targets that are plain values."""
    return {"mean": targets.mean((0, 1)), "square": targets.square().mean((0, 1))}


def value_metrics(summary: Mapping[str, Tensor]) -> dict[str, Float[Tensor, ""]]:
    """How much targets differ from patch to patch: the std of a channel, on average. Constant targets have 0."""
    variance = (summary["square"] - summary["mean"].square()).clamp_min(0)
    return {"target_deviation": variance.sqrt().mean()}
