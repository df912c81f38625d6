"""Where the images lie within a tar shard: an index of names, offsets and sizes, one small file for each shard.

It is written by `capi shards`, or else once by a scan of the shard's headers, and lies beside the shard as
`NAME.tar.index`, or in the user's cache where that place cannot be written. It holds arrays of safetensors and is read
at the place that is asked for, so a billion images need no memory. It counts as long as the shard has the same size,
and the same time or the same headers; and if all its places lie within the shard.

Shards are in the layout of webdataset: members of any tar whose names end as those of images do. An image is read at
its place, by one positioned read; nothing else of the tar is touched, and nothing is unpickled.
"""

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from capi.data.decoding import BrokenImageError
from capi.data.sources import ENDINGS
from capi.errors import CapiError
from capi.runtime.atomic import atomic_write
from capi.runtime.cache import Cache
from capi.runtime.devices import choose_workers
from capi.runtime.documents import READING_THREADS
from capi.runtime.image_files import refuse_special
from capi.runtime.lock import locked
from capi.runtime.progress import TaskProgress

FORMAT = "capi shard index 1"
_BLOCK = 512
# Headers that are compared where only the time of a shard differs.
_COMPARED = 16
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """An image within a shard."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class IndexFacts:
    """What the head of an index says of its shard."""

    shard_bytes: int
    modified: int
    """Nanoseconds, as the file system has it."""
    images: int
    digest: str
    """Of the names, offsets and sizes."""
    notes: dict[str, str]
    """What the writer of the shard noted."""


class ShardIndex:
    """The index of one shard, opened."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="numpy")
        self._places, self._name_ends = (self._file.get_slice(name) for name in ("places", "name_ends"))
        self._names = self._file.get_slice("names")

    def __len__(self) -> int:
        return int(self._places.get_shape()[0])

    def place(self, number: int) -> tuple[int, int]:
        """Offset and size in bytes."""
        offset, size = self._places[number : number + 1][0]
        return int(offset), int(size)

    def fits(self, facts: IndexFacts) -> bool:
        """Whether rows, places and names are what the head says, and every image lies within the shard."""
        shapes = [part.get_shape() for part in (self._places, self._name_ends, self._names)]
        kinds = [part.get_dtype() for part in (self._places, self._name_ends, self._names)]
        if shapes[:2] != [[facts.images, 2], [facts.images + 1]] or kinds != ["I64", "I64", "U8"]:
            return False
        # The library cannot cut what is empty.
        places = self._places[:] if facts.images else np.empty((0, 2), dtype=np.int64)
        ends = self._name_ends[:]
        # The size is taken off the bytes of the shard, since the sum of two large numbers would turn negative.
        inside = (places >= 0).all() and (places[:, 0] <= facts.shard_bytes - places[:, 1]).all()
        return bool(inside and ends[0] == 0 and (np.diff(ends) >= 0).all() and shapes[2] == [int(ends[-1])])

    def sizes(self) -> npt.NDArray[np.int64]:
        # The library cannot cut what is empty.
        return self._places[:, 1:2][:, 0] if len(self) else np.empty(0, dtype=np.int64)

    def name(self, number: int) -> str:
        start, end = self._name_ends[number : number + 2]
        return bytes(self._names[int(start) : int(end)]).decode("utf-8", "surrogateescape")

    def member(self, number: int) -> Member:
        return Member(self.name(number), *self.place(number))


def image_members(shard: Path) -> Iterator[Member]:
    """The images of a tar, in its order. A file that is no tar, or one that was cut off, is an error."""
    with shard.open("rb") as file:
        _refuse_compressed(shard, file.read(6))
        file.seek(0)
        try:
            # No more is read than there is, whatever a header says of the length of what follows it.
            with tarfile.open(fileobj=BoundedFile(file), mode="r:") as archive:  # type: ignore[call-overload]
                size, last = os.fstat(file.fileno()).st_size, -1
                for member in archive:
                    # The library remembers every member it has seen.
                    archive.members = []
                    # A header with a negative size leads back, and would be read forever.
                    if not last < member.offset <= member.offset_data <= size or member.size < 0:
                        raise tarfile.ReadError("a header that leads out of the file")
                    last = member.offset
                    if is_image(member) and member.offset_data + member.size <= size:
                        yield Member(member.name, member.offset_data, member.size)
                end = archive.offset
        except (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError) as error:
            raise CapiError(
                f"{shard} is no tar that can be read ({error}): it may be cut off; fetch or pack it again"
            ) from error
        file.seek(end)
        closing = file.read(_BLOCK)
        # The library stops silently at a header that it cannot read.
        if closing != b"\0" * _BLOCK:
            raise CapiError(
                f"{shard} is damaged or cut off at byte {end} of {shard.stat().st_size}: fetch or pack it again"
            )


class BoundedFile:
    """A file whose `read` asks for no more memory than the file has bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.size, self.seek, self.tell, self._read = os.fstat(file.fileno()).st_size, file.seek, file.tell, file.read

    def read(self, size: int = -1) -> bytes:
        return self._read(min(size, max(self.size - self.tell(), 0)))


def is_image(member: tarfile.TarInfo) -> bool:
    """Whether a member is an image by its ending; hidden ones are left out, as in folders."""
    base = member.name.rpartition("/")[2]
    # A sparse member does not lie in the tar as it is.
    return member.isreg() and not member.issparse() and base.lower().endswith(ENDINGS) and not base.startswith(".")


def index_places(shard: Path) -> tuple[Path, Path]:
    """Where the index of a shard may lie: beside it, or in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "capi" / "shards"
    key = hashlib.sha256(os.fsencode(shard.absolute())).hexdigest()[:32]
    return shard.with_name(f"{shard.name}.index"), cache / f"{key}.index"


def find_index(shard: Path) -> tuple[Path, IndexFacts] | None:
    """The index of a shard, if there is one that is true of it."""
    for place in index_places(shard):
        facts = read_facts(place)
        if facts is not None and _is_of(place, facts, shard):
            return place, facts
    return None


def make_index(shard: Path, *, beside: bool = True) -> tuple[Path, IndexFacts]:
    """Scan a shard's headers and keep what they say: beside the shard, or else in the user's cache."""
    before = shard.stat()
    members = list(image_members(shard))
    own, cached = index_places(shard)
    if beside:
        with suppress(OSError):
            return own, write_index(own, members, before)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        return cached, write_index(cached, members, before)
    except OSError as error:
        raise CapiError(
            f"an index of {shard} can be written neither beside it nor at {cached} ({error.strerror}): make one of "
            "them writable, or set XDG_CACHE_HOME"
        ) from error


def write_index(
    path: Path, members: Iterable[Member], status: os.stat_result, notes: dict[str, str] | None = None
) -> IndexFacts:
    """Write the index of a shard of this size and time."""
    members = list(members)
    names = [member.name.encode("utf-8", "surrogateescape") for member in members]
    arrays: dict[str, npt.NDArray[Any]] = {
        "places": np.array([member[1:] for member in members], dtype=np.int64).reshape(-1, 2),
        "name_ends": np.cumsum([0, *(len(name) for name in names)], dtype=np.int64),
        "names": np.frombuffer(b"".join(names), dtype=np.uint8),
    }
    digest = hashlib.sha256(b"".join(arrays[name].tobytes() for name in ("places", "name_ends", "names"))).hexdigest()
    facts = IndexFacts(status.st_size, status.st_mtime_ns, len(members), digest, notes or {})
    head = {"bytes": facts.shard_bytes, "modified": facts.modified, "images": facts.images, "digest": digest}
    metadata = {"format": FORMAT, **{key: str(value) for key, value in head.items()}, **facts.notes}
    atomic_write(path, save(arrays, metadata))
    return facts


def read_facts(path: Path) -> IndexFacts | None:
    """What the head of an index says, or None where there is none that can be read."""
    try:
        refuse_special(path)
        with safe_open(path, framework="numpy") as file:
            head = dict(file.metadata() or {})
            if head.pop("format", None) != FORMAT:
                return None
            size, modified, images = (int(head.pop(key)) for key in ("bytes", "modified", "images"))
            return IndexFacts(size, modified, images, head.pop("digest"), head)
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def _is_of(place: Path, facts: IndexFacts, shard: Path) -> bool:
    """Whether an index is true of a shard: by size and time, or, after copying, by size and some headers."""
    status = shard.stat()
    if status.st_size != facts.shard_bytes:
        return False
    try:
        index = ShardIndex(place)
        if not index.fits(facts):
            return False
    except (OSError, SafetensorError, ValueError, TypeError):
        return False
    return status.st_mtime_ns == facts.modified or _headers_agree(index, shard)


def _headers_agree(index: ShardIndex, shard: Path) -> bool:
    if not len(index):
        return False
    chosen = {int(number) for number in np.linspace(0, len(index) - 1, min(len(index), _COMPARED))}
    with shard.open("rb") as file:
        for number in sorted(chosen):
            name, offset, size = index.member(number)
            if offset < _BLOCK:
                return False
            file.seek(offset - _BLOCK)
            try:
                header = tarfile.TarInfo.frombuf(file.read(_BLOCK), "utf-8", "surrogateescape")
            except tarfile.HeaderError:
                return False
            # A long name stands in a header before this one, and is cut off here.
            same = name == header.name or (len(name) > 100 and name[:90] == header.name[:90])
            if header.size != size or not same:
                return False
    return True


def _refuse_compressed(shard: Path, beginning: bytes) -> None:
    for magic, kind in _COMPRESSED.items():
        if beginning.startswith(magic):
            raise CapiError(
                f"{shard} is compressed ({kind}), and the images of a compressed tar cannot be read one by one: unpack "
                "it to a plain .tar (images are compressed already)"
            )


# Images that are shuffled together: some shards, whose bytes a machine's memory keeps.
WINDOW = 65_536
OPEN_FILES = 128


def read_at(file: int, offset: int, size: int) -> bytes:
    """Read so many bytes at a place of an open file."""
    content = os.pread(file, size, offset)
    while len(content) < size:
        # A network file system may give less than was asked for.
        more = os.pread(file, size - len(content), offset + len(content))
        if not more:
            raise BrokenImageError(f"the file ends before byte {offset + size}")
        content += more
    return content


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
        return read_at(self._files[shard], offset, size)

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
        self._files = Cache(lambda shard: os.open(self.paths[shard], os.O_RDONLY), OPEN_FILES, close=os.close)
        self._opened = Cache(lambda shard: ShardIndex(Path(self.indices[shard])), OPEN_FILES)

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
    with ThreadPoolExecutor(READING_THREADS) as pool:
        indexes = list(pool.map(find_index, paths))
    if None in indexes:
        with _one_at_a_time(paths[0]):
            # Another process of the same run may have made them meanwhile.
            indexes = [index or find_index(path) for path, index in zip(paths, indexes, strict=True)]
            missing = [number for number, index in enumerate(indexes) if index is None]
            made = _make_indices([paths[number] for number in missing], console, workers, index_beside)
            for number, index in zip(missing, made, strict=True):
                indexes[number] = index
    indices = [index for index in indexes if index is not None]
    if not sum(facts.images for _, facts in indices):
        several = str(paths[0]) if len(paths) == 1 else f"{len(paths)} shards from {paths[0]} on"
        raise CapiError(f"{several} hold no images: their members must end as images do, such as 000123.jpg")
    return Shards(paths, indices)


def _make_indices(
    paths: Sequence[Path], console: Console | None, workers: int | None, beside: bool
) -> list[tuple[Path, IndexFacts]]:
    workers = max(min(choose_workers(workers or None, None), len(paths)), 1)
    made = []
    with TaskProgress("reading the headers of shards", len(paths), console) as progress:
        if workers == 1:
            for path in paths:
                made.append(make_index(path, beside=beside))
                progress.advance()
            return made
        with ProcessPoolExecutor(workers) as pool:
            for index in pool.map(partial(make_index, beside=beside), paths):
                made.append(index)
                progress.advance()
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
    with ThreadPoolExecutor(READING_THREADS) as pool:
        there = list(pool.map(Path.is_file, paths))
    missing = [path for path, is_there in zip(paths, there, strict=True) if not is_there]
    if missing:
        raise CapiError(
            f"{len(missing)} of {len(paths)} shards are missing, the first is {missing[0]}: fetch or pack them, or "
            "name those that are there"
        )
