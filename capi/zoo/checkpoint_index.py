"""Which parts of which tensors lie where in a checkpoint folder.

Each process that writes a checkpoint writes one safetensors file. The metadata of its header say of every tensor that
is only a part: the shape of the whole, and where in it the part begins.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from capi.runtime.documents import parse_object
from capi.runtime.tensor_file import MOST_AXES, MOST_BYTES, check_size, read_header

FILES = "*.safetensors"
_PARTS = "parts"
TensorShape = tuple[int, ...]


class Chunk(NamedTuple):
    """A part of a tensor: where its bytes lie, and where in the tensor it begins."""

    file: str
    start: int
    length: int
    offsets: TensorShape
    shape: TensorShape


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: TensorShape
    chunks: list[Chunk]

    def check(self, name: str) -> None:
        """Parts must lie inside of the tensor and fill it: a gap would be read as whatever memory holds."""
        check_size(self.shape, self.dtype)
        for chunk in self.chunks:
            inside = len(chunk.offsets) == len(chunk.shape) == len(self.shape) and all(
                offset >= 0 and offset + side <= whole
                for offset, side, whole in zip(chunk.offsets, chunk.shape, self.shape, strict=True)
            )
            if not inside:
                raise ValueError(f'a part of "{name}" lies outside of it')
        full = [chunk for chunk in self.chunks if 0 not in chunk.shape]
        volume = sum(math.prod(chunk.shape) for chunk in full)
        if volume != math.prod(self.shape) or len({chunk.offsets for chunk in full}) != len(full):
            raise ValueError(f'the parts of "{name}" do not fill it')


Index = dict[str, Stored]


def read_index(folder: Path) -> Index:
    """The headers of all files, put together. Damage is a ValueError."""
    files = sorted(folder.glob(FILES))
    if not files:
        raise ValueError(f"there is no {FILES}")
    index: Index = {}
    for file in files:
        header = read_header(file)
        parts = _read_parts(header.metadata)
        for name, entry in header.entries.items():
            shape, offsets = parts.get(name, (entry.shape, (0,) * len(entry.shape)))
            stored = index.setdefault(name, Stored(entry.dtype, shape, []))
            if (stored.dtype, stored.shape) != (entry.dtype, shape):
                raise ValueError(f'"{name}" differs between files')
            stored.chunks.append(Chunk(file.name, entry.start, entry.length, offsets, entry.shape))
    for name, stored in index.items():
        stored.check(name)
    return index


def parts_metadata(parts: Mapping[str, tuple[TensorShape, TensorShape]]) -> dict[str, str]:
    """What a header says of parts: {name: (shape of the whole, offsets)}."""
    return {_PARTS: json.dumps(parts)} if parts else {}


def _read_parts(metadata: Mapping[str, str]) -> dict[str, tuple[TensorShape, TensorShape]]:
    try:
        parts = parse_object(metadata.get(_PARTS, "{}"), "the description of parts of tensors")
        return {name: (_shape(shape), _shape(offsets)) for name, (shape, offsets) in parts.items()}
    except (AttributeError, TypeError) as error:
        raise ValueError("parts of tensors that are not described by two shapes") from error


def _shape(values: object) -> TensorShape:
    if not isinstance(values, list) or len(values) > MOST_AXES:
        raise ValueError(f"a shape that is not a list of at most {MOST_AXES} numbers")
    if not all(type(each) is int and 0 <= each < MOST_BYTES for each in values):
        raise ValueError("a shape that is not of whole numbers, or too large for any tensor")
    return tuple(values)
