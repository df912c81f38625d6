"""A checkpoint file, opened: what torch.save or safetensors wrote, as Python values and tensors. Nothing in it is run.

Tensors are read once, into memory of their own: a model that is given them as they are holds its weights once, and
the file may be written again while the model is in use.
"""

import io
import pickletools
import re
import threading
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.runtime.tensor_file import CutOffError, read_header, read_tensor

_LOADING = threading.Lock()
# Dicts in dicts that are looked at; weights lie less deep.
_DEEPEST = 6
# What people have in the place of a checkpoint, by its first bytes.
_MISTAKEN = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`",
    b"<": "is a web page, not a checkpoint: download the file itself",
    b"\x1f\x8b": "is compressed: unpack it first",
}


def read_contents(path: Path) -> Any:
    """What a `.pth` or `.safetensors` file holds; its contents tell what it is, not its name."""
    if not path.is_file():
        raise CapiError(f"{path} is not a file: give the path of a checkpoint")
    try:
        with path.open("rb") as file:
            start = file.read(32)
    except OSError as error:
        raise CapiError(f"{path} cannot be read ({error.strerror})") from error
    # The length of a header comes first, whose bytes may be those that begin a pickle, an archive or a page.
    if start[8:9] == b"{" and not any(start[4:8]):
        return _read_safetensors(path)
    _refuse_mistaken(path, start)
    if start.startswith((b"PK", b"\x80")):
        return _read_pickle(path, zipped=start.startswith(b"PK"))
    raise CapiError(f"{path} is no checkpoint: expected a state dict written by torch.save, or a safetensors file")


def _refuse_mistaken(path: Path, start: bytes) -> None:
    if not start:
        raise CapiError(f"{path} is empty: download or copy it again")
    for first, reason in _MISTAKEN.items():
        if start.startswith(first):
            raise CapiError(f"{path} {reason}")


def _read_pickle(path: Path, *, zipped: bool) -> Any:
    if zipped and not zipfile.is_zipfile(path):
        raise _cut_off(path)
    try:
        with path.open("rb") as file:
            return load_weights_only(file)
    except Exception as error:
        raise _unreadable(path, error) from error


class _Closed:
    """Stands for an object of another library's class. It takes any arguments and state, and keeps nothing of them.

    `__setstate__` is what keeps nothing: without it torch's loader writes an object's state into its `__dict__`, so a
    file could give it a `shape` or an `items`, and fails where the state is no dict, as that of numpy's numbers is.
    """

    def __new__(cls, *_: Any, **__: Any) -> "_Closed":
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        """Objects that have a state are not filled with it."""


def load_weights_only(file: io.BufferedIOBase) -> Any:
    """What torch.save wrote, by torch's loader of weights, which knows tensors and plain values.

    For every other class or function that the file names, a new and inert class stands in, which ends with this call.
    """
    size = file.seek(0, io.SEEK_END)
    stand_ins: list[Any] = [(type("Closed", (_Closed,), {}), name) for name in _names_in(file, size)]
    file.seek(0)
    # What torch thinks of a file's protocol does not help the user.
    with _allowed(stand_ins), warnings.catch_warnings(action="ignore"):
        contents = torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    return _plain(contents, size, 0, {})


@contextmanager
def _allowed(stand_ins: list[Any]) -> Iterator[None]:
    """Let torch's loader know these classes and none that others allowed it for the whole process."""
    with _LOADING:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(stand_ins)
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _names_in(file: io.BufferedIOBase, size: int) -> set[str]:
    """The classes and functions that a file names, as torch's loader calls them."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        # A number that marks the format, its version, facts of the machine, then the contents.
        return {name for _ in range(4) for name in _names_in_pickle(file)}
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        pickles = [each for each in members if each.filename.split("/")[-1] == "data.pkl"]
        if any(each.compress_type != zipfile.ZIP_STORED for each in members):
            raise ValueError("a compressed record, which torch does not write")
        if len(pickles) != 1 or sum(each.file_size for each in members) > size:
            raise ValueError("several pickles or records that overlap, which torch does not write")
        return set(_names_in_pickle(io.BytesIO(archive.read(pickles[0]))))


def _names_in_pickle(file: io.BufferedIOBase) -> Iterator[str]:
    for opcode, argument, _ in pickletools.genops(file):  # type: ignore[arg-type]
        if opcode.name == "GLOBAL" and isinstance(argument, str):
            # torch writes the name that Python 2 had for the module of built-in classes, and reads the one of Python 3.
            yield re.sub(r"^__builtin__ ", "builtins ", argument).replace(" ", ".")


def _plain(value: Any, size: int, depth: int, seen: dict[tuple[int, int], Any]) -> Any:
    """Dicts and tensors without what a file may have hung on them, such as attributes that hide their methods."""
    if isinstance(value, Tensor):
        plain = Tensor.detach(value)
        counts = plain.layout is torch.strided and not plain.is_meta
        needed = plain.numel() * plain.element_size() if counts else 0
        if needed and not needed <= plain.untyped_storage().nbytes() <= size:
            # A file of so many bytes cannot hold every number: strides of 0 repeat a few without end. What is left is
            # the shape, by which the checkpoint is still recognized.
            return torch.empty_like(plain, device="meta")
        return plain
    if not isinstance(value, dict) or depth > _DEEPEST:
        return value
    if (id(value), depth) not in seen:
        items = dict.items(value)
        seen[id(value), depth] = {key: _plain(each, size, depth + 1, seen) for key, each in items}
    return seen[id(value), depth]


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        entries = read_header(path).entries
        with path.open("rb") as file:
            return {name: read_tensor(file, entry) for name, entry in entries.items()}
    except CutOffError as error:
        raise _cut_off(path) from error
    except Exception as error:
        raise _unreadable(path, error) from error


def _cut_off(path: Path) -> CapiError:
    size = path.stat().st_size
    return CapiError(f"{path} is cut off after {size} bytes: remove it, and download or copy it again")


def _unreadable(path: Path, error: Exception) -> CapiError:
    reason = error if isinstance(error, CapiError) else type(error).__name__
    return CapiError(
        f"{path} could not be opened as a checkpoint of tensors ({reason}): expected a state dict "
        "written by torch.save or a safetensors file, and nothing else is unpickled"
    )
