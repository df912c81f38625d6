"""A random part of a data set, for a quick look; the outcome names it as a departure."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from capi.data.sources import ImageSource
from capi.evals.tasks import (
    AnsweredImages,
    EvaluationData,
    LabeledImages,
    MaskedImages,
    MaskSource,
    SegmentationData,
    place_of_mask,
)
from capi.runtime.randomness import permuted


def limited(data: EvaluationData, *, train: int | None, tests: int | None, seed: int) -> EvaluationData:
    """The data with at most so many training images, and so many of each test set; the seed chooses them."""
    if isinstance(data, SegmentationData):
        notes = (*_note("training", data.train.images, train), *_note(data.test_name, data.test.images, tests))
        return replace(
            data,
            train=_masked(data.train, train, seed),
            test=_masked(data.test, tests, seed),
            notes=(*data.notes, *notes),
        )
    notes = tuple(note for name, test in data.tests.items() for note in _note(name, test.images, tests))
    numbers = _chosen(len(data.train.images), train, seed)
    part = data.train
    if numbers is not None:
        part = LabeledImages(PartOfImages(part.images, numbers), part.labels[numbers])
    return replace(
        data,
        train=part,
        tests={name: _answered(test, tests, seed) for name, test in data.tests.items()},
        notes=(*data.notes, *_note("training", data.train.images, train), *notes),
    )


class PartOfImages:
    """Some images of a source."""

    def __init__(self, source: ImageSource, numbers: Tensor) -> None:
        self.source, self.numbers = source, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return self.source.name(int(self.numbers[index]))

    def read(self, index: int) -> Any:
        return self.source.read(int(self.numbers[index]))

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint}-{_digest(self.numbers)}"


class PartOfMasks:
    """The masks of those images."""

    def __init__(self, masks: MaskSource, numbers: Tensor) -> None:
        self.masks, self.numbers = masks, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return self.masks.name(int(self.numbers[index]))

    def path(self, index: int) -> Path | str:
        return place_of_mask(self.masks, int(self.numbers[index]))

    def read(self, index: int) -> npt.NDArray[Any]:
        return self.masks.read(int(self.numbers[index]))

    @property
    def fingerprint(self) -> str:
        return f"{self.masks.fingerprint}-{_digest(self.numbers)}"


def _digest(numbers: Tensor) -> str:
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:8]


def _chosen(count: int, most: int | None, seed: int) -> Tensor | None:
    """Numbers in ascending order; None where all are taken."""
    if most is None or count <= most:
        return None
    order = permuted(torch.arange(most), count, seed, torch.ones(most, dtype=torch.int64))
    return order.sort().values


def _answered(images: AnsweredImages, most: int | None, seed: int) -> AnsweredImages:
    numbers = _chosen(len(images.images), most, seed)
    if numbers is None:
        return images
    return replace(images, images=PartOfImages(images.images, numbers), answers=images.answers[numbers])


def _masked(images: MaskedImages, most: int | None, seed: int) -> MaskedImages:
    numbers = _chosen(len(images.images), most, seed)
    if numbers is None:
        return images
    return MaskedImages(PartOfImages(images.images, numbers), PartOfMasks(images.masks, numbers))


def _note(name: str, images: ImageSource, most: int | None) -> tuple[str, ...]:
    return () if most is None or len(images) <= most else (f"a random {most} of {len(images)} {name} images",)
