"""Reading checkpoints: which are complete, and their tensors, by any number of processes, without trusting them."""

import io
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capi.errors import CapiError, warn_once
from capi.runtime.documents import open_regular, read_object
from capi.runtime.tensor_file import TensorEntry, read_tensor
from capi.zoo import old_checkpoint
from capi.zoo.checkpoint_index import Chunk, Stored, TensorShape, read_index

STATE = "state.json"
_NAME = re.compile(r"step_(\d+)")
BEST = "best"


class CheckpointFolder:
    """The folder that holds the checkpoints of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not self.folder.is_dir():
            return []
        entries = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return sorted(int(match[1]) for match, path in entries if match and _is_complete(path))

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    @property
    def newest(self) -> Path:
        """The newest complete checkpoint; a run without any is an error."""
        steps = self.steps()
        if not steps:
            raise CapiError(
                f"{self.folder.parent} holds no checkpoint yet: wait for the first one, or train with --resume"
            )
        return self.path(steps[-1])

    @property
    def best(self) -> int | None:
        """The step of the checkpoint that did best by `checkpoint.best`."""
        link = self.folder / BEST
        match = _NAME.fullmatch(os.readlink(link)) if link.is_symlink() else None
        return int(match[1]) if match else None


def _is_complete(path: Path) -> bool:
    """Whether all files are there in their sizes: a folder that was copied may have lost some."""
    state = path / STATE
    if not state.is_file():
        return False
    try:
        sizes = dict(read_object(state).get("files", {}))
    except (ValueError, TypeError):
        # That it is damaged raises when it is read.
        return True
    there = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    lost = [str(name)[:80] for name, size in sizes.items() if there.get(name) != size]
    if lost:
        warn_once(f"{path} is passed over: {lost[0]} is not as it was saved")
    return not lost


class StoredTensors:
    """What a checkpoint holds, by its index; tensors are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._old = (path / old_checkpoint.INDEX).exists()
        try:
            self._index = old_checkpoint.read_index(path) if self._old else read_index(path)
        except (OSError, ValueError, MemoryError) as error:
            raise damaged(path, error) from error

    @property
    def weightless(self) -> dict[str, Tensor]:
        """What there is, as tensors on the device `meta`."""
        return {
            name: torch.empty(stored.shape, dtype=stored.dtype, device="meta") for name, stored in self._index.items()
        }

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Refuse what is missing or has another shape. Tensors on the device `meta` will do."""
        missing = sorted(wanted.keys() - self._index.keys())
        if missing:
            raise CapiError(f'{self.path} lacks "{missing[0]}" ({len(missing)} missing in all): it is of another model')
        for name, value in wanted.items():
            shape = self._index[name].shape
            if shape != tuple(value.shape):
                raise CapiError(
                    f'{self.path} has "{name}" in another shape than {tuple(value.shape)}, namely {shape}: it is of '
                    "another model"
                )

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill tensors, strictly: each must be there in the same shape. A sharded one gets the part of this process."""
        self.check(into)
        try:
            with ExitStack() as stack, torch.no_grad():
                files: dict[str, io.BufferedIOBase] = {}
                for name, value in into.items():
                    for chunk in self._index[name].chunks:
                        if chunk.file not in files:
                            files[chunk.file] = stack.enter_context(open_regular(self.path / chunk.file))
                        self._copy(files[chunk.file], self._index[name], chunk, value)
        except (OSError, ValueError, MemoryError) as error:
            raise damaged(self.path, error) from error

    def take(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors like those of the device `meta`, read; memory is taken once all are known to fit."""
        self.check(wanted)
        taken = {name: torch.empty(value.shape, dtype=value.dtype, device="cpu") for name, value in wanted.items()}
        self.read(taken)
        return taken

    def _copy(self, file: io.BufferedIOBase, stored: Stored, chunk: Chunk, into: Tensor) -> None:
        """Copy what a stored part and the local part of a tensor have in common."""
        local, offsets = _local_part(into)
        begin = [max(pair) for pair in zip(chunk.offsets, offsets, strict=True)]
        end = [min(a + n, b + m) for a, n, b, m in zip(chunk.offsets, chunk.shape, offsets, local.shape, strict=True)]
        if any(low >= high for low, high in zip(begin, end, strict=True)):
            return
        if self._old:
            part = old_checkpoint.read_chunk(file, chunk, stored.dtype)
        else:
            part = read_tensor(file, TensorEntry(stored.dtype, chunk.shape, chunk.start))
        _cut(local, offsets, begin, end).copy_(_cut(part, chunk.offsets, begin, end))


def _local_part(value: Any) -> tuple[Tensor, TensorShape]:
    """What this process has of a tensor, and where in the whole that begins."""
    if not hasattr(value, "to_local"):
        return value, (0,) * value.ndim
    (chunk,) = value.__create_chunk_list__()
    return value.to_local(), tuple(chunk.offsets)


def _cut(part: Tensor, offsets: TensorShape, begin: list[int], end: list[int]) -> Tensor:
    """The box from `begin` to `end`, in numbers of the whole tensor, of a part that begins at `offsets`."""
    return part[tuple(slice(low - at, high - at) for low, high, at in zip(begin, end, offsets, strict=True))]


def damaged(path: Path, error: Exception | None = None) -> CapiError:
    """The error for a checkpoint that cannot be read."""
    text = getattr(error, "strerror", None) or str(error or "")
    reason = f" ({' '.join(text.split())[:200]})" if text else ""
    return CapiError(f"{path} is damaged{reason}: move it away, which leaves the checkpoint before it if there is one")
