"""Checkpoint files, whole and broken."""

import argparse
import collections
import enum
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from capi.errors import CapiError
from capi.zoo.files import read_contents

STATE = {"a": torch.arange(2000.0), "b": torch.ones(3, dtype=torch.bfloat16)}


class Shade(enum.Enum):
    DARK = 1


class Options:
    """Settings of another library."""

    def __init__(self) -> None:
        self.size = 3


class Calls:
    """An object that is put together by calling `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


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


@pytest.mark.parametrize("zipped", [True, False])
def test__training_checkpoints_with_objects_are_read_and_the_objects_left_closed(tmp_path: Path, zipped: bool) -> None:
    """As the scripts of MAE, DINO and iBOT write them, and those of libraries that log numbers or settings of numpy."""
    contents = {
        "model": collections.OrderedDict(STATE),
        "args": argparse.Namespace(lr=1e-3, out=Path("/somewhere"), shade=Shade.DARK, options=Options()),
        "best": np.float64(0.5),
        "epoch": 3,
    }
    torch.save(contents, tmp_path / "file.pth", _use_new_zipfile_serialization=zipped)
    allowed = set(torch.serialization.get_safe_globals())
    read = read_contents(tmp_path / "file.pth")
    assert set(torch.serialization.get_safe_globals()) == allowed
    assert all(torch.equal(read["model"][name], value) for name, value in STATE.items())
    assert read["epoch"] == 3
    for name in ("args", "best"):
        assert type(read[name]).__name__ == "Closed"
        assert not vars(read[name])


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("of_class", [True, False])
@pytest.mark.parametrize("name", ["argparse Namespace", "pathlib PosixPath", "collections OrderedDict", "torch Size"])
def test__a_pickle_changes_no_class(tmp_path: Path, name: str, of_class: bool, zipped: bool) -> None:
    """BUILD with (None, {...}) sets attributes of whatever lies on the stack, and that may be a class."""
    make = b"" if of_class else b")\x81"
    state = pickle.dumps((None, {"owned": True}), protocol=2)[2:-1]
    pickled = b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n" + make + state + b"b."
    path = tmp_path / "file.pth"
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
            archive.writestr("archive/version", "3\n")
    else:
        begin = b"".join(pickle.dumps(each, protocol=2) for each in (0x1950A86A20F9469CFC6C, 1001, {}))
        path.write_bytes(begin + pickled + pickle.dumps([], protocol=2))
    # Where torch makes an object of it, that is left closed; else the file is refused.
    with suppress(CapiError):
        read_contents(path)
    for kind in (argparse.Namespace, PosixPath, collections.OrderedDict, torch.Size):
        assert not hasattr(kind, "owned")
    assert torch.equal(read_contents(written("zip", path))["a"], STATE["a"])


def test__attributes_that_a_file_hangs_on_dicts_and_tensors_are_left_out(tmp_path: Path) -> None:
    state = collections.OrderedDict(a=STATE["a"].clone(), b=STATE["b"])
    vars(state)["keys"] = vars(state["a"])["float"] = "not a method"
    torch.save({"model": state}, tmp_path / "file.pth")
    read = read_contents(tmp_path / "file.pth")["model"]
    assert read.keys() == STATE.keys()
    assert torch.equal(read["a"].float(), STATE["a"])


def test__numbers_that_are_not_in_a_file_take_no_memory(tmp_path: Path) -> None:
    """A stride of 0 repeats one number as often as the shape says, and an empty storage grows to any shape."""
    torch.save({"repeated": torch.zeros(1).expand(10**11), "a": STATE["a"]}, tmp_path / "file.pth")
    read = read_contents(tmp_path / "file.pth")
    assert (read["repeated"].device.type, read["repeated"].shape) == ("meta", (10**11,))
    assert torch.equal(read["a"], STATE["a"])


def test__archives_that_torch_does_not_write_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    for compression, names in ((zipfile.ZIP_DEFLATED, ["one"]), (zipfile.ZIP_STORED, ["one", "two"])):
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name in names:
                archive.writestr(f"{name}/data.pkl", pickle.dumps({"a": 1}, protocol=2))
        with pytest.raises(CapiError, match="could not be opened"):
            read_contents(path)


def test__files_that_run_code_are_refused_and_do_not(tmp_path: Path) -> None:
    witness, path = tmp_path / "witness", tmp_path / "evil.pth"
    for write in (
        lambda: path.write_bytes(pickle.dumps(RunsCode(witness))),
        lambda: torch.save(RunsCode(witness), path, _use_new_zipfile_serialization=False),
        lambda: torch.save({"model": STATE, "harm": RunsCode(witness)}, path),
    ):
        write()
        with pytest.raises(CapiError, match="could not be opened"):
            read_contents(path)
    # Where torch itself knows no harm, an inert class stands in.
    torch.save({"model": STATE, "harm": Calls(exec, f"open({str(witness)!r}, 'w')")}, path)
    assert torch.equal(read_contents(path)["model"]["a"], STATE["a"])
    assert not witness.exists()


@pytest.mark.parametrize("kind", ["zip", "safetensors"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test__a_file_that_is_cut_off_is_reported(tmp_path: Path, kind: str, share: float) -> None:
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
        (b"not a checkpoint", "is no checkpoint: expected a state dict"),
        (b"PK\x03\x04rest", "is cut off"),
        (b"\x80\x02rest", "could not be opened"),
        (b"\x08\x00\x00\x00\x00\x00\x00\x00{notjson", "could not be opened"),
        (b"\xff" * 8 + b"{}", "is no checkpoint"),
    ],
)
def test__what_is_no_checkpoint_is_reported_in_one_sentence(tmp_path: Path, contents: bytes, message: str) -> None:
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


def damaged_headers() -> dict[str, bytes]:
    """Headers that lie, with 8 bytes behind them."""
    whole = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    values: dict[str, Any] = {
        "a shape of 10^15": {"a": whole | {"shape": [10**15]}},
        "offsets of 10^15": {"a": whole | {"shape": [10**15], "data_offsets": [0, 4 * 10**15]}},
        "a negative shape": {"a": whole | {"shape": [-2]}},
        "a shape of text": {"a": whole | {"shape": "2"}},
        "a shape of flags": {"a": whole | {"shape": [True, 2]}},
        "too many axes": {"a": whole | {"shape": [1] * 100 + [2]}},
        "an empty tensor of 10^30": {"a": whole, "b": whole | {"shape": [0, 10**30], "data_offsets": [8, 8]}},
        "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
        "an unknown dtype": {"a": whole | {"dtype": "F33"}},
        "a dtype of lists": {"a": whole | {"dtype": ["F32"]}},
        "one offset": {"a": whole | {"data_offsets": [8]}},
        "overlapping tensors": {"a": whole, "b": whole},
        "a gap": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        "bytes behind": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        "no tensors": {},
        "a number for a tensor": {"a": 3},
        "metadata of numbers": {"a": whole, "__metadata__": {"capi": 3}},
        "metadata of a list": {"a": whole, "__metadata__": [1]},
    }
    headers = {name: json.dumps(value).encode() for name, value in values.items()}
    headers |= {
        "deep": b'{"a":' + b"[" * 10**6,
        "invalid text": b'{"\xff":1}',
        "half": b'{"a":',
        "digits": b'{"a":' + b"9" * 9999,
    }
    return headers


@pytest.mark.parametrize("name", damaged_headers())
def test__damaged_headers_are_reported_in_one_sentence(tmp_path: Path, name: str) -> None:
    header = damaged_headers()[name]
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CapiError, match=r"could not be opened|is cut off") as error:
        read_contents(tmp_path / "file")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a" * 68, "a" * 19221])
def test__the_length_of_a_header_may_look_like_the_start_of_a_pickle(tmp_path: Path, name: str) -> None:
    save_file({name: STATE["a"]}, tmp_path / "file")
    assert (tmp_path / "file").read_bytes()[:2] in (b"\x80\0", b"PK")
    assert torch.equal(read_contents(tmp_path / "file")[name], STATE["a"])
