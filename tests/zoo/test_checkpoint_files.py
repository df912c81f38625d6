"""Checkpoints are read strictly and never trusted."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from capi.errors import CapiError
from capi.train.checkpoint import Checkpoints, Position, tensors
from capi.train.step import Learner
from capi.zoo.checkpoint_files import StoredTensors
from tests.old_runs import unpack_old_run


def test__a_checkpoint_of_another_model_is_refused(learner: Learner, checkpoints: Checkpoints) -> None:
    checkpoints.save(learner, Position(step=1))
    stored = StoredTensors(checkpoints.path(1))
    with pytest.raises(CapiError, match=r'lacks "student\.nonsense"'):
        stored.read({"student.nonsense": torch.zeros(2)})
    with pytest.raises(CapiError, match=r'"clustering\.prototypes" in another shape than \(2, 2\), namely \(24, 32\)'):
        stored.read({"clustering.prototypes": torch.zeros(2, 2)})


def test__a_checkpoint_is_a_file_that_any_reader_of_safetensors_opens(
    learner: Learner, checkpoints: Checkpoints
) -> None:
    checkpoints.save(learner, Position(step=1))
    (file,) = checkpoints.path(1).glob("*.safetensors")
    read = load_file(file)
    assert read.keys() == tensors(learner).keys()
    assert all(torch.equal(value, read[name]) for name, value in tensors(learner).items())


WHOLE = torch.arange(24.0).view(4, 6)


def in_parts(folder: Path, *parts: tuple[slice, slice], **lies: Any) -> Path:
    """A checkpoint of one tensor, each part in a file of its own."""
    folder.mkdir()
    for number, (rows, columns) in enumerate(parts):
        described = {"shape": [4, 6], "offsets": [rows.start, columns.start]} | lies
        metadata = {"parts": json.dumps({"a": [described["shape"], described["offsets"]]})}
        save_file({"a": WHOLE[rows, columns].contiguous()}, folder / f"{number}.safetensors", metadata=metadata)
    return folder


LEFT, RIGHT = (slice(0, 4), slice(0, 2)), (slice(0, 4), slice(2, 6))
UP, DOWN = (slice(0, 1), slice(2, 6)), (slice(1, 4), slice(2, 6))


@pytest.mark.parametrize("parts", [(LEFT, RIGHT), (RIGHT, LEFT), (LEFT, UP, DOWN)])
def test__a_tensor_is_put_together_from_its_parts(tmp_path: Path, parts: Any) -> None:
    stored = StoredTensors(in_parts(tmp_path / "step", *parts))
    assert torch.equal(stored.take(stored.weightless)["a"], WHOLE)


@pytest.mark.parametrize(
    ("parts", "lies"),
    [
        ((LEFT,), {}),
        ((LEFT, UP), {}),
        ((LEFT, LEFT, LEFT), {}),
        ((LEFT, RIGHT), {"offsets": [0, 5]}),
        ((LEFT, RIGHT), {"offsets": [0]}),
        ((LEFT, RIGHT), {"offsets": [0, -1]}),
        ((LEFT, RIGHT), {"offsets": {}}),
        ((LEFT, RIGHT), {"shape": [4, 10**12]}),
        ((LEFT, RIGHT), {"shape": [10**30, 6]}),
        ((LEFT, RIGHT), {"shape": "46"}),
    ],
)
def test__parts_that_do_not_make_a_tensor_are_reported(tmp_path: Path, parts: Any, lies: dict[str, Any]) -> None:
    with pytest.raises(CapiError, match="is damaged"):
        StoredTensors(in_parts(tmp_path / "step", *parts, **lies))


@pytest.mark.parametrize("contents", [b"", b"{}", b"\x08" + bytes(7) + b"{notjson", b"\x80\x04K\x01.", None])
def test__a_damaged_file_is_reported(tmp_path: Path, contents: bytes | None) -> None:
    folder = in_parts(tmp_path / "step", LEFT, RIGHT)
    (folder / "1.safetensors").unlink()
    if contents is not None:
        (folder / "1.safetensors").write_bytes(contents)
    with pytest.raises(CapiError, match="is damaged"):
        StoredTensors(folder)


def test__files_that_get_lost_between_index_and_tensors_are_reported(tmp_path: Path) -> None:
    stored = StoredTensors(in_parts(tmp_path / "step", LEFT, RIGHT))
    (tmp_path / "step" / "1.safetensors").write_bytes(b"")
    with pytest.raises(CapiError, match=r"is damaged \(a tensor is cut off\)"):
        stored.take(stored.weightless)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint with a pickled index."""
    return unpack_old_run(tmp_path) / "checkpoints" / "step_00000002"


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(index: bytes) -> bytes:
        assert old in index
        return index.replace(old, new, 1)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"", "is damaged"),
        (lambda index: index[: len(index) // 2], "is damaged"),
        (lambda index: index[:-1], "is damaged"),
        (lambda _: pickle.dumps({"a": 1}), "is not an index of tensors"),
        (lambda _: pickle.dumps(print), "is not an index of tensors"),
        (lambda _: pickle.dumps(1e9), "opcode BINFLOAT"),
        (lambda _: b"\x80\x04" + b"]\x94" * 10**5 + b".", "is damaged"),
        (lambda _: b"\x80\x04\x8b\xff\xff\xff\x7f.", "is damaged"),
        (lambda _: b"\x80\x04r\xff\xff\xff\xff.", "is damaged"),
        (replaced(b"__0_0.distcp", b"/etc/hosts.."), "outside of the checkpoint"),
        (replaced(b"__0_0.distcp", b"../0_0.distc"), "outside of the checkpoint"),
        (replaced(b"float32", b"float99"), "is not an index of tensors"),
        (replaced(b"_StorageInfo", b"_StorageInfa"), "is not an index of tensors"),
        (replaced(b"K\x10\x87", b"K\x11\x87"), "is damaged"),
    ],
)
def test__pickled_indices_that_are_damaged_are_reported(
    old: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    index = old / ".metadata"
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(CapiError, match=message) as error:
        StoredTensors(old)
    assert "\n" not in str(error.value)


class Opens:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test__pickled_tensors_that_are_damaged_are_reported_and_run_nothing(old: Path, tmp_path: Path) -> None:
    stored, file = StoredTensors(old), old / "__0_0.distcp"
    whole = file.read_bytes()
    torch.save(Opens(tmp_path / "witness"), tmp_path / "evil")
    evil = (tmp_path / "evil").read_bytes()
    for contents in (b"", bytes(len(whole)), whole[: len(whole) // 2], evil + whole[len(evil) :]):
        file.write_bytes(contents)
        with pytest.raises(CapiError, match="is damaged"):
            stored.take(stored.weightless)
    assert not (tmp_path / "witness").exists()
    shutil.rmtree(old)
    with pytest.raises(CapiError, match="is damaged"):
        stored.take(stored.weightless)
