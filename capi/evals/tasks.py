"""What an evaluation is given: images with classes or with masks, for training and for testing.

A data set (`capi.evals.datasets`) reads its files into one of these; a protocol needs nothing else. Classes and files
are in an order of their own (sorted, or the data set's list), never in that of the disk.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt
from torch import Tensor

from capi.data.sources import ImageSource
from capi.types import Int

NO_ANSWER = -1


@dataclass(frozen=True)
class LabeledImages:
    """Images and the class of each, a number below the number of classes."""

    images: ImageSource
    labels: Int[Tensor, " s"]


@dataclass(frozen=True)
class AnsweredImages:
    """Images of a test and the right answers to each, of which there may be several.

    Rows of `answers` are filled up with -1. The answers may count other classes than the head was trained on: then
    `answer_of_class` says for each class of the head which answer it stands for (-1: none). `restricted` leaves
    classes that stand for no answer out of the choice; otherwise choosing one of them is wrong.
    """

    images: ImageSource
    answers: Int[Tensor, "s m"]
    answer_of_class: Int[Tensor, " c"] | None = None
    restricted: bool = False


@dataclass(frozen=True)
class ClassificationData:
    """Images to train on, and test sets by name. `notes` are departures from the official data set."""

    classes: tuple[str, ...]
    train: LabeledImages
    tests: Mapping[str, AnsweredImages]
    notes: tuple[str, ...] = ()


@runtime_checkable
class MaskSource(Protocol):
    """Label images by number, in the order of the images they belong to."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def read(self, index: int) -> npt.NDArray[Any]:
        """The label of every pixel, (height, width), as the data set counts them."""
        ...

    @property
    def fingerprint(self) -> str: ...


def place_of(source: ImageSource, number: int) -> Path | str:
    """Where an image lies, for messages; the name of one that is in memory."""
    content = source.read(number)
    return content if isinstance(content, Path) else source.name(number)


def place_of_mask(masks: MaskSource, number: int) -> Path | str:
    """Where a mask lies; the name of one that is in memory."""
    path: Callable[[int], Path | str] = getattr(masks, "path", masks.name)
    return path(number)


@dataclass(frozen=True)
class MaskedImages:
    """Images and their masks."""

    images: ImageSource
    masks: MaskSource


@dataclass(frozen=True)
class SegmentationData:
    """Images with masks to train on and to test on.

    `classes` names each label that counts, `ignored` are labels of pixels that do not; a label that is in neither is
    an error. Nothing is ignored unless the data set says so. `test_name` is what the test images are called.
    """

    classes: Mapping[int, str]
    ignored: frozenset[int]
    train: MaskedImages
    test: MaskedImages
    test_name: str = "test"
    notes: tuple[str, ...] = ()


EvaluationData = ClassificationData | SegmentationData


@dataclass(frozen=True)
class DataOptions:
    """What a user may say about a data set beside where it lies; a data set refuses those it does not read."""

    train: str | None = None
    """Name of the split to train on."""
    tests: tuple[str, ...] | None = None
    """Names of the splits to test on."""
    test_share: float | None = None
    """Share of the images to test on where the data set has no splits; None: `files.TEST_SHARE`."""
    label: str | None = None
    """A CSV's column with the class."""
    exclude: Path | None = None
    """A file with the names of images to leave out, a name a line."""
    ignored: frozenset[int] | None = None
    """Labels of pixels that do not count."""
    class_names: tuple[str, ...] | None = None
    """Names of the labels 0, 1, 2, ... of masks."""
    more: Mapping[str, Path] = field(default_factory=dict)
    """Where further test sets lie, by name."""
    verify_counts: bool = True
    """Whether the data set must have as many images as the official one."""


@dataclass(frozen=True)
class Dataset:
    """A data set as this package knows it: what it is, how its files lie, and how they are read."""

    name: str
    title: str
    layout: str
    """How the files must lie under the folder that is given, with the official documentation this follows."""
    classification: Callable[[Path, DataOptions], ClassificationData] | None = None
    segmentation: Callable[[Path, DataOptions], SegmentationData] | None = None
    reads: frozenset[str] = frozenset()
    """Which fields of `DataOptions` mean something here, beside `verify_counts`."""
    own_split: bool = False
    """Whether the user decides which images are trained and which tested on."""
    needs_folder: bool = True
    """Whether its files lie in a folder of the user's."""
