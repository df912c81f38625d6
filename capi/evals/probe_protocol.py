"""Classification by heads that are trained by gradient: the attentive probe and the linear probe.

All settings train at once on the same batches; the one with the best accuracy on held-out training images is tested.
The paper's schedule streams random crops through the encoder. For small data the features of each image's middle are
computed once and kept, and the steps are fewer; the outcome names both as departures.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, Literal

from torch import Tensor

from capi.errors import counted
from capi.evals.classification import (
    available_kinds,
    check_data,
    choice_warnings,
    class_warnings,
    data_details,
    make_probe,
    score_tests,
)
from capi.evals.features import (
    EncodedBatch,
    Encoding,
    EncodingJob,
    FeatureRows,
    encoded,
    encoded_batches,
    frame_of,
    vectors_of,
)
from capi.evals.fitted_probes import AttentiveClassifier, Classifier, LinearClassifier
from capi.evals.images import AugmentedBatches, shuffled
from capi.evals.probes import (
    LARGEST_HEAD_WIDTH,
    PAPER_GRID,
    RELEASED_HEADS,
    AttentiveProbes,
    LinearProbes,
    Part,
    Probes,
    ProbeSchedule,
    ProbeSetting,
    ProbeTrainer,
    best_setting,
    head_width,
    judged,
    train_probes,
)
from capi.evals.results import Outcome, Split, departures, hold_out, precision_notes, size_notes
from capi.evals.tasks import ClassificationData
from capi.runtime.protocol import PAPER_DECAYS, PAPER_RATES, PAPER_SHARE, PAPER_SIZE
from capi.types import Features, VisionEncoder

ScheduleName = Literal["auto", "paper", "small"]
InputKind = Literal["patches", "mean_patch", "pooled", "both"]
LossMean = Literal["head", "released"]
PAPER = ProbeSchedule()
WARMUP_SHARE = PAPER.warmup_steps / PAPER.total_steps
# From this many training images on, the paper's schedule is the default.
LARGE = 100_000
# For small data: passes over the images, their batch, and the steps that are taken at least.
SMALL_EPOCHS, SMALL_BATCH, FEWEST_STEPS = 50, 256, 200


@dataclass(frozen=True)
class TrainedClassification:
    """What both probes share. `run` trains all settings, chooses one and tests it."""

    data: ClassificationData
    encoding: Encoding = field(default_factory=Encoding)
    schedule: ScheduleName = "auto"
    iterations: int | None = None
    batch_size: int | None = None
    learning_rates: tuple[float, ...] = PAPER_RATES
    weight_decays: tuple[float, ...] = PAPER_DECAYS
    loss_mean: LossMean = "head"
    validation_share: float = PAPER_SHARE
    seed: int = 0
    features: tuple[InputKind, ...] = ()
    kind: ClassVar[str]
    paper: ClassVar[dict[str, Any]] = {"validation_share": PAPER_SHARE}

    def run(self, encoder: VisionEncoder) -> Outcome:
        check_data(self.data)
        encoding = self.encoding.fitted(encoder.patch_size)
        kinds, warnings = available_kinds(encoder, self.features, encoding)
        split = hold_out(len(self.data.train.labels), self.validation_share, self.seed)
        plan = self._plan(len(split.fit))
        sizes = {"settings": len(self.settings), "width": encoder.width, "classes": len(self.data.classes)}
        probes: dict[str, Probes] = {
            kind: new_probes(kind, **sizes, seed=self.seed).to(encoding.device) for kind in kinds
        }
        samples = (Cached if self.small else Streamed)(self, encoder, encoding, split, plan, kinds)
        heads = RELEASED_HEADS if self.loss_mean == "released" else 1
        trainers = {kind: ProbeTrainer(each, self.settings, plan, heads_in_mean=heads) for kind, each in probes.items()}
        train_probes(
            trainers,
            samples.training(),
            on_step=lambda step, _: encoding.progress("training heads", step + 1, plan.total_steps),
        )
        validation = judged(probes, samples.held_out())
        best = {kind: best_setting(judgement) for kind, judgement in validation.items()}
        classifiers = {kind: fitted(probes[kind].select(best[kind]), kind) for kind in kinds}
        standing = {
            kind: (float(judgement.accuracy[best[kind]]), -float(judgement.loss[best[kind]]))
            for kind, judgement in validation.items()
        }
        quoted = max(kinds, key=standing.__getitem__)
        grids = {kind: self._grid(kind, judgement.accuracy.tolist()) for kind, judgement in validation.items()}
        failed = sum(int(trainer.failed_.sum()) for trainer in trainers.values())
        return Outcome(
            scores=score_tests(classifiers, quoted, encoder, self.data.tests, encoding),
            chosen=grids[quoted][best[quoted]],
            grid=[row for rows in grids.values() for row in rows],
            deviations=[
                *self._deviations(plan),
                *_head_deviations(kinds, encoder.width),
                *precision_notes(encoding.precision),
                *size_notes(self.encoding.size, encoding.size, encoder.patch_size, PAPER_SIZE),
                *self.data.notes,
            ],
            warnings=[
                *warnings,
                *([f"{counted(failed, 'head')} given up, since the loss was not finite"] if failed else []),
                *choice_warnings(self.data, split, [row for rows in grids.values() for row in rows]),
                *class_warnings(self.data),
            ],
            details=data_details(self.data, split) | {"iterations": plan.total_steps, "batch": plan.batch_size},
            probe=make_probe(self.kind, classifiers[quoted], self.data, encoding, encoder),
        )

    def _grid(self, kind: str, scores: list[float]) -> list[dict[str, Any]]:
        return [
            {
                "feature": kind,
                "learning_rate": setting.learning_rate,
                "weight_decay": setting.weight_decay,
                "validation": None if math.isnan(score) else score,
            }
            for setting, score in zip(self.settings, scores, strict=True)
        ]

    @property
    def settings(self) -> tuple[ProbeSetting, ...]:
        return tuple(ProbeSetting(rate, decay) for decay in self.weight_decays for rate in self.learning_rates)

    @property
    def small(self) -> bool:
        return self.schedule == "small" or (self.schedule == "auto" and len(self.data.train.labels) < LARGE)

    def _plan(self, count: int) -> ProbeSchedule:
        """Steps and batch, of the whole job however many devices there are."""
        batch = self.batch_size or (min(SMALL_BATCH, count) if self.small else PAPER.batch_size)
        steps = self.iterations
        if steps is None:
            passes = math.ceil(SMALL_EPOCHS * count / batch)
            steps = min(max(passes, FEWEST_STEPS), PAPER.total_steps) if self.small else PAPER.total_steps
        return ProbeSchedule(total_steps=steps, warmup_steps=int(steps * WARMUP_SHARE), batch_size=batch)

    def _deviations(self, plan: ProbeSchedule) -> list[str]:
        deviations = departures(self, self.paper)
        for what, value, paper in (
            ("iterations", plan.total_steps, PAPER.total_steps),
            ("warm-up", plan.warmup_steps, PAPER.warmup_steps),
            ("batch", plan.batch_size, PAPER.batch_size),
        ):
            if value != paper:
                deviations.append(f"{what}: {value} instead of {paper}")
        if self.small:
            deviations.append("features of each image's middle, computed once, instead of random crops and flips")
        if self.settings != PAPER_GRID:
            deviations.append(
                f"a grid of {counted(len(self.settings), 'setting')} that is not the paper's of {len(PAPER_GRID)}"
            )
        return deviations


@dataclass(frozen=True)
class AttentiveClassification(TrainedClassification):
    """One learned query attends to the patches; a linear classifier reads what it gathers."""

    features: tuple[InputKind, ...] = ("patches",)
    kind: ClassVar[str] = "attentive"


@dataclass(frozen=True)
class LinearClassification(TrainedClassification):
    """A linear classifier of the mean patch, of the pooled vector, and of both; all in one pass over the images."""

    features: tuple[InputKind, ...] = ("mean_patch", "pooled", "both")
    kind: ClassVar[str] = "linear"
    paper: ClassVar[dict[str, Any]] = {**TrainedClassification.paper, "features": ("mean_patch", "pooled", "both")}


def probe_input(features: Features, kind: InputKind) -> Tensor:
    """What a probe looks at."""
    return features.feature_map.flatten(1, 2) if kind == "patches" else vectors_of(features, kind)


def new_probes(kind: InputKind, *, settings: int, width: int, classes: int, seed: int) -> Probes:
    """Untrained heads, one for each setting."""
    if kind == "patches":
        return AttentiveProbes(settings=settings, width=width, classes=classes, seed=seed)
    return LinearProbes(settings=settings, width=width * (2 if kind == "both" else 1), classes=classes, seed=seed)


def fitted(probes: Probes, kind: InputKind) -> Classifier:
    """The one head of these probes, ready to classify."""
    if isinstance(probes, AttentiveProbes):
        return AttentiveClassifier.of(probes)
    assert isinstance(probes, LinearProbes)
    assert kind != "patches"
    return LinearClassifier.of(probes, kind)


def _head_deviations(kinds: tuple[InputKind, ...], width: int) -> list[str]:
    used = head_width(width)
    if "patches" not in kinds or used == LARGEST_HEAD_WIDTH:
        return []
    return [f"attention heads of width {used} instead of {LARGEST_HEAD_WIDTH}, of which {width} is no multiple"]


@dataclass(frozen=True)
class Samples(ABC):
    """Where the probes' inputs come from: the parts of every training batch, and the held-out images."""

    protocol: TrainedClassification
    encoder: VisionEncoder
    encoding: Encoding
    split: Split
    plan: ProbeSchedule
    kinds: tuple[InputKind, ...]

    @property
    def pooled(self) -> bool:
        return any(kind in {"pooled", "both"} for kind in self.kinds)

    @property
    def patches(self) -> bool:
        return "patches" in self.kinds

    def inputs(self, features: Features) -> dict[str, Tensor]:
        return {kind: probe_input(features, kind) for kind in self.kinds}

    def part(self, batch: EncodedBatch) -> Part:
        return self.inputs(batch.features), self.labels[batch.read.numbers]

    @property
    def labels(self) -> Tensor:
        return self.protocol.data.train.labels

    @abstractmethod
    def training(self) -> Iterator[Iterator[Part]]:
        """The parts of every step's batch."""

    @abstractmethod
    def held_out(self) -> Iterator[Part]:
        """The images to choose a setting by."""


class Streamed(Samples):
    """Random crops go through the encoder at every step; the held-out images once, at the end."""

    def training(self) -> Iterator[Iterator[Part]]:
        batches = AugmentedBatches(
            self.protocol.data.train.images,
            frame_of(self.encoder, self.encoding),
            self.split.fit,
            self.plan.batch_size,
            self.protocol.seed,
            piece_size=self.encoding.batch_size,
        )
        count = self.plan.total_steps * batches.pieces
        job = EncodingJob(batches, count, pooled=self.pooled, patches=self.patches, registers=False)
        pieces = encoded(self.encoder, job, self.encoding)
        for _ in range(self.plan.total_steps):
            yield map(self.part, islice(pieces, batches.pieces))

    def held_out(self) -> Iterator[Part]:
        for batch in encoded_batches(
            self.encoder,
            self.protocol.data.train.images,
            self.encoding,
            what="held-out images",
            numbers=self.split.held_out,
            pooled=self.pooled,
            patches=self.patches,
            registers=False,
        ):
            yield self.part(batch)


class Cached(Samples):
    """The features of every training image are computed once."""

    @cached_property
    def _store(self) -> dict[str, Tensor]:
        images = self.protocol.data.train.images
        rows: dict[str, FeatureRows] = {
            kind: FeatureRows(len(images), self.encoding, f"train_{kind}") for kind in self.kinds
        }
        for batch in encoded_batches(
            self.encoder,
            images,
            self.encoding,
            what="training images",
            pooled=self.pooled,
            patches=self.patches,
            registers=False,
        ):
            for kind, values in self.inputs(batch.features).items():
                rows[kind].append(values)
        return {kind: each.filled for kind, each in rows.items()}

    def training(self) -> Iterator[Iterator[Part]]:
        # Filled before the first step is asked for.
        store, fit = self._store, self.split.fit
        chosen = (
            fit[shuffled(step, self.plan.batch_size, len(fit), self.protocol.seed)]
            for step in range(self.plan.total_steps)
        )
        return (self._parts(store, numbers) for numbers in chosen)

    def held_out(self) -> Iterator[Part]:
        yield from self._parts(self._store, self.split.held_out)

    def _parts(self, store: Mapping[str, Tensor], numbers: Tensor) -> Iterator[Part]:
        for part in numbers.split(SMALL_BATCH):
            yield {name: values[part] for name, values in store.items()}, self.labels[part]
