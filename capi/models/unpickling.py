"""Checkpoints that carry more than tensors, opened without running anything that is in them.

torch.save writes a zip archive: a pickle that says how tensors are put together, and a record of bytes for each of
their storages. A pickle names classes and functions to call; here it finds, instead of what it names,

- for the few functions that put tensors together: our own, which check what they are given;
- for everything else: a new `Placeholder` class, which takes any arguments and any state, and does nothing.

So nothing is imported and no code of another library runs. What a pickle is handed has no attributes that it could
change: the next file meets the same functions.
"""

import io
import logging
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LOG = logging.getLogger("capi")
_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


def read_inert(path: Path) -> Any:
    """What a file of torch.save holds: tensors as they are, every object of an unknown class as a `Placeholder`.

    A file that is no such archive, or a pickle that cannot be followed, raises whatever goes wrong.
    """
    unpickler = _InertUnpickler(_Archive(path))
    contents = unpickler.load()
    if unpickler.closed:
        _LOG.info("%s holds objects that are left closed, of %s", path, ", ".join(sorted(unpickler.closed)[:5]))
    return contents


class Placeholder(dict[Any, Any]):
    """Stands for an object whose class is not opened. It keeps items, as many such classes are dicts, and is inert."""

    def __new__(cls, *_: Any, **__: Any) -> "Placeholder":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __call__(self, *_: Any, **__: Any) -> "Placeholder":
        return Placeholder()

    def __setstate__(self, *_: Any) -> None:
        """A pickle may ask this of an object or of its class; either way nothing happens."""

    def append(self, *_: Any) -> None:
        """Items of lists are not kept."""

    def extend(self, *_: Any) -> None:
        """Items of lists are not kept."""

    def add(self, *_: Any) -> None:
        """Items of sets are not kept."""

    # Objects of the classes it stands for may be keys.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


class _Ordered(Placeholder):
    """An OrderedDict, which may be made from pairs; what torch hangs on a state dict is left out."""

    def __init__(self, pairs: Any = (), *_: Any) -> None:
        super().__init__()
        self.update(pairs)


class _Storage(NamedTuple):
    """The bytes of some tensors, and what they are read as."""

    data: torch.UntypedStorage
    dtype: torch.dtype


class _StorageKind:
    """What stands for a class like torch.FloatStorage: it can only be looked at."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __setstate__(self, *_: Any) -> None:
        """A pickle changes nothing here."""


class _Function:
    """A function that a pickle may call."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> Any:
        return self._run(*arguments)

    def __setstate__(self, *_: Any) -> None:
        """A pickle changes nothing here."""


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    """A view of a storage. Hooks and metadata are left out."""
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    shape, steps = tuple(size), tuple(stride)
    # torch would enlarge the storage, with memory that holds anything.
    if len(shape) != len(steps) or _extent(offset, shape, steps) * storage.dtype.itemsize > storage.data.nbytes():
        raise pickle.UnpicklingError("a tensor that reaches beyond its storage")
    return torch.empty(0, dtype=storage.dtype).set_(storage.data, offset, shape, steps)


def _extent(offset: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> int:
    """How many numbers a storage must have for a view of it."""
    if 0 in shape:
        return 0
    return offset + 1 + sum((side - 1) * step for side, step in zip(shape, steps, strict=True))


def _parameter(data: Any, *_: Any) -> Any:
    """Parameters come as plain tensors, which need no gradient."""
    return data


def _typed(function: Any, _type: Any, arguments: Any, *_: Any) -> Any:
    """A tensor of a class of its own comes as a plain one."""
    return function(*arguments) if isinstance(function, _Function) else Placeholder()


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _typed,
}


class _InertUnpickler(pickle.Unpickler):
    """Finds no class but ours."""

    def __init__(self, archive: "_Archive") -> None:
        super().__init__(io.BytesIO(archive.pickled()), encoding="utf-8")
        self.archive = archive
        self.closed: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle gets for a name; classes are made anew for each file."""
        if (module, name) in _FUNCTIONS:
            return _Function(_FUNCTIONS[module, name])
        if module == "torch" and name in _DTYPES:
            return _StorageKind(_DTYPES[name])
        if (module, name) == ("collections", "OrderedDict"):
            return type("Ordered", (_Ordered,), {})
        self.closed.add(f"{module}.{name}")
        return type("Closed", (Placeholder,), {})

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage, by what torch writes: ("storage", class, name of the record, place, number of elements)."""
        kind = pid[1] if isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" else None
        if not isinstance(kind, _StorageKind):
            raise pickle.UnpicklingError("a reference to something that is no storage")
        record, count = pid[2], pid[4]
        return _Storage(self.archive.storage(record, count * kind.dtype.itemsize), kind.dtype)


class _Archive:
    """A zip archive of torch.save: where its records lie in the file, and those that were read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.members = {member.filename: member for member in archive.infolist()}
        pickles = [name for name in self.members if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise pickle.UnpicklingError("not one pickle in the archive")
        self.root = pickles[0].removesuffix("data.pkl")
        order = self.members.get(f"{self.root}byteorder")
        if order is not None and self._read(order).decode() != sys.byteorder:
            raise pickle.UnpicklingError("written on a machine of another byte order")
        self.storages: dict[str, torch.UntypedStorage] = {}

    def pickled(self) -> bytes:
        return bytes(self._read(self.members[f"{self.root}data.pkl"]))

    def storage(self, record: Any, size: Any) -> torch.UntypedStorage:
        """The first bytes of a record. Tensors that share one share its memory."""
        member = self.members.get(f"{self.root}data/{record}") if isinstance(record, str) else None
        if member is None or not isinstance(size, int) or not 0 <= size <= member.file_size:
            raise pickle.UnpicklingError("a storage that is not in the archive")
        if not size:
            return torch.UntypedStorage(0)
        if record not in self.storages:
            self.storages[record] = torch.frombuffer(self._read(member), dtype=torch.uint8).untyped_storage()
        return self.storages[record][:size]

    def _read(self, member: zipfile.ZipInfo) -> bytearray:
        contents = bytearray(member.file_size)
        with self.path.open("rb") as file:
            file.seek(self._start(member))
            if file.readinto(contents) != len(contents):
                raise pickle.UnpicklingError("a record that is cut off")
        return contents

    def _start(self, member: zipfile.ZipInfo) -> int:
        """Where a record's bytes begin: after its header, its name and what pads it."""
        if member.compress_type != zipfile.ZIP_STORED:
            raise pickle.UnpicklingError("a compressed record, which torch does not write")
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            name, padding = struct.unpack("<HH", file.read(30)[26:])
        start: int = member.header_offset + 30 + name + padding
        if start + member.file_size > self.path.stat().st_size:
            raise pickle.UnpicklingError("a record that reaches beyond the file")
        return start
