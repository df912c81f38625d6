"""Tensors in a file of the safetensors format, which holds no code: a JSON header, then the bytes of each tensor.

The header is checked against the size of the file before any memory is taken for what it describes. Tensors are read
and written one at a time, so that a file never lies in memory twice.
"""

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capi.runtime.documents import open_regular, parse_object

# The format's names.
DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
# A model of 10,000 tensors has a header of about 1 MB.
_MOST_HEADER_BYTES = 2**24
MOST_AXES = 16
# More than any disk has; torch cannot count bytes beyond 2^63.
MOST_BYTES = 2**60


class CutOffError(ValueError):
    """The header describes more bytes than the file has."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file, and where its bytes begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def length(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str] = field(default_factory=dict)


def read_header(path: Path) -> Header:
    """The header of a file, checked. Damage is a ValueError, `CutOffError` where the end of the file is missing."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES or file.read(1) != b"{":
            raise ValueError("no header of safetensors")
        if 8 + length > size:
            raise CutOffError("the header is cut off")
        file.seek(8)
        values = parse_object(file.read(length), "the header")
    metadata = values.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("metadata that are not strings")
    entries = {name: _entry(value, 8 + length) for name, value in values.items()}
    _check_extents(entries, 8 + length, size)
    return Header(entries, metadata)


def _entry(value: Any, base: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("a tensor without dtype, shape and data_offsets")
    name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError("a dtype that is not known")
    if not _are_counts(shape, MOST_AXES) or not _are_counts(offsets, 2) or len(offsets) != 2:
        raise ValueError("a shape or offsets that are not whole numbers from 0 on")
    check_size(tuple(shape), DTYPES[name])
    entry = TensorEntry(DTYPES[name], tuple(shape), base + offsets[0])
    if offsets[1] - offsets[0] != entry.length:
        raise ValueError("a tensor whose shape and bytes differ")
    return entry


def check_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse shapes that torch cannot describe, also those of empty tensors."""
    if math.prod(max(side, 1) for side in shape) * dtype.itemsize > MOST_BYTES:
        raise ValueError("a shape that no disk could hold")


def _are_counts(values: Any, most: int) -> bool:
    return isinstance(values, list) and len(values) <= most and all(type(each) is int and each >= 0 for each in values)


def _check_extents(entries: Mapping[str, TensorEntry], base: int, size: int) -> None:
    """Tensors follow each other without a gap, and fill the file."""
    end = base
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.length)):
        if entry.start != end:
            raise ValueError("tensors that overlap or leave a gap")
        end += entry.length
    if end > size:
        raise CutOffError("a tensor is cut off")
    if end < size:
        raise ValueError("bytes behind the last tensor")


def read_tensor(file: io.BufferedIOBase, entry: TensorEntry) -> Tensor:
    """A tensor in memory of its own, which the file does not share."""
    contents = bytearray(entry.length)
    file.seek(entry.start)
    if file.readinto(contents) != len(contents):
        raise CutOffError("a tensor is cut off")
    if not contents:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(contents, dtype=entry.dtype).view(entry.shape)


def write_tensors(
    path: Path,
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    value_of: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors of these dtypes and shapes and flush them to the disk; each is asked for when its turn comes."""
    # The widest numbers first, so that each tensor begins at a multiple of its number's size.
    names = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        dtype, shape = kinds[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb", buffering=0) as file:
        _write_all(file, len(text).to_bytes(8, "little") + text)
        for name in names:
            value = value_of(name).detach().cpu().contiguous()
            if (value.dtype, tuple(value.shape)) != kinds[name]:
                raise ValueError(f"{name} is not of the dtype and shape that the header says")
            _write_all(file, value.view(-1).view(torch.uint8).numpy())
        os.fsync(file.fileno())


def _write_all(file: Any, contents: Any) -> None:
    """A single write may take a part only: at most 2 GiB, or what is left of a disk."""
    left = memoryview(contents)
    while left:
        left = left[file.write(left) :]
