"""A run folder of checkpoint format 2, whose index is a pickle, and what a stranger could make of it."""

import hashlib
import pickle
import pickletools
import tarfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "reference" / "format2"


def unpack_old_run(place: Path) -> Path:
    """The folder of the run; its photos lie beside it."""
    with tarfile.open(FOLDER / "run.tar.xz") as archive:
        archive.extractall(place, filter="data")
    return place / "run"


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hostile_index(index: bytes, name: str, *, called: bool = False) -> bytes:
    """An index whose pickle first sets attributes of a class, or of an object of it, and goes on as before."""
    state = pickletools.optimize(pickle.dumps((None, {"owned": True}), protocol=2))[2:-1]
    module, _, attribute = name.rpartition(".")
    pickled = b"c" + f"{module}\n{attribute}\n".encode() + (b"K\x00\x85R" if called else b"")
    # After the opcodes PROTO and FRAME. POP takes it off the stack again.
    return b"\x80\x04" + pickled + state + b"b0" + index[11:]
