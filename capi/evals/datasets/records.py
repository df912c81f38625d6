"""The data sets that come in binary files of records (capi/data/records.py): CIFAR-10, CIFAR-100 and STL-10."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from capi.data import records
from capi.data.records import RecordLayout, Records
from capi.errors import CapiError
from capi.evals.datasets.files import (
    MisplacedFilesError,
    answered,
    check_count,
    class_folders,
    classification,
    existing_file,
    list_lines,
)
from capi.evals.tasks import ClassificationData, DataOptions, Dataset, LabeledImages

Name = Literal["cifar10", "cifar100", "stl10"]


@dataclass(frozen=True)
class Binary:
    """How a data set comes in binary files."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    """The file with the names of the classes."""
    classes: int
    layout: RecordLayout
    counts: tuple[int, int]
    pickled: str | None = None
    """The folder of the same data set as Python pickles, which are not read."""
    labels: tuple[str, str] | None = None
    """Files of labels from 1 on, where they do not lie in the records."""


BINARIES: dict[Name, Binary] = {
    "cifar10": Binary(
        folder="cifar-10-batches-bin",
        train=records.CIFAR10.files,
        test=("test_batch.bin",),
        names="batches.meta.txt",
        classes=10,
        layout=records.CIFAR10.layout,
        counts=(50_000, 10_000),
        pickled="cifar-10-batches-py",
    ),
    "cifar100": Binary(
        folder="cifar-100-binary",
        train=records.CIFAR100.files,
        test=("test.bin",),
        names="fine_label_names.txt",
        classes=100,
        layout=records.CIFAR100.layout,
        counts=(50_000, 10_000),
        pickled="cifar-100-python",
    ),
    "stl10": Binary(
        folder="stl10_binary",
        train=records.STL10.files,
        test=("test_X.bin",),
        names="class_names.txt",
        classes=10,
        layout=records.STL10.layout,
        counts=(5_000, 8_000),
        labels=("train_y.bin", "test_y.bin"),
    ),
}


def load(name: Name, root: Path, options: DataOptions) -> ClassificationData:
    """The data set from its binary files, in the root or in a folder of their own, or from class folders."""
    binary = BINARIES[name]
    folder = next((each for each in (root, root / binary.folder) if (each / binary.test[0]).is_file()), None)
    if folder is None:
        return _from_class_folders(binary, root, options)
    classes = list_lines(existing_file(folder / binary.names))
    _refuse_other(len(classes), binary.classes, folder / binary.names)
    train, test = (_labeled(binary, folder, part, classes) for part in (0, 1))
    return ClassificationData(tuple(classes), train, {"test": answered(test)}, _counted(binary, train, test, options))


def _from_class_folders(binary: Binary, root: Path, options: DataOptions) -> ClassificationData:
    if not (root / "train").is_dir():
        if binary.pickled and any(
            (each / "test").is_file() or (each / "test_batch").is_file() for each in (root, root / binary.pickled)
        ):
            raise CapiError(
                f"{root} holds the version of Python pickles ({binary.pickled}), which may run code and are not read: "
                f"get the binary version, {binary.folder}"
            )
        raise MisplacedFilesError(f"there is neither {root / binary.folder / binary.test[0]} nor {root / 'train'}")
    data = classification(
        (root / "train", class_folders(root / "train")), {"test": (root / "test", class_folders(root / "test"))}
    )
    _refuse_other(len(data.classes), binary.classes, root)
    test = data.tests["test"]
    notes = _counted(binary, data.train, LabeledImages(test.images, test.answers[:, 0]), options)
    return ClassificationData(data.classes, data.train, data.tests, notes)


def _labeled(binary: Binary, folder: Path, part: int, classes: Sequence[str]) -> LabeledImages:
    files = [existing_file(folder / name) for name in (binary.train, binary.test)[part]]
    images = Records(files, binary.layout)
    if binary.labels is None:
        labels, source = images.labels(), images.files[0]
    else:
        source = existing_file(folder / binary.labels[part])
        labels = torch.from_numpy(np.fromfile(source, np.uint8).astype(np.int64)) - 1
    if len(labels) != len(images) or not ((labels >= 0) & (labels < len(classes))).all():
        raise CapiError(
            f"{source} does not give each of {len(images)} images one of {len(classes)} classes: unpack the archive "
            "again"
        )
    return LabeledImages(images, labels)


def _counted(binary: Binary, train: LabeledImages, test: LabeledImages, options: DataOptions) -> tuple[str, ...]:
    return check_count(len(train.labels), binary.counts[0], "training images", options) + check_count(
        len(test.labels), binary.counts[1], "test images", options
    )


def _refuse_other(count: int, expected: int, place: Path) -> None:
    if count != expected:
        raise CapiError(f"{place} has {count} classes, expected {expected}: is it another data set?")


_FOLDERS = """\
or as images in class folders:
ROOT/train/CLASS/*.png, ROOT/test/CLASS/*.png
"""
CIFAR10 = Dataset(
    name="cifar10",
    title="CIFAR-10",
    layout=f"""\
ROOT/cifar-10-batches-bin/data_batch_1.bin to data_batch_5.bin, test_batch.bin, batches.meta.txt; or these in ROOT
{_FOLDERS}
As in cifar-10-binary.tar.gz (A. Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html). The version for Python,
cifar-10-batches-py, is made of pickles, which may run code and are not read. 50000 photos of 32 px to train on, 10000
to test on, 10 classes.
""",
    classification=lambda root, options: load("cifar10", root, options),
)
CIFAR100 = Dataset(
    name="cifar100",
    title="CIFAR-100",
    layout=f"""\
ROOT/cifar-100-binary/train.bin, test.bin, fine_label_names.txt; or these in ROOT
{_FOLDERS}
As in cifar-100-binary.tar.gz (A. Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html). The version for Python,
cifar-100-python, is made of pickles, which may run code and are not read. 50000 photos of 32 px to train on, 10000 to
test on; the 100 fine classes.
""",
    classification=lambda root, options: load("cifar100", root, options),
)
STL10 = Dataset(
    name="stl10",
    title="STL-10",
    layout=f"""\
ROOT/stl10_binary/train_X.bin, train_y.bin, test_X.bin, test_y.bin, class_names.txt; or these in ROOT
{_FOLDERS}
As in stl10_binary.tar.gz (A. Coates, H. Lee and A. Ng, https://cs.stanford.edu/~acoates/stl10/). 5000 photos of 96 px
to train on, 8000 to test on, 10 classes; the ten folds of the training photos and the 100000 photos without labels are
not looked at.
""",
    classification=lambda root, options: load("stl10", root, options),
)
