"""Images of one size that lie behind each other in binary files, as CIFAR and STL-10 come.

A folder with such files is the training images of its data set; labels are left to evaluations.
"""

import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from capi.errors import CapiError

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
        self._counts = [_records_in(path, layout) for path in self.files]

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
    if not path.is_file():
        raise CapiError(f"the file {path} is missing, which belongs to those beside it: unpack the archive again")
    size = os.path.getsize(path)
    if not size or size % layout.record_bytes:
        raise CapiError(
            f"{path} has {size} bytes, which are no whole records of {layout.record_bytes}: unpack the archive again"
        )
    return size // layout.record_bytes


@dataclass(frozen=True)
class RecordSet:
    """The training images of a data set: their files, how these are laid out, and a file that no other folder has."""

    files: tuple[str, ...]
    layout: RecordLayout
    mark: str


CIFAR10 = RecordSet(
    tuple(f"data_batch_{number}.bin" for number in range(1, 6)), RecordLayout(32, label_bytes=1), "data_batch_1.bin"
)
# The first byte is the coarse class, the second the fine one.
CIFAR100 = RecordSet(("train.bin",), RecordLayout(32, label_bytes=2, label_at=1), "fine_label_names.txt")
STL10 = RecordSet(("train_X.bin",), RecordLayout(96, columns_first=True), "train_X.bin")


def open_records(folder: Path) -> Records | None:
    """The training images of a folder in one of these layouts; None of any other folder."""
    for records in (CIFAR10, CIFAR100, STL10):
        if (folder / records.mark).is_file():
            return Records([folder / name for name in records.files], records.layout)
    return None
