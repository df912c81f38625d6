"""Images in tar shards, in the layout of webdataset: members of any tar whose names end as those of images do.

An image is read at its place, by one positioned read; nothing else of the tar is touched, and nothing is unpickled.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from capi.data.decoding import BrokenImageError
from capi.data.shard_index import IndexFacts, ShardIndex, find_index, index_places, make_index
from capi.errors import CapiError
from capi.runtime.cache import Kept
from capi.runtime.devices import count_cores
from capi.runtime.lock import locked
from capi.runtime.progress import Telling

# Images that are shuffled together: some shards, whose bytes a machine's memory keeps.
WINDOW = 65_536
OPEN_FILES = 128
_READ_AT_ONCE = 32


class Shards:
    """A numbered set of the images in tar files; each file is a block."""

    usual_window = WINDOW

    def __init__(self, paths: Sequence[Path], indices: Sequence[tuple[Path, IndexFacts]]) -> None:
        self.paths, self.indices = list(paths), [str(place) for place, _ in indices]
        self.block_ends = np.cumsum([facts.images for _, facts in indices], dtype=np.int64)
        self.digests = [facts.digest for _, facts in indices]
        self._keep()

    def __len__(self) -> int:
        return int(self.block_ends[-1])

    def name(self, index: int) -> str:
        shard, number = self._find(index)
        return f"{self.paths[shard].name}/{self._opened[shard].name(number)}"

    def read(self, index: int) -> Path | bytes:
        shard, number = self._find(index)
        offset, size = self._opened[shard].place(number)
        content = os.pread(self._files[shard], size, offset)
        while len(content) < size:
            # A network file system may give less than was asked for.
            more = os.pread(self._files[shard], size - len(content), offset + len(content))
            if not more:
                raise BrokenImageError(f"the shard ends before byte {offset + size}")
            content += more
        return content

    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of every image."""
        return np.concatenate([ShardIndex(Path(place)).sizes() for place in self.indices])

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path, images in zip(self.paths, self.digests, strict=True):
            digest.update(f"{path.name}\n{images}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    def _find(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self.block_ends, index, side="right"))
        return shard, index - (int(self.block_ends[shard - 1]) if shard else 0)

    def _keep(self) -> None:
        self._files = Kept(lambda shard: os.open(self.paths[shard], os.O_RDONLY), OPEN_FILES, close=os.close)
        self._opened = Kept(lambda shard: ShardIndex(Path(self.indices[shard])), OPEN_FILES)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in {"_files", "_opened"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._keep()


def open_shards(
    paths: Sequence[Path], console: Console | None = None, workers: int | None = None, *, index_beside: bool = True
) -> Shards:
    """Shards in this order. Where an index is missing the headers are scanned, once, by so many processes."""
    _refuse_missing(paths)
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        found = list(pool.map(find_index, paths))
    if None in found:
        with _one_at_a_time(paths[0]):
            # Another process of the same run may have made them meanwhile.
            found = [index or find_index(path) for path, index in zip(paths, found, strict=True)]
            missing = [number for number, index in enumerate(found) if index is None]
            made = _make_indices([paths[number] for number in missing], console, workers, index_beside)
            for number, index in zip(missing, made, strict=True):
                found[number] = index
    indices = [index for index in found if index is not None]
    if not sum(facts.images for _, facts in indices):
        raise CapiError(f"{_several(paths)} hold no images: their members must end as images do, such as 000123.jpg")
    return Shards(paths, indices)


def _make_indices(
    paths: Sequence[Path], console: Console | None, workers: int | None, beside: bool
) -> list[tuple[Path, IndexFacts]]:
    workers = max(min(workers or count_cores(), len(paths)), 1)
    made = []
    with Telling("reading the headers of shards", len(paths), console) as telling:
        if workers == 1:
            for path in paths:
                made.append(make_index(path, beside=beside))
                telling.advance()
            return made
        with ProcessPoolExecutor(workers) as pool:
            for index in pool.map(partial(make_index, beside=beside), paths):
                made.append(index)
                telling.advance()
    return made


@contextmanager
def _one_at_a_time(shard: Path) -> Iterator[None]:
    """Let one process of this machine scan while others wait, where the system has locks."""
    lock = index_places(shard)[1].with_suffix(".lock")
    with ExitStack() as stack:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock))
        yield


def _refuse_missing(paths: Sequence[Path]) -> None:
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        there = list(pool.map(Path.is_file, paths))
    missing = [path for path, is_there in zip(paths, there, strict=True) if not is_there]
    if missing:
        raise CapiError(
            f"{len(missing)} of {len(paths)} shards are missing, the first is {missing[0]}: fetch or pack them, or "
            "name those that are there"
        )


def _several(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{len(paths)} shards from {paths[0]} on"
