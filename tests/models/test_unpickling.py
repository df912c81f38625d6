"""Pickles that want to run code, and pickles that carry objects of other libraries."""

import argparse
import collections
import enum
import io
import os
import pickle
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from capi.models import unpickling
from capi.models.unpickling import Placeholder, read_inert

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.tensor([1, 2], dtype=torch.float16)}


class Calls:
    """An object that is put together by calling `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


class Shade(enum.Enum):
    DARK = 1


class Settings(dict):  # type: ignore[type-arg]
    """A dict with a class of its own, as configuration libraries have them."""


class Stateful:
    """Runs code when its state is set."""

    witness = ""

    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, state: Any) -> None:
        Path(self.witness).touch()


def saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def equal(state: Any) -> bool:
    return list(state) == list(WEIGHTS) and all(
        torch.equal(state[name], value) and state[name].dtype == value.dtype for name, value in WEIGHTS.items()
    )


def test__tensors_are_what_torch_reads(tmp_path: Path) -> None:
    base = torch.randn(4, 5)
    state = {
        "view": base[1:, ::2],
        "turned": base.t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "brain": torch.randn(3).bfloat16(),
        "long": torch.arange(3),
        "complex": torch.randn(2, dtype=torch.complex64),
        "parameter": nn.Parameter(torch.randn(2)),
    }
    path = saved(state, tmp_path / "file.pth")
    read, expected = read_inert(path), torch.load(path, weights_only=True)
    assert list(read) == list(expected)
    for name, value in expected.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value)
        assert type(read[name]) is torch.Tensor
        assert not read[name].requires_grad


def test__state_dicts_keep_their_order_and_lose_their_metadata(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    read = read_inert(saved({"model": module.state_dict()}, tmp_path / "file.pth"))["model"]
    assert list(read) == list(module.state_dict())
    assert all(torch.equal(read[name], value) for name, value in module.state_dict().items())


def test__other_objects_are_placeholders_and_the_tensors_load(tmp_path: Path) -> None:
    contents = {
        "model": WEIGHTS,
        "args": argparse.Namespace(lr=0.1, nested=argparse.Namespace(x=[1, 2])),
        "path": Path("/somewhere"),
        "shade": {Shade.DARK: 3},
        "deque": collections.deque([1, 2]),
        "counts": collections.defaultdict(list, {"x": [1]}),
        "set": {1, 2},
        "epoch": 7,
    }
    read = read_inert(saved(contents, tmp_path / "file.pth"))
    assert equal(read["model"])
    assert read["epoch"] == 7
    for name in ("args", "path", "deque", "set"):
        assert isinstance(read[name], Placeholder)
    assert all(isinstance(key, Placeholder) for key in read["shade"])


def test__dicts_of_unknown_classes_keep_their_items(tmp_path: Path) -> None:
    read = read_inert(saved(Settings(model=Settings(WEIGHTS)), tmp_path / "file.pth"))
    assert isinstance(read, Placeholder)
    assert equal(read["model"])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test__every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    contents = {"model": WEIGHTS, "args": argparse.Namespace(lr=0.1)}
    torch.save(contents, tmp_path / "file.pth", pickle_protocol=protocol)
    assert equal(read_inert(tmp_path / "file.pth")["model"])


def harmful(witness: Path) -> dict[str, Any]:
    """Objects each of which makes a file when it is unpickled."""
    Stateful.witness = str(witness)
    command = f"touch {witness}"
    return {
        "system": Calls(os.system, command),
        "eval": Calls(eval, f"__import__('os').mkdir({str(witness)!r})"),
        "exec": Calls(exec, f"import os; os.mkdir({str(witness)!r})"),
        "mkdir": Calls(os.mkdir, str(witness)),
        "popen": Calls(subprocess.Popen, ["touch", str(witness)]),
        "torch file": Calls(torch.from_file, str(witness), True, 4),
        "storage file": Calls(torch.UntypedStorage.from_file, str(witness), True, 4),
        "torch save": Calls(torch.save, 1, str(witness)),
        "torch load": Calls(torch.load, str(witness)),
        "import": Calls(__import__, "antigravity"),
        "setstate": Stateful(),
        "state of a function": Calls(os.mkdir, str(witness), state={"a": 1}),
    }


@pytest.mark.parametrize("name", list(harmful(Path("/nowhere"))))
def test__a_pickle_that_runs_code_does_not_and_its_tensors_load(tmp_path: Path, name: str) -> None:
    witness = tmp_path / "witness"
    path = saved({"model": WEIGHTS, "harm": [harmful(witness)[name]], "after": 3}, tmp_path / "evil.pth")
    read = read_inert(path)
    assert equal(read["model"])
    assert read["after"] == 3
    assert isinstance(read["harm"][0], Placeholder)
    assert not witness.exists()
    # The same file does harm where pickles are trusted, so the test can fail.
    if name in {"system", "eval", "exec", "mkdir", "torch file", "torch save", "setstate"}:
        torch.load(path, weights_only=False)
        assert witness.exists()


def archive(path: Path, pickled: bytes, **records: bytes) -> Path:
    """An archive like torch's, with a pickle written by hand."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        for name, value in records.items():
            file.writestr(f"archive/data/{name}", value)
    return path


def reference_to(*identity: Any) -> bytes:
    """A pickle of one persistent reference."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return identity if value is Ellipsis else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump([..., 1])
    return buffer.getvalue()


def test__a_reference_that_is_written_by_hand_is_read(tmp_path: Path) -> None:
    pickled = reference_to("storage", torch.FloatStorage, "first", "cuda:0", 2)
    storage, _ = read_inert(archive(tmp_path / "file.pth", pickled, first=bytes(8)))
    assert storage.dtype == torch.float32
    assert storage.data.nbytes() == 8


@pytest.mark.parametrize(
    "identity",
    [
        ("storage", torch.FloatStorage, "../data.pkl", "cpu", 2),
        ("storage", torch.FloatStorage, "/etc/passwd", "cpu", 2),
        ("storage", torch.FloatStorage, "second", "cpu", 2),
        ("storage", torch.FloatStorage, "first", "cpu", 3),
        ("storage", torch.FloatStorage, "first", "cpu", -1),
        ("storage", torch.FloatStorage, "first", "cpu", "2"),
        ("storage", torch.FloatStorage, ["first"], "cpu", 2),
        ("storage", argparse.Namespace, "first", "cpu", 2),
        ("storage", ("storage", torch.FloatStorage, "first", "cpu", 2), "first", "cpu", 2),
        ("module", torch.FloatStorage, "first", "cpu", 2),
        ("storage",),
        (),
    ],
)
def test__references_to_anything_but_a_record_are_refused(tmp_path: Path, identity: tuple[Any, ...]) -> None:
    path = archive(tmp_path / "file.pth", reference_to(*identity), first=bytes(8))
    with pytest.raises((pickle.UnpicklingError, TypeError)):
        read_inert(path)


@pytest.mark.parametrize("floats", [6, 0])
@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (7,), (1,)), (4, (3,), (1,)), (0, (2, 2), (9, 1)), (-1, (1,), (1,)), (0, (7,), (1, 1)), (0, ("7",), (1,))],
)
def test__a_tensor_does_not_reach_beyond_its_storage(
    tmp_path: Path, offset: int, size: Any, stride: Any, floats: int
) -> None:
    """torch itself enlarges an empty storage, with memory that was anybody's."""
    identity = b"X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x05\x00\x00\x00firstX\x03\x00\x00\x00cpuK"
    identity += bytes([floats])
    # The tuple of arguments is laid out by hand, the storage first.
    parts = b"".join(pickle.dumps(each, protocol=2)[2:-1] for each in (offset, size, stride, False))
    pickled = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((" + identity + b"tQ" + parts + b"tR."
    path = archive(tmp_path / "file.pth", pickled, first=bytes(4 * floats))
    with pytest.raises((RuntimeError, TypeError, pickle.UnpicklingError)):
        read_inert(path)


def test__what_a_pickle_is_handed_cannot_be_changed(tmp_path: Path) -> None:
    """BUILD sets attributes of whatever lies on the stack: of a function, or of a class."""
    before = dict(unpickling._tensor.__dict__), unpickling._tensor.__defaults__, unpickling._Ordered.__init__
    for name in (b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n"):
        state = pickle.dumps((None, {"__defaults__": (1,), "__init__": 3, "update": 4, "dtype": 5}), protocol=2)[2:-1]
        read_inert(archive(tmp_path / "file.pth", b"\x80\x02" + name + state + b"b."))
    after = dict(unpickling._tensor.__dict__), unpickling._tensor.__defaults__, unpickling._Ordered.__init__
    assert before == after
    assert equal(read_inert(saved(collections.OrderedDict(WEIGHTS), tmp_path / "good.pth")))


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02(cos\nsystem\nX\x04\x00\x00\x00trueo.",
        b"\x80\x02(X\x04\x00\x00\x00trueios\nsystem\n.",
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85\x81.",
        b"\x80\x02cbuiltins\ngetattr\n(cos\nenviron\nX\x06\x00\x00\x00systemtR(X\x04\x00\x00\x00truetR.",
    ],
)
def test__every_way_to_call_gives_a_placeholder(tmp_path: Path, pickled: bytes) -> None:
    found = read_inert(archive(tmp_path / "file.pth", pickled))
    assert isinstance(found, Placeholder)


def test__a_call_that_calls_itself_ends(tmp_path: Path) -> None:
    # arguments = [function, type, arguments, None], given to itself.
    pickled = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\nq\x00]q\x01(h\x00Nh\x01Ne0(h\x00Nh\x01NtR."
    with pytest.raises(RecursionError):
        read_inert(archive(tmp_path / "file.pth", pickled))


def test__archives_that_torch_does_not_write_are_refused(tmp_path: Path) -> None:
    pickled = pickle.dumps({"a": 1}, protocol=2)
    path = tmp_path / "file.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickled)
    with pytest.raises(pickle.UnpicklingError, match="compressed"):
        read_inert(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("one/data.pkl", pickled)
        file.writestr("two/data.pkl", pickled)
    with pytest.raises(pickle.UnpicklingError, match="not one pickle"):
        read_inert(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("one/data.pkl", pickled)
        file.writestr("one/byteorder", "big")
    with pytest.raises(pickle.UnpicklingError, match="byte order"):
        read_inert(path)
