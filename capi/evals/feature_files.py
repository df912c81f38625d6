"""Features of many images in one file, with the images' names and labels: safetensors, or parquet.

In safetensors each kind of features is one tensor (images first), `names` holds the UTF-8 bytes of all file names with
`name_offsets` between them, and `labels` are numbers into the list of classes. All sizes are known before the first
image, so the header is written first and features are filled in behind it: nothing is kept in memory, nothing is
copied, and an incomplete file can be resumed. In parquet a row is an image and a kind is a column of lists;
it is made from the other. Both describe themselves in a piece of JSON; nothing in them is ever run.
"""

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from capi.data.crops import KEPT_SHARE, Frame
from capi.data.decoding import Box
from capi.errors import CapiError
from capi.runtime.atomic import atomic_open, open_nofollow
from capi.runtime.documents import parse_object
from capi.runtime.privacy import hide_path, hide_paths

FEATURE_KINDS = ("patch", "mean_patch", "pooled", "register")
TYPES = {"float32": torch.float32, "float16": torch.float16}
FEATURE_ENDINGS = (".safetensors", ".parquet")
_MARK, _VERSION = "capi_features", 1
# What is read, or written as one group of rows, at a time.
_PART_BYTES = 64 * 2**20
_CODES = {"float32": "F32", "float16": "F16"}
# The safetensors library reads no longer ones.
_LONGEST_HEADER = 100_000_000
# Sides, widths and numbers of patches.
_LARGEST = 2**26
_ITEM_BYTES = {"I64": 8, "F32": 4, "F16": 2, "U8": 1}


@dataclass(frozen=True)
class Framing:
    """What of an image the encoder saw, at which size, and the grid of patches that lies over it."""

    size: tuple[int, int]
    grid: tuple[int, int]
    whole: bool = False
    channels: int = 3

    @property
    def frame(self) -> Frame:
        return Frame(self.size, None if self.whole else KEPT_SHARE, self.channels)

    def patch_box(self, image_size: tuple[int, int], row: int, column: int) -> Box:
        """Where a patch lies in an image of (height, width), in its pixels."""
        left, top, right, bottom = self.frame.box(image_size)
        rows, columns = self.grid
        across, down = (right - left) / columns, (bottom - top) / rows
        return Box(left + column * across, top + row * down, left + (column + 1) * across, top + (row + 1) * down)

    def patch_at(self, image_size: tuple[int, int], x: float, y: float) -> tuple[int, int]:
        """Row and column of the patch over a point, in pixels of an image of (height, width)."""
        box = self.frame.box(image_size)
        if not (box.left <= x < box.right and box.top <= y < box.bottom):
            seen = f"x from {box.left:.0f} to {box.right:.0f}, y from {box.top:.0f} to {box.bottom:.0f}"
            advice = "" if self.whole else ", or extract features of whole images"
            raise CapiError(
                f"the point ({x:g}, {y:g}) is not in what the encoder saw of this image of {image_size[1]} x "
                f"{image_size[0]} pixels ({seen}): choose one in there{advice}"
            )
        rows, columns = self.grid
        row = int((y - box.top) / (box.bottom - box.top) * rows)
        column = int((x - box.left) / (box.right - box.left) * columns)
        return min(row, rows - 1), min(column, columns - 1)


@dataclass(frozen=True)
class FeatureFacts:
    """What a file of features says of itself."""

    images: int
    shapes: dict[str, tuple[int, ...]]
    """The kinds, and the shape of the features of one image."""
    dtype: str
    framing: Framing
    encoder: dict[str, Any]
    """Width, patch size, fingerprint and statistics of the encoder."""
    root: str | None
    """The folder that the names are relative to, where there is one."""
    classes: list[str] | None
    about: dict[str, Any]
    """Where it comes from: model, data, versions."""

    def _check(self) -> None:
        """Types and ranges, which a file that someone else made may have otherwise."""
        counts = [*self.framing.size, *self.framing.grid, self.framing.channels]
        counts += [side for shape in self.shapes.values() for side in shape]
        fit = self.dtype in TYPES and isinstance(self.images, int) and self.images >= 0
        fit = fit and all(isinstance(side, int) and 1 <= side <= _LARGEST for side in counts)
        fit = fit and isinstance(self.encoder, dict) and isinstance(self.about, dict)
        fit = fit and isinstance(self.root, str | None) and isinstance(self.classes, list | None)
        if not fit or not all(isinstance(name, str) for name in self.classes or ()):
            raise ValueError(self.dtype)

    @property
    def image_bytes(self) -> int:
        return sum(map(math.prod, self.shapes.values())) * TYPES[self.dtype].itemsize

    def to_text(self) -> str:
        """What a file says, with absolute paths as names alone."""
        shared = {
            "root": None if self.root is None else hide_path(self.root),
            "about": hide_paths(self.about),
            "encoder": hide_paths(self.encoder),
        }
        return json.dumps({"version": _VERSION, **asdict(self), **shared})

    @classmethod
    def from_text(cls, text: str, path: Path) -> "FeatureFacts":
        try:
            values = parse_object(text, str(path))
            if values.pop("version") > _VERSION:
                raise CapiError(f"{path} was written by a newer capi: install that one to read it")
            framing = values.pop("framing")
            size, grid = ((int(framing[key][0]), int(framing[key][1])) for key in ("size", "grid"))
            shapes = {kind: tuple(map(int, shape)) for kind, shape in values.pop("shapes").items()}
            facts = cls(shapes=shapes, framing=Framing(**(framing | {"size": size, "grid": grid})), **values)
            facts._check()
            return facts
        except CapiError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CapiError(f"the description in {path} is damaged: extract the features again") from error


class FeatureFile(ABC):
    """Features of images, their names and labels. Features stay on the disk until they are asked for."""

    def __init__(self, path: Path, facts: FeatureFacts) -> None:
        self.path, self.facts = path, facts

    def __len__(self) -> int:
        return self.facts.images

    @property
    @abstractmethod
    def names(self) -> list[str]: ...

    @property
    @abstractmethod
    def labels(self) -> list[str] | None: ...

    @abstractmethod
    def array(self, kind: str) -> Tensor:
        """All features of a kind, images first: mapped from safetensors, read into memory from parquet."""

    @abstractmethod
    def parts(self, kind: str) -> Iterator[Tensor]:
        """The same in order, so few images at a time that memory is never a question."""

    def _shape(self, kind: str) -> tuple[int, ...]:
        if kind not in self.facts.shapes:
            raise CapiError(f'{self.path} has no "{kind}" features, but {", ".join(self.facts.shapes)}')
        return self.facts.shapes[kind]


class SafetensorsFeatures(FeatureFile):
    """Features as tensors, which the system pages in where they are looked at."""

    @cached_property
    def names(self) -> list[str]:
        offsets, text = self._tensor("name_offsets").tolist(), self._tensor("names").numpy().tobytes()
        return [text[start:end].decode("utf-8", "surrogateescape") for start, end in pairwise(offsets)]

    @cached_property
    def labels(self) -> list[str] | None:
        classes = self.facts.classes
        if classes is None:
            return None
        numbers = self._tensor("labels").tolist()
        if not all(type(number) is int and 0 <= number < len(classes) for number in numbers):
            raise CapiError(f"{self.path} has labels that are none of its classes: extract the features again")
        return [classes[number] for number in numbers]

    def array(self, kind: str) -> Tensor:
        self._shape(kind)
        return self._tensor(kind)

    def parts(self, kind: str) -> Iterator[Tensor]:
        yield from self.array(kind).split(_images_at_a_time(self.facts))

    def _tensor(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(name)


class ParquetFeatures(FeatureFile):
    """Features as columns of lists, read a group of rows at a time."""

    @cached_property
    def names(self) -> list[str]:
        return list(self._column("name"))

    @cached_property
    def labels(self) -> list[str] | None:
        return None if self.facts.classes is None else list(self._column("label"))

    def array(self, kind: str) -> Tensor:
        values = torch.empty((len(self), *self._shape(kind)), dtype=TYPES[self.facts.dtype])
        first = 0
        for part in self.parts(kind):
            values[first : first + len(part)] = part
            first += len(part)
        return values

    def parts(self, kind: str) -> Iterator[Tensor]:
        shape = self._shape(kind)
        with _pyarrow().ParquetFile(self.path) as file:
            for group in range(file.num_row_groups):
                column = file.read_row_group(group, columns=[kind])[kind].combine_chunks()
                yield torch.from_numpy(column.flatten().to_numpy(zero_copy_only=False).copy()).view(-1, *shape)

    def _column(self, name: str) -> list[str]:
        with _pyarrow().ParquetFile(self.path) as file:
            column: list[str] = file.read(columns=[name])[name].to_pylist()
        return column


def read_features(path: Path) -> FeatureFile:
    """Open a file of features; anything else is an error. Only its description is read."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except FileNotFoundError as error:
        raise CapiError(f"there is no file {path}: give one that `capi extract` wrote") from error
    except IsADirectoryError as error:
        raise CapiError(f"{path} is a folder: write its features to a file with `capi extract` first") from error
    except OSError as error:
        raise CapiError(f"{path} cannot be read ({error.strerror}): give a file that `capi extract` wrote") from error
    return _read_parquet(path) if start == b"PAR1" else _read_safetensors(path)


def _read_safetensors(path: Path) -> FeatureFile:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_MARK)
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise _no_features(path) from error
    if text is None:
        raise _no_features(path)
    facts = FeatureFacts.from_text(text, path)
    expected = {kind: (facts.images, *shape) for kind, shape in facts.shapes.items()}
    expected |= {"name_offsets": (facts.images + 1,)} | ({} if facts.classes is None else {"labels": (facts.images,)})
    present = {kind: shapes.get(kind) for kind in expected}
    if present != expected or "names" not in shapes:
        raise CapiError(f"{path} does not hold what its description says: extract the features again")
    return SafetensorsFeatures(path, facts)


def _read_parquet(path: Path) -> FeatureFile:
    parquet = _pyarrow()
    try:
        with parquet.ParquetFile(path) as file:
            text = (file.schema_arrow.metadata or {}).get(_MARK.encode())
            rows, columns = file.metadata.num_rows, set(file.schema_arrow.names)
    except (OSError, ValueError) as error:
        raise _no_features(path) from error
    if text is None:
        raise _no_features(path)
    facts = FeatureFacts.from_text(text.decode(), path)
    if rows != facts.images or not columns >= {"name", *facts.shapes}:
        raise CapiError(f"{path} does not hold what its description says: extract the features again")
    return ParquetFeatures(path, facts)


def begin_features(path: Path, facts: FeatureFacts, names: Sequence[str], labels: Sequence[str] | None) -> None:
    """Write a safetensors file whose features are all zero; they are filled in by `filling`."""
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    offsets = np.cumsum([0, *map(len, encoded)], dtype="<i8")
    contents = {"name_offsets": offsets.tobytes(), "names": b"".join(encoded)}
    if facts.classes is not None and labels is not None:
        numbers = {name: number for number, name in enumerate(facts.classes)}
        contents["labels"] = np.array([numbers[label] for label in labels], dtype="<i8").tobytes()
    header, spans = _header(facts, int(offsets[-1]))
    with open_nofollow(path, "wb") as file:
        file.write(header)
        for name, content in contents.items():
            file.seek(len(header) + spans[name][0])
            file.write(content)
        file.truncate(len(header) + max(end for _, end in spans.values()))


def _header(facts: FeatureFacts, name_bytes: int) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The opening of a safetensors file, and where each tensor lies behind it."""
    # Larger items first, so that every tensor begins at a multiple of its items.
    tensors: list[tuple[str, str, tuple[int, ...]]] = [("name_offsets", "I64", (facts.images + 1,))]
    tensors += [("labels", "I64", (facts.images,))] if facts.classes is not None else []
    tensors += [(kind, _CODES[facts.dtype], (facts.images, *shape)) for kind, shape in facts.shapes.items()]
    tensors += [("names", "U8", (name_bytes,))]
    entries: dict[str, Any] = {"__metadata__": {_MARK: facts.to_text()}}
    spans, end = {}, 0
    for name, code, shape in tensors:
        start, end = end, end + math.prod(shape) * _ITEM_BYTES[code]
        spans[name] = start, end
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise CapiError("the labels are too many different ones for a file: extract without labels")
    return len(text).to_bytes(8, "little") + text, spans


@dataclass
class FeatureWriter:
    """Fills features into an incomplete file."""

    file: IO[bytes]
    facts: FeatureFacts
    starts: dict[str, int]

    def write(self, first: int, features: dict[str, Tensor]) -> None:
        """Features of consecutive images, from the one with this number."""
        for kind, values in features.items():
            if tuple(values.shape[1:]) != self.facts.shapes[kind]:
                raise CapiError(
                    f"the encoder gave {kind} features of shape {tuple(values.shape[1:])} after some of shape "
                    f"{self.facts.shapes[kind]}: images of one size must give features of one shape"
                )
            self._write(kind, first * math.prod(self.facts.shapes[kind]), values)

    def write_patches(self, row: int, column: int, values: Tensor) -> None:
        """A rectangle (rows, columns, d) of the feature map of the only image, at this place."""
        _, columns, width = self.facts.shapes["patch"]
        for number, patches in enumerate(values.cpu()):
            self._write("patch", ((row + number) * columns + column) * width, patches)

    def _write(self, kind: str, offset: int, values: Tensor) -> None:
        """Values at an offset that counts numbers."""
        stored = values.cpu().to(TYPES[self.facts.dtype])
        if not stored.isfinite().all():
            raise CapiError(f"some {kind} features are too large for {self.facts.dtype}: use float32")
        self.file.seek(self.starts[kind] + offset * stored.itemsize)
        array = stored.contiguous().numpy()
        self.file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())

    def flush(self) -> None:
        """What was written is on the disk after this."""
        self.file.flush()
        os.fsync(self.file.fileno())


@contextmanager
def filling(path: Path) -> Iterator[FeatureWriter]:
    """Open an incomplete file, to fill in features."""
    facts = _read_safetensors(path).facts
    with open_nofollow(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = parse_object(file.read(length), str(path))
        starts = {kind: 8 + length + int(entries[kind]["data_offsets"][0]) for kind in facts.shapes}
        yield FeatureWriter(file, facts, starts)


def write_parquet(features: FeatureFile, path: Path) -> None:
    """The same features as parquet, in groups of rows of bounded size."""
    parquet = _pyarrow()
    import pyarrow

    facts, labels = features.facts, features.labels
    item = pyarrow.type_for_alias(facts.dtype)
    columns = [("name", pyarrow.string())] + ([] if labels is None else [("label", pyarrow.string())])
    columns += [(kind, pyarrow.list_(item, math.prod(shape))) for kind, shape in facts.shapes.items()]
    schema = pyarrow.schema(columns, metadata={_MARK: facts.to_text()})
    arrays = {kind: features.array(kind) for kind in facts.shapes}
    step = _images_at_a_time(facts)
    # Features hardly ever come twice, so a dictionary of them would be of no use.
    dictionary = ["label"] if labels is not None else False
    with atomic_open(path) as file, parquet.ParquetWriter(file, schema, use_dictionary=dictionary) as writer:
        for first in range(0, len(features), step):
            rows = slice(first, min(first + step, len(features)))
            values: dict[str, Any] = {"name": features.names[rows]}
            values |= {} if labels is None else {"label": labels[rows]}
            for kind, array in arrays.items():
                flat = pyarrow.array(array[rows].flatten().numpy())
                values[kind] = pyarrow.FixedSizeListArray.from_arrays(flat, math.prod(facts.shapes[kind]))
            writer.write_table(pyarrow.table(values, schema=schema), row_group_size=step)


def must_have_parquet() -> None:
    """An error that says what to install, before hours of work and not after."""
    _pyarrow()


def _images_at_a_time(facts: FeatureFacts) -> int:
    return max(1, _PART_BYTES // max(facts.image_bytes, 1))


def _no_features(path: Path) -> CapiError:
    return CapiError(f"{path} is no file of features: give one that `capi extract` wrote")


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise CapiError("parquet files need an extra: pip install 'capi[parquet]'") from error
    return pyarrow.parquet
