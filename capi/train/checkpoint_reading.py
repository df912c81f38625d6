"""Reading the tensors of a checkpoint without trusting it.

torch.distributed.checkpoint keeps its index as a pickle. It is read by an unpickler that knows the index's own classes
and nothing else, so that a run folder from elsewhere cannot run code.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from capi.errors import CapiError


def read_tensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors from a checkpoint, strictly: each must be there in the same shape."""
    reader = SafeReader(path)
    stored = reader.read_metadata().state_dict_metadata
    missing = sorted(into.keys() - stored.keys())
    if missing:
        raise CapiError(f'{path} lacks "{missing[0]}" ({len(missing)} missing in all): it is of another model')
    for name, value in into.items():
        found = stored[name]
        if not isinstance(found, TensorStorageMetadata) or found.size != value.shape:
            raise CapiError(f'{path} has "{name}" in another shape than {tuple(value.shape)}: it is of another model')
    with quiet():
        state_dict_loader.load(dict(into), storage_reader=reader, no_dist=True)


class SafeReader(FileSystemReader):
    """Reads a checkpoint without trusting it."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
            raise damaged(path.parent) from error
        for info in metadata.storage_data.values():
            # Tensors lie beside the index; a path that leads elsewhere is no checkpoint of ours.
            if Path(info.relative_path).name != info.relative_path:
                raise CapiError(f'{path} points to "{info.relative_path}", outside of the checkpoint')
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of an index, and no others."""

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.metadata", "Metadata"),
            ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
            ("torch.distributed.checkpoint.metadata", "StorageMeta"),
            ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "TensorProperties"),
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise CapiError(f"a checkpoint's index asks for {module}.{name}, which no checkpoint needs: do not trust it")


@contextmanager
def quiet() -> Iterator[None]:
    """Without a process group the library warns that it takes the run for one of a single process, which it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def damaged(path: Path) -> CapiError:
    """What is said of a checkpoint that cannot be read."""
    return CapiError(f"{path} is damaged: move it away, which leaves the checkpoint before it if there is one")
