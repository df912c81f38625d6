"""Packing images into tar shards that webdataset reads too: `capi shards`.

Which image goes where follows from the source and the settings alone, and headers hold no times or owners, so the
shards are the same bytes whatever the workers. A shard is written under another name and renamed when it is complete,
after its index; what is complete is kept when the same command runs again.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from capi.data.decoding import BrokenImageError
from capi.data.locations import DataLocation, labeled_images
from capi.data.reader import read_bytes
from capi.data.shards import IndexFacts, Member, find_index, index_places, write_index
from capi.data.sources import ENDINGS, EncodedImages, Files, ImageSource, SizedSource
from capi.errors import CapiError, counted
from capi.runtime.atomic import atomic_open, atomic_write, remove_leftovers
from capi.runtime.devices import choose_workers
from capi.runtime.documents import parse_object, read_object
from capi.runtime.image_files import open_image
from capi.runtime.lock import locked
from capi.runtime.privacy import hide_path
from capi.runtime.progress import TaskProgress, default_console
from capi.runtime.randomness import Stream, permuted
from capi.runtime.summary import Summary

PLAN, MANIFEST = "packing.json", "shards.json"
SHARD_MEGABYTES = 256
_BLOCK = 512
# What a sample takes in a tar beside its image: headers, its name, padding.
_OVERHEAD = 5 * _BLOCK
AT_ONCE = 8
# Of the formats that training reads; what begins otherwise is opened, to see whether it is an image at all.
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM", b"II", b"MM", b"P5", b"P6")
_USUAL_ENDINGS = {"JPEG": "jpg", "MPO": "jpg", "JPEG2000": "jp2", "HEIF": "heic"}


@dataclass(frozen=True)
class PackingSettings:
    """How images are divided into shards."""

    shard_megabytes: float | None = None
    """Size of a shard, about; by default 256."""
    per_shard: int | None = None
    """Images of a shard, in place of its size."""
    shuffle: int | None = 0
    """The seed of the order in the shards; None keeps the order of the source."""


@dataclass(frozen=True, repr=False)
class Packed(Summary):
    """What lies in the folder."""

    path: Path
    shards: int
    images: int
    bytes: int
    reused: int
    """Shards that were there already."""
    left_out: dict[str, str]
    """Images that could not be read, and why."""

    def summary(self) -> tuple[str, dict[str, str]]:
        rows = {"train": f"data={self.pattern!r}", "size": f"{self.bytes / 1e6:.1f} MB"}
        if self.reused:
            rows["kept"] = f"{self.reused} that were there already"
        if self.left_out:
            name, reason = next(iter(self.left_out.items()))
            rows["left out"] = f"{len(self.left_out)}, such as {name}: {reason}"
        return f"{self.path}: {counted(self.images, 'image')} in {counted(self.shards, 'shard')}", rows

    @property
    def pattern(self) -> str:
        """What to give as --data."""
        several = f"{{{_number(0)}..{_number(self.shards - 1)}}}"
        return str(self.path / f"{several if self.shards > 1 else _number(0)}.tar")


def pack_shards(
    data: DataLocation,
    out: str | Path,
    *,
    shard_megabytes: float | None = None,
    per_shard: int | None = None,
    shuffle: int | None = 0,
    workers: int | None = None,
    console: Console | None = None,
) -> Packed:
    """Pack images, of a folder or of anything that `pretrain` takes, into tar shards with an index.

    A shard has about `shard_megabytes` (256 by default) or `per_shard` images, in an order shuffled by the seed
    `shuffle` or, with None, as they lie. The same call resumes where an earlier one ended.
    """
    console = console or default_console()
    images, labels = labeled_images(data, console)
    settings = PackingSettings(shard_megabytes, per_shard, shuffle)
    return pack(images, Path(out), settings, labels=labels, workers=workers, console=console)


def pack(
    source: ImageSource,
    out: Path,
    settings: PackingSettings,
    *,
    labels: Sequence[str] | None = None,
    workers: int | None = None,
    console: Console | None = None,
) -> Packed:
    """Write a source's images as shards, with an index each and a manifest; resume where an earlier call ended."""
    _check(settings)
    order = _order(len(source), settings.shuffle)
    ends = _ends(source, order, settings)
    _begin(out, source, settings, len(ends), labels)
    packer = _Packer(source, out, order, labels)
    busy = f"another process is packing into {out}: wait for it, or choose another --out"
    with locked(out / PLAN, busy=busy):
        remove_leftovers(out)
        done = {number: facts for number in range(len(ends)) if (facts := _finished(out / f"{_number(number)}.tar"))}
        reused = len(done)
        with TaskProgress("packing", len(source), console, sum(facts.images for facts in done.values())) as progress:
            done |= _write_missing(packer, ends, done, workers or min(choose_workers(None, None), AT_ONCE), progress)
        return _conclude(packer, settings, [done[number] for number in range(len(ends))], reused)


def _write_missing(
    packer: "_Packer", ends: list[int], done: Mapping[int, IndexFacts], workers: int, progress: TaskProgress
) -> dict[int, IndexFacts]:
    """The shards that are not there yet; an error or Ctrl-C ends all threads."""
    starts, made = [0, *ends[:-1]], {}
    with ThreadPoolExecutor(workers) as pool:
        waiting = {
            pool.submit(packer.write, number, starts[number], ends[number], progress): number
            for number in range(len(ends))
            if number not in done
        }
        try:
            for future in as_completed(waiting):
                made[waiting[future]] = future.result()
        except BaseException:
            packer.stopped = True
            pool.shutdown(cancel_futures=True)
            raise
    return made


class _Packer:
    """Writes one shard after the other, in any order and by several threads: the work is reading and writing."""

    def __init__(
        self, source: ImageSource, out: Path, order: npt.NDArray[np.int64], labels: Sequence[str] | None
    ) -> None:
        self.source, self.out, self.order, self.labels = source, out, order, labels
        self.classes = {name: number for number, name in enumerate(sorted(set(labels or ())))}
        self.stopped = False
        # Files can be read by several threads at once; what keeps things open cannot.
        self.alone: AbstractContextManager[Any] = nullcontext() if isinstance(source, Files | EncodedImages) else Lock()

    def write(self, number: int, start: int, end: int, progress: TaskProgress) -> IndexFacts:
        """One shard with the images at these places of the order."""
        path = self.out / f"{_number(number)}.tar"
        members, left_out = [], {}
        with atomic_open(path) as file:
            tar = _Tar(file)
            for place in range(start, end):
                if self.stopped:
                    raise CapiError("stopped")
                try:
                    index = int(self.order[place])
                    with self.alone:
                        content = read_bytes(self.source, index)
                    ending = _ending(self.source.name(index), content)
                except (OSError, BrokenImageError) as error:
                    name = self.source.name(int(self.order[place]))
                    left_out[name] = hide_path(str(error))
                else:
                    members.append(self._add(tar, place, ending, content))
                progress.advance()
            tar.close()
            file.flush()
            notes = {"sha256": tar.digest.hexdigest(), "left_out": json.dumps(left_out)}
            # The index comes first, so that a shard under its own name always has one.
            return write_index(index_places(path)[0], members, os.fstat(file.fileno()), notes)

    def _add(self, tar: "_Tar", place: int, ending: str, content: bytes) -> Member:
        index, key = int(self.order[place]), f"{place:09d}"
        offset = tar.add(f"{key}.{ending}", content)
        about: dict[str, Any] = {"name": self.source.name(index)}
        if self.labels is not None:
            about["label"] = self.labels[index]
            tar.add(f"{key}.cls", str(self.classes[self.labels[index]]).encode())
        tar.add(f"{key}.json", json.dumps(about).encode())
        return Member(f"{key}.{ending}", offset, len(content))


class _Tar:
    """A plain tar without times and owners, hashed as it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest, self.offset = file, hashlib.sha256(), 0

    def add(self, name: str, content: bytes) -> int:
        """Says where the content begins."""
        header = tarfile.TarInfo(name)
        header.size, header.mode = len(content), 0o644
        self._write(header.tobuf(tarfile.USTAR_FORMAT))
        start = self.offset
        self._write(content)
        self._write(b"\0" * (-len(content) % _BLOCK))
        return start

    def close(self) -> None:
        """Two empty blocks, and the padding that every tar has."""
        self._write(b"\0" * 2 * _BLOCK)
        self._write(b"\0" * (-self.offset % tarfile.RECORDSIZE))
        self.file.flush()

    def _write(self, content: bytes) -> None:
        self.file.write(content)
        self.digest.update(content)
        self.offset += len(content)


def _order(size: int, shuffle: int | None) -> npt.NDArray[np.int64]:
    places = torch.arange(size)
    if shuffle is None:
        return places.numpy()
    return permuted(places, size, shuffle, torch.zeros_like(places), stream=Stream.PACKING).numpy()


def _ends(source: ImageSource, order: npt.NDArray[np.int64], settings: PackingSettings) -> list[int]:
    """The end of each shard, in places of the order."""
    size = len(source)
    if settings.per_shard is not None:
        return [min(end, size) for end in range(settings.per_shard, size + settings.per_shard, settings.per_shard)]
    if not isinstance(source, SizedSource):
        raise CapiError(
            "how large these images are is not known before they are read: give --per-shard, a number of images"
        )
    limit = (settings.shard_megabytes or SHARD_MEGABYTES) * 1e6
    written = np.cumsum(source.sizes()[order] + _OVERHEAD)
    numbers = ((written - 1) // limit).astype(np.int64)
    return [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), size]


def _ending(name: str, content: bytes) -> str:
    """The ending of the file, or of its format where a row of a table has none."""
    ending = name.rpartition(".")[2].lower()
    is_usual = f".{ending}" in ENDINGS
    if is_usual and content.startswith(_BEGINNINGS):
        return ending
    try:
        with open_image(content) as image:
            kind = str(image.format)
    except Exception as error:
        raise BrokenImageError(f"it is no image (it begins with {content[:12]!r})") from error
    return ending if is_usual else _USUAL_ENDINGS.get(kind, kind.lower())


def _check(settings: PackingSettings) -> None:
    if settings.per_shard is not None and settings.shard_megabytes is not None:
        raise CapiError("a shard has a size or a number of images: give --shard-size or --per-shard, not both")
    given = settings.shard_megabytes if settings.per_shard is None else settings.per_shard
    if given is not None and not given > 0:
        raise CapiError("a shard must hold something: give a --per-shard or --shard-size above 0")
    if settings.shuffle is not None and not 0 <= settings.shuffle < 2**63:
        raise CapiError("the seed of the shuffle must be a whole number from 0 to 9223372036854775807")


def _begin(
    out: Path, source: ImageSource, settings: PackingSettings, shards: int, labels: Sequence[str] | None
) -> None:
    """Make the folder, or make sure that it holds the beginning of the same work."""
    plan = {
        "source": source.fingerprint,
        "images": len(source),
        "shards": shards,
        "labels": None if labels is None else hashlib.sha256("\n".join(labels).encode()).hexdigest()[:16],
        **vars(settings),
        "shard_megabytes": None if settings.per_shard else float(settings.shard_megabytes or SHARD_MEGABYTES),
    }
    path = out / PLAN
    try:
        out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            before = read_object(path)
            changed = [
                f"{key} was {before.get(key)}, is {value}" for key, value in plan.items() if before.get(key) != value
            ]
            if changed:
                raise CapiError(
                    f"{out} holds shards of something else ({'; '.join(changed)}): give the same source and settings, "
                    "or another --out"
                )
            return
        if any(out.iterdir()):
            raise CapiError(f"{out} is not empty and holds no shards of ours: give --out a new or empty folder")
        atomic_write(path, json.dumps(plan, indent=1) + "\n")
    except (NotADirectoryError, FileExistsError, PermissionError) as error:
        raise CapiError(f"{out} cannot be a folder for shards ({error.strerror}): choose another --out") from error


def _finished(shard: Path) -> IndexFacts | None:
    """The index of a shard that is complete."""
    if not shard.exists():
        return None
    index = find_index(shard)
    return index[1] if index and "sha256" in index[1].notes else None


def _conclude(packer: _Packer, settings: PackingSettings, shards: list[IndexFacts], reused: int) -> Packed:
    """Write the manifest, which says what every shard holds."""
    left_out: dict[str, str] = {}
    for facts in shards:
        left_out |= parse_object(facts.notes["left_out"], "the index of a shard")
    images, size = sum(facts.images for facts in shards), sum(facts.shard_bytes for facts in shards)
    if not images:
        raise CapiError(
            f"{counted(len(packer.source), 'image')} tried, and none could be read, the first is "
            f"{next(iter(left_out.items()))}"
        )
    manifest = {
        "images": images,
        "bytes": size,
        "source": packer.source.fingerprint,
        "settings": vars(settings),
        "classes": list(packer.classes),
        "left_out": left_out,
        "shards": [
            {
                "file": f"{_number(number)}.tar",
                "images": facts.images,
                "bytes": facts.shard_bytes,
                "sha256": facts.notes["sha256"],
            }
            for number, facts in enumerate(shards)
        ],
    }
    atomic_write(packer.out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return Packed(packer.out, len(shards), images, size, reused, left_out)


def _number(shard: int) -> str:
    return f"{shard:06d}"
