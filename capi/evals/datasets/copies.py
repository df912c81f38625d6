"""The same photo in training and in a test, where the split is the user's own: the same bytes, under any name.

Files of different sizes differ, and most of equal size differ in their last bytes; only the rest is read as a whole.
A photo that was stored again (resized, recompressed, another format) has other bytes and is not found.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from capi.data.sources import ImageSource, csv_place, is_csv
from capi.errors import warn_once
from capi.evals.tasks import ClassificationData, SegmentationData
from capi.runtime.documents import READING_THREADS, regular_size
from capi.runtime.image_files import MAX_IMAGE_BYTES

_LAST_BYTES = 4096
# Files that are handed to threads at a time: each of them is an object while it waits.
_FILES_AT_A_TIME = 10_000
TaskData = TypeVar("TaskData", ClassificationData, SegmentationData)


def noting_copies(data: TaskData, root: Path | None) -> TaskData:
    """The same data, with a note for each test that has images of the training split, which is also logged.

    Notes name files from `root` on, the folder or CSV of the data: they are in results, which others read.
    """
    folder = csv_place(root)[1] if root is not None and is_csv(root) else root
    notes: list[str] = []
    if isinstance(data, SegmentationData):
        tests = {data.test_name: data.test.images}
    else:
        tests = {name: test.images for name, test in data.tests.items()}
    for name, images in tests.items():
        notes += _notes(name, images, data.train.images, folder)
    # A comparison loads the same data for every cell.
    for note in notes:
        warn_once(note)
    return replace(data, notes=(*data.notes, *notes))


def _notes(name: str, test: ImageSource, train: ImageSource, folder: Path | None) -> list[str]:
    same = copies(test, train)
    if not same:
        return []
    tested, trained = (
        path.relative_to(folder) if folder is not None and path.is_relative_to(folder) else path
        for path in next(iter(same.items()))
    )
    return [
        f"{len(same)} of {len(test)} {name} images are also training images (the same bytes), for example {tested} "
        f"and {trained}: scores on them say nothing about new images, so take them out of one split"
    ]


def copies(tested: ImageSource, trained: ImageSource) -> dict[Path, Path]:
    """The files of one source that another has too, in order, each with the first one that it equals."""
    groups = _of_common_sizes(tested, trained)
    for mark in (_end, _digest):
        marks = [_marks(paths, mark) for paths in groups]
        common = ({*marks[0]} & {*marks[1]}) - {None}
        groups = [
            [path for path, digest in zip(paths, row, strict=True) if digest in common]
            for paths, row in zip(groups, marks, strict=True)
        ]
    digests = [[digest for digest in row if digest in common] for row in marks]
    first = dict(zip(reversed(digests[1]), reversed(groups[1]), strict=True))
    return {path: first[digest] for path, digest in zip(groups[0], digests[0], strict=True)}


def _of_common_sizes(*sources: ImageSource) -> list[list[Path]]:
    """Files of each source that have the size of a file of the other one."""
    sizes = [_sizes(source) for source in sources]
    common = np.intersect1d(sizes[0], sizes[1])
    numbers = [np.flatnonzero(np.isin(row, common[common >= 0])) for row in sizes]
    paths = [[source.read(int(number)) for number in chosen] for source, chosen in zip(sources, numbers, strict=True)]
    return [[path for path in group if isinstance(path, Path)] for group in paths]


def _sizes(source: ImageSource) -> npt.NDArray[np.int64]:
    """Sizes in bytes; -1 for what is no file, and for files that are missing, which raises where they are read."""

    def size(number: int) -> int:
        path = source.read(number)
        try:
            return regular_size(os.stat(path), MAX_IMAGE_BYTES) if isinstance(path, Path) else -1
        except OSError:
            return -1

    return np.fromiter(map(size, range(len(source))), dtype=np.int64, count=len(source))


def _marks(paths: Sequence[Path], mark: Callable[[Path], bytes]) -> list[bytes | None]:
    """What tells files apart; None for those that cannot be read."""

    def marked(path: Path) -> bytes | None:
        try:
            return mark(path)
        except OSError:
            return None

    marks: list[bytes | None] = []
    with ThreadPoolExecutor(READING_THREADS) as pool:
        for start in range(0, len(paths), _FILES_AT_A_TIME):
            marks += pool.map(marked, paths[start : start + _FILES_AT_A_TIME])
    return marks


def _end(path: Path) -> bytes:
    """Size and last bytes: photos of one camera begin alike, but do not end alike."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _LAST_BYTES, 0))
        return size.to_bytes(8, "little") + hashlib.sha256(file.read()).digest()


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
