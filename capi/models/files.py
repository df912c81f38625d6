"""A checkpoint file, opened: what torch.save or safetensors wrote, as Python values and tensors, and nothing is run.

Tensors are read once, into memory of their own: a model that is given them as they are holds its weights once, and
the file may be written again while the model is in use.
"""

import json
import logging
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.models.unpickling import read_inert

_LOG = logging.getLogger("capi")
# The names of safetensors.
_DTYPES = {
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
    _refuse_mistaken(path, start)
    if start.startswith((b"PK", b"\x80")):
        return _read_pickle(path, zipped=start.startswith(b"PK"))
    return _read_safetensors(path, start)


def _refuse_mistaken(path: Path, start: bytes) -> None:
    if not start:
        raise CapiError(f"{path} is empty: download or copy it again")
    for first, reason in _MISTAKEN.items():
        if start.startswith(first):
            raise CapiError(f"{path} {reason}")


def _read_pickle(path: Path, *, zipped: bool) -> Any:
    """First by torch's own unpickler of tensors; where other objects lie beside them, by one that leaves them shut."""
    if zipped and not zipfile.is_zipfile(path):
        raise _cut_off(path)
    try:
        # What it thinks of a file's protocol is no news to the user; what cannot be read is told below.
        with warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not zipped:
            raise _unreadable(path, error) from error
        _LOG.info("%s holds more than tensors: objects of other classes are left closed", path)
    except Exception as error:
        raise _unreadable(path, error) from error
    try:
        return read_inert(path)
    except Exception as error:
        raise _unreadable(path, error) from error


def _read_safetensors(path: Path, start: bytes) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CapiError(
            f"{path} is no file of torch.save, and safetensors is missing: pip install safetensors"
        ) from error
    try:
        # The library checks the header. Its tensors lie in the mapped file: copies of them would take the memory twice.
        with safe_open(path, framework="pt"):
            return _read_tensors(path)
    except Exception as error:
        if _is_cut_off(path, start):
            raise _cut_off(path) from error
        raise _unreadable(path, error) from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file whose header is known to be right."""
    tensors = {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            contents = bytearray(end - start)
            file.seek(8 + length + start)
            if file.readinto(contents) != len(contents):
                raise ValueError("a tensor that is cut off")
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            tensors[name] = (
                torch.frombuffer(contents, dtype=dtype).view(shape) if contents else torch.empty(shape, dtype=dtype)
            )
    return tensors


def _is_cut_off(path: Path, start: bytes) -> bool:
    """Whether the header of a safetensors file speaks of more bytes than there are."""
    size = path.stat().st_size
    length = int.from_bytes(start[:8], "little")
    # A header opens with a brace; anything else is no such file, whatever its first bytes say.
    if start[8:9] != b"{" or length > 10**8:
        return False
    if 8 + length > size:
        return True
    with path.open("rb") as file:
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError):
            return False
    return 8 + length + max(ends, default=0) > size


def _cut_off(path: Path) -> CapiError:
    size = path.stat().st_size
    return CapiError(f"{path} is cut off after {size} bytes: remove it, and download or copy it again")


def _unreadable(path: Path, error: Exception) -> CapiError:
    return CapiError(
        f"{path} could not be opened as a checkpoint of tensors ({type(error).__name__}): expected a state dict "
        "written by torch.save or a safetensors file, and nothing else is unpickled"
    )
