"""Segmentation on frozen patch features: k-NN over patches, and logistic regression.

Images and masks are squeezed to one size. A patch's label is the most frequent of its pixels; patches whose most
frequent label is ignored are not learnt from. Settings are chosen by mean IoU on held-out training images, then all
training images are used and the test images scored, once, with the chosen setting.

Memory is bounded: training features lie in one array that may be mapped to a file, held-out and test images are
segmented batch by batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from capi.errors import CapiError, counted, some_of
from capi.evals.features import Encoding, encoded_batches
from capi.evals.fitted_probes import KnnSegmenter, LogisticSegmenter, Probe, Segmenter, encoder_facts
from capi.evals.logistic import LogisticRegression
from capi.evals.metrics import SegmentationScore
from capi.evals.neighbors import Distance, NearestNeighbors
from capi.evals.patches import (
    PatchCollector,
    Patches,
    Standard,
    Ties,
    TrainingPatches,
    pixel_blocks,
    unblock,
    vote_blocks,
)
from capi.evals.results import (
    Outcome,
    SegmentedImage,
    Split,
    departures,
    few_held_out,
    hold_out,
    precision_notes,
    size_notes,
)
from capi.evals.tasks import MaskedImages, SegmentationData, place_of_mask
from capi.runtime.protocol import (
    PAPER_DISTANCES,
    PAPER_ITERATIONS,
    PAPER_NEIGHBORS,
    PAPER_SHARE,
    PAPER_SIZE,
    PAPER_STRENGTHS,
    PAPER_TOLERANCE,
)
from capi.types import Features, Int, VisionEncoder


@dataclass(frozen=True)
class Trial:
    """A function from the features of a batch and the size of its images to the labels of each setting, in order."""

    predict: Callable[[Features, tuple[int, int]], Iterator[Tensor]]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SegmentationProtocol(ABC):
    """What both protocols share. `run` chooses a setting, fits it on all training images and tests it."""

    data: SegmentationData
    encoding: Encoding = field(default_factory=Encoding)
    standardize: bool = True
    validation_share: float = PAPER_SHARE
    seed: int = 0
    pictures: int = 0
    kind: ClassVar[str]
    paper: ClassVar[dict[str, Any]] = {"validation_share": PAPER_SHARE, "standardize": True}

    def run(self, encoder: VisionEncoder) -> Outcome:
        self._check_data()
        encoding = self.encoding.fitted(encoder.patch_size)
        split = hold_out(len(self.data.train.images), self.validation_share, self.seed)
        patches = self.collect(encoder, encoding, split)
        grid, warnings = self.grid(encoder, encoding, patches.fit, split)
        chosen = max(grid, key=lambda row: row["validation"] or 0.0)
        segmenter, more = self.fit(patches.every, chosen)
        score, drawn = self.test(encoder, encoding, segmenter)
        return Outcome(
            scores={
                f"{self.data.test_name} mIoU": score.mean_iou(),
                f"{self.data.test_name} pixel accuracy": score.pixel_accuracy(),
            },
            chosen=chosen,
            grid=grid,
            deviations=[
                *departures(self, self.paper),
                *precision_notes(encoding.precision),
                *size_notes(self.encoding.size, encoding.size, encoder.patch_size, PAPER_SIZE),
                *self.data.notes,
            ],
            warnings=[
                *self.left_out(patches.fit),
                *warnings,
                *more,
                *few_held_out(len(split.held_out), classes=len(self.data.classes), settings=len(grid)),
                *self._warnings(patches.every),
            ],
            details=self._details(patches, score, held_out=len(split.held_out) if len(grid) > 1 else 0),
            probe=Probe(
                kind=self.kind,
                model=segmenter,
                classes=dict(self.data.classes),
                size=encoding.size,
                encoder=encoder_facts(encoder),
                ignored=tuple(sorted(self.data.ignored)),
            ),
            pictures=drawn,
        )

    def _check_data(self) -> None:
        for name, part in (("training", self.data.train), (self.data.test_name, self.data.test)):
            if len(part.images) == 0:
                raise CapiError(f"the {name} split has no images")
            if len(part.images) != len(part.masks):
                raise CapiError(f"the {name} split has {len(part.images)} images, but {len(part.masks)} masks")

    @abstractmethod
    def settings(self, fit: Patches) -> list[dict[str, Any]]:
        """What is to be tried with these patches."""

    def left_out(self, fit: Patches) -> list[str]:  # noqa: ARG002 - the contract's signature
        """Warnings of settings that cannot be tried with these patches."""
        return []

    @abstractmethod
    def tries(self, fit: Patches, settings: Sequence[Mapping[str, Any]]) -> Trial:
        """All settings at once, so that what they share is computed once."""

    @abstractmethod
    def fit(self, patches: Patches, setting: Mapping[str, Any]) -> tuple[Segmenter, list[str]]:
        """A segmenter with one setting, and warnings."""

    def grid(
        self, encoder: VisionEncoder, encoding: Encoding, fit: Patches, split: Split
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Every setting with its mean IoU on held-out images, and warnings; a single setting needs no trial."""
        settings = self.settings(fit)
        if len(settings) == 1:
            return [{**settings[0], "validation": None}], []
        trial = self.tries(fit, settings)
        scores = [self.score() for _ in settings]
        for features, masks in self.encoded(encoder, encoding, self.data.train, "held-out images", split.held_out):
            for score, predicted in zip(scores, trial.predict(features, encoding.size), strict=True):
                score.update(masks, predicted)
        rows = zip(settings, scores, strict=True)
        return [{**setting, "validation": score.mean_iou()} for setting, score in rows], trial.warnings

    def collect(self, encoder: VisionEncoder, encoding: Encoding, split: Split) -> TrainingPatches:
        """Features and pixel labels of all training patches."""
        order, done = torch.cat([split.fit, split.held_out]), 0
        collector = PatchCollector(encoding, self.data.ignored, self.standardize)
        for features, masks in self.encoded(encoder, encoding, self.data.train, "training images", order):
            flat = features.feature_map.flatten(0, 2)
            an_image = len(flat) // len(masks)
            to_fit = (torch.arange(done, done + len(masks)) < len(split.fit)).repeat_interleave(an_image)
            collector.add(flat, self.blocks(features, masks), to_fit, capacity=len(order) * an_image)
            done += len(masks)
        return collector.finish()

    def blocks(self, features: Features, masks: Tensor) -> Tensor:
        """The pixel labels of each patch, in the order of the feature map."""
        rows, columns = features.feature_map.shape[1:3]
        labels = [*self.data.classes, *self.data.ignored]
        label_type = torch.uint8 if min(labels) >= 0 and max(labels) < 256 else torch.int32
        return pixel_blocks(masks.to(label_type), rows, columns)

    def encoded(
        self,
        encoder: VisionEncoder,
        encoding: Encoding,
        images: MaskedImages,
        what: str,
        numbers: Int[Tensor, " s"] | None = None,
    ) -> Iterator[tuple[Features, Tensor]]:
        """Features and masks, batch by batch; a label that the data set does not have is an error."""
        for batch in encoded_batches(
            encoder,
            images.images,
            encoding,
            what=what,
            numbers=numbers,
            masks=images.masks,
            whole=True,
            registers=False,
        ):
            assert batch.read.masks is not None
            masks = batch.read.masks.long()
            self._refuse_unknown(masks, images, batch.read.numbers)
            yield batch.features, masks

    def _refuse_unknown(self, masks: Tensor, images: MaskedImages, numbers: Tensor) -> None:
        strange = ~is_among(masks, {*self.data.classes, *self.data.ignored})
        if strange.any():
            place = int(strange.flatten(1).any(1).nonzero()[0])
            value = int(masks[place][strange[place]][0])
            mask = place_of_mask(images.masks, int(numbers[place]))
            raise CapiError(
                f"the mask {mask} holds the label {value}, which is neither a class "
                f"nor ignored: name it in `ignored`, or in the classes"
            )

    def score(self) -> SegmentationScore:
        return SegmentationScore(sorted(self.data.classes), sorted(self.data.ignored))

    def test(
        self, encoder: VisionEncoder, encoding: Encoding, segmenter: Segmenter
    ) -> tuple[SegmentationScore, list[SegmentedImage]]:
        """Score all test images, and keep the first few to look at."""
        score, first = self.score(), 0
        drawn: list[SegmentedImage] = []
        for features, masks in self.encoded(encoder, encoding, self.data.test, f"{self.data.test_name} images"):
            predicted = segmenter.segment(features, encoding.size)
            score.update(masks, predicted)
            for place in range(min(len(masks), max(self.pictures - len(drawn), 0))):
                name = self.data.test.images.name(first + place)
                drawn.append(SegmentedImage(name, first + place, masks[place], predicted[place]))
            first += len(masks)
        return score, drawn

    def _warnings(self, patches: Patches) -> list[str]:
        seen = set(patches.labels.unique().tolist())
        absent = [name for label, name in sorted(self.data.classes.items()) if label not in seen]
        if not absent:
            return []
        return [f"no training patch is mostly {some_of(absent, 5)}: these classes can hardly be predicted"]

    def _details(self, patches: TrainingPatches, score: SegmentationScore, *, held_out: int) -> dict[str, Any]:
        return {
            "IoU by class": {
                self.data.classes.get(label, f"{label} (ignored)"): value for label, value in score.iou().items()
            },
            "classes": len(self.data.classes),
            "training images": len(self.data.train.images),
            "held-out images": held_out,
            "test images": len(self.data.test.images),
            "training patches": len(patches.every.labels),
            "patches left out": patches.left_out,
        }


def is_among(labels: Tensor, among: Collection[int]) -> Tensor:
    """Which labels are known; looked up in a table, where `torch.isin` would sort millions of pixels."""
    lowest, highest = min(among), max(among)
    table = torch.zeros(highest - lowest + 3, dtype=torch.bool)
    table[torch.tensor(sorted(among)) - lowest + 1] = True
    places = labels.flatten().clamp(lowest - 1, highest + 1).sub_(lowest - 1)
    return table.index_select(0, places).view(labels.shape)


@dataclass(frozen=True)
class KnnSegmentation(SegmentationProtocol):
    """The nearest training patches vote at every pixel with their own pixel at that place."""

    neighbors: tuple[int, ...] = PAPER_NEIGHBORS
    distances: tuple[Distance, ...] = PAPER_DISTANCES
    ignored_labels_vote: bool = True
    ties: Ties = "smallest"
    kind: ClassVar[str] = "knn-segmentation"
    paper: ClassVar[dict[str, Any]] = {
        **SegmentationProtocol.paper,
        "neighbors": PAPER_NEIGHBORS,
        "distances": PAPER_DISTANCES,
        "ignored_labels_vote": True,
        "ties": "smallest",
    }

    def settings(self, fit: Patches) -> list[dict[str, Any]]:
        possible = [number for number in self.neighbors if number <= len(fit.labels)]
        if not possible:
            raise CapiError(f"{len(fit.labels)} patches are fewer than the {min(self.neighbors)} neighbours to ask")
        return [{"distance": distance, "neighbours": k} for distance in self.distances for k in possible]

    def left_out(self, fit: Patches) -> list[str]:
        impossible = sorted(number for number in self.neighbors if number > len(fit.labels))
        return (
            [f"neighbours {impossible} were not tried: they are more than {counted(len(fit.labels), 'patch')}"]
            if impossible
            else []
        )

    def tries(self, fit: Patches, settings: Sequence[Mapping[str, Any]]) -> Trial:
        most = max(setting["neighbours"] for setting in settings)
        searches = {
            distance: NearestNeighbors(most, distance, device=self.encoding.device).fit(
                fit.features, mean=fit.standard.mean, scale=fit.standard.scale
            )
            for distance in self.distances
        }

        def predict(features: Features, _size: tuple[int, int]) -> Iterator[Tensor]:
            rows, columns = features.feature_map.shape[1:3]
            flat = features.feature_map.flatten(0, 2)
            nearest = {distance: search.kneighbors(flat).index for distance, search in searches.items()}
            for setting in settings:
                index = nearest[setting["distance"]][:, : setting["neighbours"]]
                voted = vote_blocks(
                    fit.blocks, index, ignored=self._ignored, clean=not self.ignored_labels_vote, ties=self.ties
                )
                yield unblock(voted, rows, columns).long()

        return Trial(predict)

    def fit(self, patches: Patches, setting: Mapping[str, Any]) -> tuple[Segmenter, list[str]]:
        segmenter = KnnSegmenter(
            bank=patches.features,
            blocks=patches.blocks,
            mean=patches.standard.mean,
            scale=patches.standard.scale,
            neighbors=setting["neighbours"],
            distance=setting["distance"],
            ignored=self._ignored,
            clean=not self.ignored_labels_vote,
            ties=self.ties,
        )
        return segmenter, []

    @property
    def _ignored(self) -> tuple[int, ...]:
        return tuple(sorted(self.data.ignored))


@dataclass(frozen=True)
class LogisticSegmentation(SegmentationProtocol):
    """Logistic regression on single patches, every penalty fitted at once."""

    strengths: tuple[float, ...] = PAPER_STRENGTHS
    tolerance: float = PAPER_TOLERANCE
    max_iterations: int = PAPER_ITERATIONS
    kind: ClassVar[str] = "logistic-segmentation"
    paper: ClassVar[dict[str, Any]] = {
        **SegmentationProtocol.paper,
        "strengths": PAPER_STRENGTHS,
        "tolerance": PAPER_TOLERANCE,
        "max_iterations": PAPER_ITERATIONS,
    }

    def settings(self, fit: Patches) -> list[dict[str, Any]]:  # noqa: ARG002 - the contract's signature
        return [{"strength": strength} for strength in self.strengths]

    def tries(self, fit: Patches, settings: Sequence[Mapping[str, Any]]) -> Trial:
        model = self._regression([setting["strength"] for setting in settings], fit)
        segmenters = [_segmenter(model, number, fit.standard) for number in range(len(settings))]

        def predict(features: Features, size: tuple[int, int]) -> Iterator[Tensor]:
            for segmenter in segmenters:
                yield segmenter.segment(features, size)

        return Trial(predict, _not_converged(model, "while settings were tried"))

    def fit(self, patches: Patches, setting: Mapping[str, Any]) -> tuple[Segmenter, list[str]]:
        model = self._regression([setting["strength"]], patches)
        return _segmenter(model, 0, patches.standard), _not_converged(model, "on all training images")

    def _regression(self, strengths: Sequence[float], patches: Patches) -> LogisticRegression:
        regression = LogisticRegression(
            strengths, tolerance=self.tolerance, max_iterations=self.max_iterations, device=self.encoding.device
        )
        mean, scale = patches.standard
        return regression.fit(patches.features, patches.labels.long(), mean=mean, scale=scale)


def _not_converged(model: LogisticRegression, when: str) -> list[str]:
    rows = zip(model.strengths, model.converged_.tolist(), strict=True)
    open_still = [f"{strength:g}" for strength, converged in rows if not converged]
    return [f"logistic regression with C = {', '.join(open_still)} has not converged {when}"] if open_still else []


def _segmenter(model: LogisticRegression, which: int, standard: Standard) -> LogisticSegmenter:
    """One penalty's weights, in units of the features as the encoder gives them."""
    weight = model.coef_[which].double() / standard.scale.double()
    bias = model.intercept_[which].double() - weight @ standard.mean.double()
    return LogisticSegmenter(weight.cpu(), bias.cpu(), model.classes_)
