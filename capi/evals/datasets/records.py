"""Images of one size that lie behind each other in binary files, and the data sets that come so: CIFAR and STL-10."""

import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

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

CHANNELS = 3


@dataclass(frozen=True)
class RecordLayout:
    """A record: bytes of labels, of which one counts, then the red, green and blue planes by rows or by columns."""

    side: int
    label_bytes: int = 0
    label_at: int = 0
    columns_first: bool = False

    @property
    def record_bytes(self) -> int:
        return self.label_bytes + CHANNELS * self.side**2


class Records:
    """Images by number over several files; each is read when it is asked for and handed on as a PNG."""

    def __init__(self, files: Sequence[Path], layout: RecordLayout) -> None:
        self.files, self.layout = list(files), layout
        self._counts = [_records_in(existing_file(path), layout) for path in self.files]

    def __len__(self) -> int:
        return sum(self._counts)

    def name(self, index: int) -> str:
        path, record = self._place(index)
        return f"{path.stem}/{record:05d}"

    def read(self, index: int) -> bytes:
        path, record = self._place(index)
        size = CHANNELS * self.layout.side**2
        with path.open("rb") as file:
            file.seek(record * self.layout.record_bytes + self.layout.label_bytes)
            planes = np.frombuffer(file.read(size), np.uint8).reshape(CHANNELS, self.layout.side, self.layout.side)
        # To height, width, channel.
        pixels = planes.transpose(2, 1, 0) if self.layout.columns_first else planes.transpose(1, 2, 0)
        written = io.BytesIO()
        # Without loss, and hardly compressed: it is read again at once.
        Image.fromarray(np.ascontiguousarray(pixels)).save(written, "PNG", compress_level=1)
        return written.getvalue()

    def labels(self) -> torch.Tensor:
        """The label of each record, as the files count them."""
        parts = [np.fromfile(path, np.uint8).reshape(-1, self.layout.record_bytes) for path in self.files]
        return torch.from_numpy(np.concatenate(parts)[:, self.layout.label_at].astype(np.int64))

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:16]

    def _place(self, index: int) -> tuple[Path, int]:
        for path, count in zip(self.files, self._counts, strict=True):
            if index < count:
                return path, index
            index -= count
        raise IndexError(index)


def _records_in(path: Path, layout: RecordLayout) -> int:
    size = os.path.getsize(path)
    if not size or size % layout.record_bytes:
        raise CapiError(
            f"{path} has {size} bytes, which are no whole records of {layout.record_bytes}: unpack the archive again"
        )
    return size // layout.record_bytes


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
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        names="batches.meta.txt",
        classes=10,
        layout=RecordLayout(32, label_bytes=1),
        counts=(50_000, 10_000),
        pickled="cifar-10-batches-py",
    ),
    # The first byte is the coarse class, the second the fine one.
    "cifar100": Binary(
        folder="cifar-100-binary",
        train=("train.bin",),
        test=("test.bin",),
        names="fine_label_names.txt",
        classes=100,
        layout=RecordLayout(32, label_bytes=2, label_at=1),
        counts=(50_000, 10_000),
        pickled="cifar-100-python",
    ),
    "stl10": Binary(
        folder="stl10_binary",
        train=("train_X.bin",),
        test=("test_X.bin",),
        names="class_names.txt",
        classes=10,
        layout=RecordLayout(96, columns_first=True),
        counts=(5_000, 8_000),
        labels=("train_y.bin", "test_y.bin"),
    ),
}


def load(name: Name, root: Path, options: DataOptions) -> ClassificationData:
    """From the binary files, in the root or in a folder of their own, or from class folders."""
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
    images = Records([folder / name for name in (binary.train, binary.test)[part]], binary.layout)
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
