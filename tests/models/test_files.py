"""Checkpoint files, whole and broken."""

import argparse
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from capi.errors import CapiError
from capi.models.files import read_contents

STATE = {"a": torch.arange(2000.0), "b": torch.ones(3, dtype=torch.bfloat16)}


class RunsCode:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


def written(kind: str, path: Path) -> Path:
    if kind == "safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=kind == "zip")
    return path


@pytest.mark.parametrize("kind", ["zip", "bare", "safetensors"])
def test__the_contents_tell_what_a_file_is(tmp_path: Path, kind: str) -> None:
    contents = read_contents(written(kind, tmp_path / "any.name"))
    assert list(contents) == ["a", "b"]
    assert all(torch.equal(contents[name], value) for name, value in STATE.items())


@pytest.mark.parametrize("kind", ["zip", "bare", "safetensors", "objects"])
def test__tensors_and_their_file_can_be_written_without_changing_each_other(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "objects":
        torch.save(STATE | {"args": argparse.Namespace(lr=1)}, path)
    else:
        written(kind, path)
    before, tensor = path.read_bytes(), read_contents(path)["a"]
    path.write_bytes(b"0" * len(before))
    assert torch.equal(tensor, STATE["a"])
    path.write_bytes(b"")
    assert torch.equal(tensor, STATE["a"])
    path.write_bytes(before)
    tensor.zero_()
    assert torch.equal(read_contents(path)["a"], STATE["a"])


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.bool, torch.float16, torch.float64, torch.int8, torch.int16, torch.int32, torch.uint8],
)
def test__safetensors_of_any_type_and_shape_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {
        "full": torch.randn(2, 3).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
        "number": torch.ones(()).to(dtype),
    }
    save_file(state, tmp_path / "file", metadata={"format": "pt"})
    read = read_contents(tmp_path / "file")
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], value) and read[name].dtype == dtype for name, value in state.items())


def test__tensors_that_share_memory_in_a_file_with_objects_share_it_again(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    torch.save({"whole": whole, "part": whole[2:4], "args": argparse.Namespace(lr=1)}, tmp_path / "file.pth")
    read = read_contents(tmp_path / "file.pth")
    assert read["part"].tolist() == [2, 3]
    read["whole"].zero_()
    assert read["part"].tolist() == [0, 0]


def test__objects_beside_the_tensors_are_left_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    witness = tmp_path / "witness"
    contents = {"model": STATE, "args": argparse.Namespace(lr=1), "harm": RunsCode(witness)}
    torch.save(contents, tmp_path / "file.pth")
    with caplog.at_level(logging.INFO, "capi"):
        read = read_contents(tmp_path / "file.pth")
    assert torch.equal(read["model"]["a"], STATE["a"])
    assert not witness.exists()
    assert "argparse.Namespace" in caplog.text


def test__bare_pickles_with_objects_are_refused_and_do_not_run(tmp_path: Path) -> None:
    witness, path = tmp_path / "witness", tmp_path / "evil.pth"
    for write in (
        lambda: path.write_bytes(pickle.dumps(RunsCode(witness))),
        lambda: torch.save(RunsCode(witness), path, _use_new_zipfile_serialization=False),
    ):
        write()
        with pytest.raises(CapiError, match="could not be opened"):
            read_contents(path)
    assert not witness.exists()


@pytest.mark.parametrize("kind", ["zip", "safetensors"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test__a_file_that_is_cut_off_is_told(tmp_path: Path, kind: str, share: float) -> None:
    path = written(kind, tmp_path / "file")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CapiError, match=rf"is cut off after {path.stat().st_size} bytes: remove it, and download"):
        read_contents(path)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
        (b"<!DOCTYPE html><html></html>", "is a web page"),
        (b"\x1f\x8b\x08rest", "is compressed"),
        (b"not a checkpoint", "could not be opened"),
        (b"PK\x03\x04rest", "is cut off"),
        (b"\x80\x02rest", "could not be opened"),
        (b"\x08\x00\x00\x00\x00\x00\x00\x00{notjson", "could not be opened"),
        (b"\xff" * 8 + b"{}", "could not be opened"),
    ],
)
def test__what_is_no_checkpoint_is_told_in_one_sentence(tmp_path: Path, contents: bytes, message: str) -> None:
    (tmp_path / "file.pth").write_bytes(contents)
    with pytest.raises(CapiError, match=message) as caught:
        read_contents(tmp_path / "file.pth")
    assert "\n" not in str(caught.value)


def test__a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "file.pth", "w") as file:
        file.writestr("readme.txt", "hello")
    with pytest.raises(CapiError, match="could not be opened"):
        read_contents(tmp_path / "file.pth")


def test__a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.pth", tmp_path):
        with pytest.raises(CapiError, match="is not a file"):
            read_contents(path)


def test__without_safetensors_its_name_is_told(tmp_path: Path) -> None:
    written("safetensors", tmp_path / "file")
    code = (
        "import sys; sys.modules['safetensors'] = None\n"
        "from pathlib import Path; from capi.models.files import read_contents\n"
        "try: read_contents(Path(sys.argv[1]))\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file")], capture_output=True, text=True, check=True
    )
    assert "pip install safetensors" in done.stdout
