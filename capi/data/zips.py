"""Images inside zip files, read where they lie: nothing is extracted to the disk.

The directory at the end of a zip is read once; workers then read single images at their places, each by its own handle.
Order, names and fingerprint are those of the folder that was packed: names are sorted, hidden files are left out, and a
single folder that holds everything (`zip -r photos.zip photos`) is no part of them.
"""

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capi.data.decoding import BrokenImageError
from capi.data.shards import OPEN_FILES, BoundedFile, read_at
from capi.data.sources import ENDINGS, ListedNames
from capi.errors import CapiError
from capi.runtime.cache import Cache
from capi.runtime.image_files import MAX_IMAGE_BYTES, refuse_special

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1
# A header before each member: signature, then 22 bytes, then the lengths of its name and of what follows it.
_HEADER = struct.Struct("<4s22xHH")
_NO_HEADER = 'no member of the zip lies where its directory says: pack it again, or test it with "unzip -t"'


class ZipImages(ListedNames):
    """A numbered set of the images in zip files. Of several files, names begin with the file's."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        # What names are relative to.
        self.root = self.paths[0] if len(self.paths) == 1 else None
        named: list[tuple[str, int, zipfile.ZipInfo]] = []
        for number, path in enumerate(paths):
            prefix = f"{path.name}/" if len(paths) > 1 else ""
            named += [(prefix + name, number, member) for name, member in _images(path).items()]
        named.sort(key=lambda each: each[0])
        if not named:
            several = str(paths[0]) if len(paths) == 1 else f"{len(paths)} zip files from {paths[0]} on"
            raise CapiError(f"{several} hold no images (looked for {', '.join(ENDINGS)})")
        super().__init__([name for name, _, _ in named])
        # Arrays instead of many objects: workers share them.
        self._places = np.array(
            [
                (number, member.header_offset, member.compress_size, member.file_size, member.compress_type, member.CRC)
                for _, number, member in named
            ],
            dtype=np.int64,
        )
        self._keep()

    def sizes(self) -> npt.NDArray[np.int64]:
        sizes: npt.NDArray[np.int64] = self._places[:, 3]
        return sizes

    def read(self, index: int) -> bytes:
        number, offset, packed, size, method, checksum = self._places[index].tolist()
        if size > MAX_IMAGE_BYTES:
            raise BrokenImageError(f"{size} bytes, where at most {MAX_IMAGE_BYTES} are read")
        file = self._files[number]
        signature, name_bytes, extra_bytes = _HEADER.unpack(read_at(file, offset, _HEADER.size))
        if signature != b"PK\3\4":
            raise BrokenImageError(_NO_HEADER)
        content = read_at(file, offset + _HEADER.size + name_bytes + extra_bytes, packed)
        if method == zipfile.ZIP_DEFLATED:
            try:
                # Never more than the directory says, whatever is packed.
                content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, max(size, 1))
            except zlib.error as error:
                raise BrokenImageError(f"the zip is damaged here ({error})") from error
        if len(content) != size or zlib.crc32(content) != checksum:
            raise BrokenImageError("the zip is damaged here: size or checksum are others than its directory says")
        return content

    def _keep(self) -> None:
        self._files = Cache(lambda number: os.open(self.paths[number], os.O_RDONLY), OPEN_FILES, close=os.close)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._keep()


def _images(path: Path) -> dict[str, zipfile.ZipInfo]:
    """The images of a zip by name; of several members with one name the last counts, as for other tools."""
    try:
        refuse_special(path)
        with path.open("rb") as file, zipfile.ZipFile(BoundedFile(file)) as archive:
            members = archive.infolist()
            end = os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise CapiError(f"there is no file {path}: fetch or pack it, or name those that are there") from error
    except OSError as error:
        raise CapiError(f"{path} cannot be read ({error.strerror or error}): give access to it") from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, EOFError) as error:
        raise CapiError(
            f"{path} is no zip that can be read ({error}): it may be cut off; fetch or pack it again"
        ) from error
    images = {member.filename: member for member in members if _is_image(member)}
    for name, member in images.items():
        _check(path, name, member, end)
    roots = {name.partition("/")[0] if "/" in name else "" for name in images}
    root = f"{roots.pop()}/" if len(roots) == 1 and "" not in roots else ""
    return {name.removeprefix(root): member for name, member in images.items()}


def _is_image(member: zipfile.ZipInfo) -> bool:
    """Whether a member is an image by its ending; links, hidden files and what macOS adds are left out."""
    # Other systems than Unix leave the kind of a file 0.
    kind = stat.S_IFMT(member.external_attr >> 16)
    parts = member.filename.split("/")
    hidden = any(part.startswith(".") and part not in {".", ".."} for part in parts) or parts[0] == "__MACOSX"
    return kind in {0, stat.S_IFREG} and not hidden and parts[-1].lower().endswith(ENDINGS)


def _check(path: Path, name: str, member: zipfile.ZipInfo, end: int) -> None:
    if name.startswith("/") or "\\" in name or "\n" in name or {".", "..", ""} & set(name.split("/")):
        raise CapiError(f"{path} names {name!r}, which is no name below one folder: pack it again from that folder")
    if member.flag_bits & _ENCRYPTED:
        raise CapiError(f"{path} is encrypted ({name}): unpack it, and give the folder or a zip without a password")
    if member.compress_type not in _METHODS:
        method = zipfile.compressor_names.get(member.compress_type, str(member.compress_type))  # type: ignore[attr-defined]
        raise CapiError(f"{path} has {name} compressed by {method}, expected stored or deflate: pack it with zip -0")
    inside = 0 <= member.header_offset <= end - _HEADER.size and 0 <= member.compress_size <= end
    if not inside or not 0 <= member.file_size < 2**62:
        raise CapiError(f"{path} is damaged or cut off: {name} does not lie within it; fetch or pack it again")
