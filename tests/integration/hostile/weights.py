"""Files of weights, probes and features whose headers lie."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.integration.hostile.making import (
    Case,
    as_fifo,
    writer,
)
from tests.integration.hostile.runs import DEEP, HOSTILE_JSON


def weights(choose: random.Random) -> Iterator[Case]:
    """Files of weights, probes and features whose headers lie."""
    load = ["export", "model.safetensors", "--out", "out.safetensors"]
    for name, change in _header_changes().items():
        yield Case(f"export: a file with {name}", load, _with_header("model.safetensors", change))
    for number in range(6):
        yield Case(
            f"export: a damaged file, number {number}",
            load,
            _noisy("model.safetensors", choose.randrange(2**31)),
            (0, 2),
        )
    yield from _adapt_cases()
    nearest = ["nearest", "features.safetensors", "photos/0.png", "--out", "sheet.png"]
    predict = ["predict", "pixels:4", "probe.safetensors", "photos", "--out", "predicted"]
    for name, text in HOSTILE_JSON.items():
        yield Case(f"export: facts are {name}", load, _with_metadata("model.safetensors", "capi", text))
        if name in {"deep", "null", "nulls", "a key twice", "wrong types"}:
            yield Case(
                f"nearest: facts are {name}", nearest, _with_metadata("features.safetensors", "capi_features", text)
            )
            yield Case(f"predict: facts are {name}", predict, _with_metadata("probe.safetensors", "capi_probe", text))
    for name, changes in {
        "a grid of zeros": {"framing": {"size": [8, 8], "grid": [0, 0], "whole": False, "channels": 3}},
        "a size of 10^9": {"framing": {"size": [10**9, 10**9], "grid": [2, 2], "whole": False, "channels": 3}},
        "10^9 channels": {"framing": {"size": [8, 8], "grid": [2, 2], "whole": False, "channels": 10**9}},
        "a root that is a device": {"root": "/dev"},
        "null classes": {"classes": [None]},
        "an encoder that is null": {"encoder": None},
        "shapes of strings": {"shapes": {"mean_patch": ["a"]}},
        "shapes of huge numbers": {"shapes": {"mean_patch": [10**12]}},
        "images below 0": {"images": -1},
    }.items():
        yield Case(f"nearest: {name}", nearest, _with_facts("features.safetensors", "capi_features", changes), (0, 2))
    for name, changes in {
        "a size of 10^9": {"size": [10**9, 10**9]},
        "a size of strings": {"size": ["a", "b"]},
        "classes that are a list": {"classes": [1]},
        "settings that are null": {"settings": None},
        "an unknown kind": {"kind": "\x1b[2J"},
        "a version of text": {"version": "x"},
        "an encoder of text": {"encoder": "x"},
    }.items():
        yield Case(f"predict: {name}", predict, _with_facts("probe.safetensors", "capi_probe", changes), (1, 2))
    for architecture in (
        {"depth": 10**7},
        {"width": None},
        {"heads": 7},
        {"grid": [2**40, 1]},
        {"positions": ["x"]},
        {"depth": 1000},
    ):
        case = f"export: an architecture with {architecture}", ["export", "transformers", "--out", "out.safetensors"]
        yield Case(*case, _changed_json("transformers/config.json", architecture))
    for name in ("deep", "null", "a list", "nothing", "a key twice", "a number"):
        case = f"export: config.json is {name}", ["export", "transformers", "--out", "out.safetensors"]
        yield Case(*case, writer("transformers/config.json", HOSTILE_JSON[name].encode()))
    for name, content in {
        "a pickle": b"\x80\x02cos\nsystem\nq\0.",
        "an empty zip": b"PK\x05\x06" + b"\0" * 18,
        "text": b"hello",
    }.items():
        yield Case(f"export: {name}", ["export", "own.pth", "--out", "out.safetensors"], writer("own.pth", content))
    yield Case("export: a FIFO", ["export", "own.pth", "--out", "out.safetensors"], as_fifo("own.pth"))


def _adapt_cases() -> Iterator[Case]:
    """What a run would start from."""
    adapt = ["adapt", "model.safetensors", "--data", "photos", "--out", "out"]
    for name in ("a deep header", "a shape of 10^18", "an offset beyond the end", "a tensor less", "a tensor twice"):
        yield Case(f"adapt: a file with {name}", adapt, _with_header("model.safetensors", _header_changes()[name]))
    for name in ("deep", "nulls", "escapes"):
        yield Case(f"adapt: facts are {name}", adapt, _with_metadata("model.safetensors", "capi", HOSTILE_JSON[name]))
    yield Case("adapt: a FIFO", ["adapt", "own.pth", *adapt[2:]], as_fifo("own.pth"))
    yield Case("adapt: a run of other weights", [*adapt[:4], "--out", "run", "--resume"])


Header = dict[str, Any]


def _header_changes() -> dict[str, Callable[[Header], bytes]]:
    def dumped(change: Callable[[Header], object]) -> Callable[[Header], bytes]:
        def made(header: Header) -> bytes:
            change(header)
            text = json.dumps(header).encode()
            return struct.pack("<Q", len(text)) + text

        return made

    def first(header: Header) -> Header:
        return next(value for name, value in header.items() if name != "__metadata__")

    return {
        "a header of 2^60 bytes": lambda header: struct.pack("<Q", 2**60) + b"{}",
        "a header of 90 MB": lambda header: struct.pack("<Q", 90_000_000) + b"{",
        "a deep header": lambda header: struct.pack("<Q", len(DEEP)) + DEEP.encode(),
        "an empty header": lambda header: struct.pack("<Q", 0),
        "a header of null": lambda header: struct.pack("<Q", 4) + b"null",
        "an offset below 0": dumped(lambda header: first(header).update(data_offsets=[-8, 8])),
        "an offset beyond the end": dumped(lambda header: first(header).update(data_offsets=[2**40, 2**41])),
        "an unknown dtype": dumped(lambda header: first(header).update(dtype="Q99")),
        "another dtype": dumped(lambda header: first(header).update(dtype="I8")),
        "a shape of 10^18": dumped(lambda header: first(header).update(shape=[10**9, 10**9])),
        "a shape of nulls": dumped(lambda header: first(header).update(shape=[None])),
        "a tensor less": dumped(lambda header: header.pop(next(name for name in header if name != "__metadata__"))),
        "a tensor twice": _twice,
        "metadata of numbers": dumped(lambda header: header.update(__metadata__={"capi": 1})),
        "a name of escapes": dumped(lambda header: header.update({"\x1b[2J": first(header)})),
    }


def _twice(header: Header) -> bytes:
    """A name that stands for two tensors: which of them is meant depends on the reader."""
    name = next(name for name in header if name != "__metadata__")
    text = f"{json.dumps(header)[:-1]}, {json.dumps(name)}: {json.dumps(header[name])}}}".encode()
    return struct.pack("<Q", len(text)) + text


def _with_header(file: str, change: Callable[[Header], bytes]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        header, body = _split(folder / file)
        (folder / file).write_bytes(change(header) + body)

    return prepare


def _with_metadata(file: str, mark: str, text: str) -> Callable[[Path], None]:
    return _with_header(file, lambda header: _packed(header | {"__metadata__": {mark: text}}))


def _with_facts(file: str, mark: str, changes: dict[str, Any]) -> Callable[[Path], None]:
    def change(header: Header) -> bytes:
        facts = json.loads(header["__metadata__"][mark]) | changes
        return _packed(header | {"__metadata__": {mark: json.dumps(facts)}})

    return _with_header(file, change)


def _packed(header: Header) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def _split(path: Path) -> tuple[Header, bytes]:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def _noisy(file: str, seed: int) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        noise, content = random.Random(seed), bytearray((folder / file).read_bytes())  # noqa: S311
        for _ in range(10):
            content[noise.randrange(2000)] = noise.randrange(256)
        (folder / file).write_bytes(content)

    return prepare


def _changed_json(file: str, changes: dict[str, Any]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))

    return prepare
