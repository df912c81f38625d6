"""Hostile command lines, images and run folders, made with a fixed seed, and how each was answered.

    python -m tests.integration.hostile GROUP FOLDER

imports everything once, makes the cases of a group in FOLDER, and runs each in a fork of its own: with 5 seconds of
CPU, with little more memory than the process has already, with its own folder as working directory. What happened is
printed as JSON, one line a case.
"""

import csv
import hashlib
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SEED = 20
# Of CPU. A case that waits for something (a FIFO, a lock) uses none: it is ended by the clock.
CPU_SECONDS, WALL_SECONDS = 5, 25
# Bytes that a case may take beyond what the process has when it begins.
MORE_MEMORY = 1536 * 2**20
GROUPS = ("words", "images", "runs", "weights")


@dataclass(frozen=True)
class Case:
    """A command, and what makes its folder hostile."""

    name: str
    words: list[str]
    prepare: Callable[[Path], None] = lambda folder: None
    codes: tuple[int, ...] = (2,)
    """What it may end with: some files are reported as broken, or left out, and the rest is done."""


@dataclass
class Answer:
    """What became of a case."""

    name: str
    code: int
    cpu: float
    out: str
    err: str
    codes: tuple[int, ...]
    changed: list[str] = field(default_factory=list)
    """What was created, changed or removed outside of the case's own folder."""


# --- command lines ---------------------------------------------------------------------------------------------------

LONG, LONG_PART, NUL, HALF = "a" * 5000, "b" * 300, "a\0b", "\udcff\udcfe"
ESCAPES, TURNED = "\x1b]0;title\x07\x1b[31mred\x1b[2J", "\u202egnp.cod\u2066"
NO_PATHS = [LONG, LONG_PART, f"x/{LONG_PART}/y", NUL, "", "  ", HALF, ESCAPES, TURNED, "missing", "photos/0.png/x"]
# Also where something is to be written.
NO_PLACES = [LONG, LONG_PART, NUL, "", "photos/0.png/x"]
NUMBERS = ["9" * 23, "-" + "9" * 23, "-1", "nan", "inf", "1e999", "0x10", "", "9" * 5000, "1_0", "\u0661\u0662", NUL]
LARGE = ["9" * 23, "9" * 400, "1e400", "-1", ".nan", ".inf", "[1]", "null", "{}", "0x" + "f" * 3000, "1:" * 900 + "1"]
KEYS = [
    *("model.depth", "model.width", "model.heads", "model.patch_size", "model.registers", "model.channels"),
    *("model.mlp_ratio", "clustering.prototypes", "clustering.iterations", "clustering.queue", "clustering.chunk_mib"),
    *("optimization.steps", "optimization.batch_size", "optimization.learning_rate", "data.image_size", "seed"),
    *("data.workers", "data.cache_mib", "data.max_megapixels", "data.crop_aspect", "run.snapshots", "run.log_steps"),
    *("checkpoint.keep", "checkpoint.every_minutes", "distributed.shards", "data.mean", "masking.predict"),
]
# Values that fit each by itself, and together ask for more than there is.
TOO_MUCH = [
    ["model.depth=10000000"],
    ["model.depth=1000", "model.width=32768", "model.heads=8"],
    ["model.width=65536", "model.heads=64"],
    ["model.mlp_ratio=1e6"],
    ["clustering.prototypes=16777216", "model.predictor.width=8192", "model.predictor.heads=8"],
    ["data.image_size=65536", "model.patch_size=1"],
    ["data.image_size=65536", "model.patch_size=4096", "optimization.batch_size=16777216"],
    ["optimization.batch_size=16777216", "data.image_size=224"],
    ["model.predictor.depth=100000000"],
    ["model=" + "{a: " * 200 + "1" + "}" * 200],
    ["model=&a [*a]"],
    ["model.width=!!python/object/apply:os.system [id]"],
    ["evaluations=[" + "{benchmark: demo/knn}," * 3 + "{benchmark: demo/knn, options: {neighbours: [" + "9" * 23 + "]}}]"],
]
# Commands by the slot that is filled: a thing to read, a place to write, a number.
READING = [
    ["doctor", "@"],
    ["report", "@"],
    ["watch", "@"],
    ["export", "@", "--out", "out.safetensors"],
    ["push", "@", "me/model", "--dry-run"],
    ["evaluate", "@", "folder/knn", "data=photos"],
    ["evaluate", "pixels:4", "@"],
    ["evaluate", "pixels:4", "csv/knn", "data=@"],
    ["evaluate", "pixels:4", "folder/knn", "data=photos", "exclude=@"],
    ["predict", "pixels:4", "@", "photos", "--out", "out"],
    ["predict", "pixels:4", "probe.safetensors", "@", "--out", "out"],
    ["compare", "@", "--on", "folder/knn", "--out", "out"],
    ["compare", "pixels:4", "--on", "@", "--out", "out"],
    ["extract", "@", "photos", "--out", "out.safetensors"],
    ["extract", "pixels:4", "@", "--out", "out.safetensors"],
    ["nearest", "@", "photos/0.png"],
    ["visualize", "@", "photos", "--out", "out"],
    ["explore", "@", "photos"],
    ["data", "check", "@"],
    ["shards", "@", "--out", "out"],
    ["pretrain", "@", "--data", "photos", "--out", "out"],
    ["pretrain", "tiny4", "--data", "@", "--out", "out"],
    ["pretrain", "tiny4", "init.encoder=@", "--data", "photos", "--out", "out"],
    ["plan", "@"],
    ["plan", "--suggest", "@"],
    ["recipes", "show", "@"],
    ["datasets", "show", "@"],
    ["ablate", "@", "--data", "photos", "--out", "out"],
    ["ablate", "predictor", "--data", "@", "--out", "out"],
    ["launch", "slurm", "@", "--data", "photos", "--out", "out", "--dry-run"],
    ["recipes", "--table", "@"],
    ["@"],
]
WRITING = [
    ["data", "check", "photos", "--json", "@"],
    ["shards", "photos", "--out", "@"],
    ["extract", "pixels:4", "photos", "--image-size", "8", "--out", "@.safetensors"],
    ["nearest", "missing.safetensors", "photos/0.png", "--out", "@.png"],
    ["visualize", "pixels:4", "photos", "--size", "8", "--out", "@"],
    ["evaluate", "pixels:4", "folder/knn", "data=photos", "--out", "@"],
    ["pretrain", "tiny4", "--data", "photos", "--out", "@"],
]
COUNTING = [
    ["shards", "photos", "--out", "out", "--shuffle", "@"],
    ["shards", "photos", "--out", "out", "--per-shard", "@"],
    ["shards", "photos", "--out", "out", "--workers", "@"],
    ["shards", "photos", "--out", "out", "--shard-size", "@"],
    ["data", "check", "photos", "--limit", "@"],
    ["data", "check", "photos", "--channels", "@"],
    ["watch", "photos", "--port", "@"],
    ["explore", "pixels:4", "--size", "@"],
    ["extract", "pixels:4", "photos", "--out", "out.safetensors", "--image-size", "@"],
    ["extract", "pixels:4", "photos", "--out", "out.safetensors", "--batch-size", "@"],
    ["nearest", "missing.safetensors", "photos/0.png", "--count", "@"],
    ["nearest", "missing.safetensors", "photos/0.png", "--at", "@,@"],
    ["plan", "tiny4", "--gpus", "@"],
    ["plan", "tiny4", "--pue", "@"],
    ["plan", "tiny4", "--mfu", "@"],
    ["pretrain", "tiny4", "--check", "--rounds", "@"],
    ["ablate", "predictor", "--data", "photos", "--out", "out", "--seeds", "@"],
    ["launch", "slurm", "tiny4", "--data", "photos", "--out", "out", "--dry-run", "--nodes", "@"],
    ["evaluate", "pixels:@", "folder/knn", "data=photos"],
    ["evaluate", "pixels:4", "folder/knn", "data=photos", "image_size=@"],
    ["evaluate", "pixels:4", "folder/knn", "data=photos", "encode_batch=@"],
    ["evaluate", "pixels:4", "folder/knn", "data=photos", "seed=@"],
    ["evaluate", "pixels:4", "folder/linear", "data=photos", "iterations=@"],
]


def words(choose: random.Random) -> Iterator[Case]:
    """Every command with something that is no path, no place or no number; and configs that ask for too much."""
    for commands, values, most in ((READING, NO_PATHS, 2), (WRITING, NO_PLACES, 2), (COUNTING, NUMBERS, 2)):
        for command in commands:
            for value in choose.sample(values, most):
                filled = [word.replace("@", value) for word in command]
                yield Case(f"{' '.join(command)[:60]} with {value[:12]!r} of {len(value)}", filled)
    for key in KEYS:
        yield Case(f"plan with {key}", ["plan", "tiny4", f"{key}={choose.choice(LARGE)}"])
    for overrides in TOO_MUCH:
        yield Case(f"plan with {overrides[0][:40]}", ["plan", "tiny4", *overrides])
    for name, text in hostile_yaml():
        yield Case(f"a recipe that is {name}", ["plan", "own.yaml"], _writer("own.yaml", text))
        yield Case(f"a benchmark that is {name}", ["evaluate", "pixels:4", "own.yaml"], _writer("own.yaml", text))
    yield Case("a recipe that is a FIFO", ["plan", "own.yaml"], lambda folder: os.mkfifo(folder / "own.yaml"))
    yield Case("a recipe that is a device", ["plan", "own.yaml"], _linker("own.yaml", "/dev/zero"))


def hostile_yaml() -> list[tuple[str, bytes]]:
    """Texts that are valid to some parser, and bad for it."""
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
    return [
        ("an alias bomb", bomb.encode()),
        ("deep", b"model: " + b"[" * 100_000),
        ("deep in blocks", b"- " * 50_000),
        ("not UTF-8", b"model: \xff\xfe"),
        ("large", b"# x\n" * 2_000_000),
        ("full of the same key", b"seed: 1\n" * 50_000),
        ("full of keys", b"".join(b"key%d: 1\n" % number for number in range(50_000))),
        ("a tag", b"model: !!python/object/apply:os.system ['touch ../../outside/x']\n"),
        ("a number in base 60", b"seed: " + b"1:" * 200_000 + b"1\n"),
        ("null", b"null\n"),
        ("escapes", b'"\\e[31mkey": 1\nmodel: {"\\u202e": 1}\n'),
    ]


# --- images ----------------------------------------------------------------------------------------------------------


def images(choose: random.Random) -> Iterator[Case]:
    """CSVs that lead elsewhere, folders with pipes, tars with wrong headers, indices that lie, broken tables."""
    yield from _csv_cases()
    yield from _folder_cases()
    yield from _tar_cases(choose)
    yield from _index_cases()
    yield from _table_cases(choose)


def _csv_cases() -> Iterator[Case]:
    places = {
        "an absolute path": lambda folder: str(folder.parents[1] / "outside" / "private.png"),
        "dots": lambda folder: "../../outside/private.png",
        "hidden dots": lambda folder: "photos/../../../outside/private.png",
        "a device": lambda folder: "/dev/zero",
        "a link to a device": _linked("zero.png", "/dev/zero"),
        "a link that leads out": _linked("link.png", "../../outside/private.png"),
        "a linked folder": lambda folder: (_linked("linked", "../../outside")(folder), "linked/private.png")[1],
        "a FIFO": _fifo,
        "a NUL": lambda folder: "photos/0\0.png",
        "a name of 5000 letters": lambda folder: LONG,
        "nothing": lambda folder: "",
        "the folder itself": lambda folder: ".",
        "a name with escapes": lambda folder: ESCAPES,
    }
    commands = {
        "pretrain": ["pretrain", "tiny4", "--data", "list.csv", "--out", "out"],
        "check": ["data", "check", "list.csv", "--workers", "1"],
        "evaluate": ["evaluate", "pixels:4", "csv/knn", "data=list.csv", "image_size=8"],
        "extract": ["extract", "pixels:4", "list.csv", "--out", "out.safetensors", "--image-size", "8"],
    }
    for number, (name, place) in enumerate(places.items()):
        for command in [list(commands)[number % 4], list(commands)[(number + 1) % 4]]:
            yield Case(f"{command}: a CSV with {name}", commands[command], _csv_with(place), codes=(0, 1, 2))
    for name, content in {
        "no UTF-8": b"file,label,split\n\xff\xfe,a,train\n",
        "a cell of 10 MB": b"file,label,split\n" + b"x" * 10_000_000 + b",a,train\n",
        "an open quote": b'file,label,split\n"' + b"a,b\n" * 100_000,
        "no rows": b"file,label,split\n",
        "no columns": b"\n\n",
        "NULs": b"\0" * 1000,
        "rows that are too long": b"file\n" + b"a,b,c,d\n",
    }.items():
        yield Case(f"a CSV with {name}", ["evaluate", "pixels:4", "csv/knn", "data=list.csv"], _writer("list.csv", content))
        yield Case(f"data check: a CSV with {name}", ["data", "check", "list.csv"], _writer("list.csv", content), (1, 2))


def _csv_with(place: Callable[[Path], str]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        named = place(folder)
        with (folder / "list.csv").open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = csv.writer(file)
            rows.writerow(("file", "label", "split"))
            rows.writerows((f"photos/{number}.png", "ab"[number % 2], "train") for number in range(4))
            rows.writerows([("photos/4.png", "a", "test"), ("photos/5.png", "b", "test"), (named, "a", "train")])

    return prepare


def _folder_cases() -> Iterator[Case]:
    fifo = "data check: a FIFO", ["data", "check", "photos", "--workers", "1"]
    yield Case(*fifo, lambda folder: os.mkfifo(folder / "photos" / "pipe.png"), (0,))
    for command in (["extract", "pixels:4", "photos", "--image-size", "8", "--out", "out.safetensors"], fifo[1]):
        yield Case(f"{command[0]}: a device", command, _linker("photos/zero.png", "/dev/zero"), (0,))
    for name, content in _broken_pictures().items():
        command = ["data", "check", "photos", "--workers", "1"]
        yield Case(f"data check: {name}", command, _writer("photos/bad.png", content), (0,))
    for name in (HALF + ".png", "\x1b[2J.png", "\u202egnp.png"):
        command = ["data", "check", "photos", "--workers", "1"]
        yield Case(f"data check: a file called {name!r}", command, _writer(f"photos/{name}", b"no image"), (0,))
    yield Case("a folder in itself", fifo[1], _linker("photos/again", "."), (0,))
    yield Case("only a FIFO", ["data", "check", "pipes"], lambda folder: _pipes(folder / "pipes"))
    mask = ["evaluate", "pixels:4", "masks/knn-segmentation", "data=.", "image_size=8"]
    yield Case("a mask that is a FIFO", mask, _masks)


def _pipes(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "a.png")


def _masks(folder: Path) -> None:
    for split in ("train", "test"):
        for kind in ("images", "masks"):
            (folder / kind / split).mkdir(parents=True)
            shutil.copy(folder / "photos" / "0.png", folder / kind / split / "a.png")
    (folder / "masks" / "test" / "a.png").unlink()
    os.mkfifo(folder / "masks" / "test" / "a.png")


def _broken_pictures() -> dict[str, bytes]:
    def png(width: int, height: int) -> bytes:
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        import zlib

        chunk = lambda kind, data: (  # noqa: E731
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")

    tiff = b"II*\0\x08\0\0\0" + struct.pack("<H", 3)
    tiff += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in ((256, 2**31), (257, 2**31), (277, 60000)))
    return {
        "a PNG of 2^31 pixels a side": png(2**31 - 1, 2**31 - 1),
        "a PNG of 50000 pixels a side": png(50_000, 50_000),
        "a PNG cut off": png(8, 8)[:40],
        "a TIFF of 2^31 pixels a side": tiff + b"\0\0\0\0",
        "a TIFF that points at itself": b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 256, 4, 1, 8) + struct.pack("<I", 8),
        "an EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n",
        "nothing": b"",
    }


def _tar_cases(choose: random.Random) -> Iterator[Case]:
    good = tar_bytes([("0.png", PNG), ("1.png", PNG)])
    header = tarfile.TarInfo("0.png")

    def with_size(field: bytes) -> bytes:
        block = bytearray(good[:512])
        block[124:136] = field
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return bytes(block) + good[512:]

    long = tarfile.TarInfo("x")
    long.type, long.size = b"L", 2**40
    pax = tarfile.TarInfo("x")
    pax.type, pax.size = b"x", 512
    sparse = tarfile.TarInfo("0.png")
    sparse.type, sparse.size = b"S", 2**40
    header.size = 2**62
    cases = {
        "a size that is negative": with_size(b"\xff" + b"\xff" * 11),
        "a size that leads back": with_size(b"\xff" * 9 + b"\xff\xfc\x00"),
        "a size of 2^62": header.tobuf(tarfile.GNU_FORMAT) + good,
        "a name of 2^40 letters": long.tobuf(tarfile.GNU_FORMAT) + good,
        "a pax header of nonsense": pax.tobuf(tarfile.GNU_FORMAT) + b"99999999999 path=x\n".ljust(512, b"\0") + good,
        "a sparse file of 2^40 bytes": sparse.tobuf(tarfile.GNU_FORMAT) + good,
        "an end that is missing": good[:700],
        "nothing": b"",
        "zeros": b"\0" * 10240,
        "no tar": b"hello" * 1000,
        "gzip": b"\x1f\x8b\x08\0" + b"x" * 100,
        "escapes in a name": tar_bytes([("\x1b[2J\u202e.png", b"no image"), ("1.png", PNG)]),
        "names that lead out": tar_bytes([("../../../outside/x.png", PNG), ("/outside/y.png", PNG)]),
    }
    for number in range(8):
        damaged = bytearray(good)
        for _ in range(20):
            damaged[choose.randrange(1024)] = choose.randrange(256)
        cases[f"noise, number {number}"] = bytes(damaged)
    for name, content in cases.items():
        command = choose.choice([["data", "check", "a.tar", "--workers", "1"], ["shards", "a.tar", "--out", "out"]])
        yield Case(f"{command[0]}: a tar with {name}", command, _writer("a.tar", content), (0, 2))
    yield Case("a tar that is a FIFO", ["data", "check", "a.tar"], lambda folder: os.mkfifo(folder / "a.tar"))
    yield Case("a tar that is a folder", ["data", "check", "a.tar"], lambda folder: (folder / "a.tar").mkdir())
    braces = ["{0..99999999999999999999999}.tar", "{" * 300 + ".tar", "{0..9}" * 9 + ".tar", "{a,b}" * 30 + ".tar"]
    for pattern in braces:
        yield Case(f"a pattern {pattern[:30]}", ["data", "check", pattern])


def _index_cases() -> Iterator[Case]:
    """An index beside a tar that is not true: it is made anew, and the images are read."""
    lies: dict[str, dict[str, Any]] = {
        "an offset below 0": {"places": [[-512, 10], [512, 10]]},
        "an offset beyond the end": {"places": [[2**40, 10], [512, 10]]},
        "a size of 2^62": {"places": [[512, 2**62], [512, 10]]},
        "a sum that overflows": {"places": [[2**62, 2**62], [512, 10]]},
        "a size below 0": {"places": [[512, -1], [512, 10]]},
        "fewer rows than it says": {"places": [[512, 10]]},
        "more rows than it says": {"images": 3},
        "names that end before they begin": {"name_ends": [0, 100, 5]},
        "names beyond the end": {"name_ends": [0, 5, 2**40]},
        "no names": {"name_ends": []},
        "no numbers of images": {"images": -1},
        "floats": {"dtype": "float32"},
    }
    for name, lie in lies.items():
        yield Case(f"an index with {name}", ["data", "check", "a.tar", "--workers", "1"], _lying_index(lie), (0,))
    for name, content in (("nothing", b""), ("a header of 2^60 bytes", struct.pack("<Q", 2**60)), ("noise", b"x" * 999)):
        case = f"an index with {name}", ["data", "check", "a.tar", "--workers", "1"]
        yield Case(*case, lambda folder, content=content: (_good_tar(folder), (folder / "a.tar.index").write_bytes(content)), (0,))
    case = "an index that is a FIFO", ["data", "check", "a.tar", "--workers", "1"]
    yield Case(*case, lambda folder: (_good_tar(folder), os.mkfifo(folder / "a.tar.index")), (0, 2))


def _lying_index(lie: dict[str, Any]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        import numpy as np
        from safetensors.numpy import save

        status = _good_tar(folder)
        kind = lie.get("dtype", "int64")
        arrays = {
            "places": np.array(lie.get("places", [[512, len(PNG)], [1536, len(PNG)]]), dtype=kind),
            "name_ends": np.array(lie.get("name_ends", [0, 5, 10]), dtype="int64"),
            "names": np.frombuffer(b"0.png1.png", dtype="uint8"),
        }
        head = {"format": "capi shard index 1", "bytes": status.st_size, "modified": status.st_mtime_ns, "digest": "x"}
        head["images"] = lie.get("images", 2)
        (folder / "a.tar.index").write_bytes(save(arrays, {key: str(value) for key, value in head.items()}))

    return prepare


def _good_tar(folder: Path) -> os.stat_result:
    (folder / "a.tar").write_bytes(tar_bytes([("0.png", PNG), ("1.png", PNG)]))
    return (folder / "a.tar").stat()


def _table_cases(choose: random.Random) -> Iterator[Case]:
    check = ["data", "check", "a.parquet", "--workers", "1"]
    rows = {
        "an absolute path": "/etc/hostname",
        "dots": "../../outside/private.png",
        "a device": "/dev/zero",
        "a NUL": "a\0b",
        "a long name": LONG,
        "escapes": ESCAPES,
    }
    for name, path in rows.items():
        yield Case(f"a table with {name}", check, _table(path), (0, 1, 2))
    for name, metadata in {"deep": b"[" * 100_000, "null": b'{"info": null}', "no text": b"\xff"}.items():
        yield Case(f"a table whose notes are {name}", check, _table(None, metadata), (0,))
    for number in range(5):
        yield Case(f"a damaged table, number {number}", check, _damaged_table(choose.randrange(2**31)), (0, 1, 2))
    for ending in ("parquet", "arrow"):
        for name, content in (("nothing", b""), ("noise", b"PAR1" + b"x" * 500 + b"PAR1"), ("half", b"ARROW1\0\0" + b"\xff" * 64)):
            yield Case(f"a .{ending} of {name}", ["data", "check", f"a.{ending}"], _writer(f"a.{ending}", content))


def _table(path: str | None, metadata: bytes | None = None) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        values = [{"bytes": PNG, "path": None}] * 2 + ([{"bytes": None, "path": path}] if path else [])
        kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        schema = pyarrow.schema([("image", kind)], metadata={b"huggingface": metadata} if metadata else None)
        table = pyarrow.table({"image": pyarrow.array(values, kind)}, schema=schema)
        pyarrow.parquet.write_table(table, folder / "a.parquet")

    return prepare


def _damaged_table(seed: int) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        _table("photos/0.png")(folder)
        content, noise = bytearray((folder / "a.parquet").read_bytes()), random.Random(seed)  # noqa: S311
        for _ in range(5):
            content[noise.randrange(4, len(content) - 8)] = noise.randrange(256)
        (folder / "a.parquet").write_bytes(content)

    return prepare


# --- run folders -----------------------------------------------------------------------------------------------------

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
LIST = "[" * 100_000 + "]" * 100_000
HOSTILE_JSON = {
    "deep": DEEP,
    "a deep list": LIST,
    "null": "null",
    "a list": "[]",
    "a number": "1" * 5000,
    "a key twice": '{"format": 1, "format": 2}',
    "nothing": "",
    "half": '{"format": 1, "da',
    "a huge version": '{"format": 1e999}',
    "a version of 400 digits": '{"format": ' + "9" * 400 + "}",
    "nulls": '{"format": null, "data": null, "starts": null, "versions": null, "step": null}',
    "nulls inside": '{"format": 1, "data": {"path": null, "images": null}, "starts": [null], "init": null}',
    "wrong types": '{"format": 1, "data": [1], "starts": {"a": 1}, "format_version": "x"}',
    "escapes": '{"format": 1, "data": {"path": "\\u001b[2J", "images": 3}, "starts": [{"device": "\\u001b[31m"}]}',
    "halves of letters": '{"format": 1, "data": {"path": "\\ud800", "images": 3, "fingerprint": "\\udfff"}, "starts": []}',
}
METRICS = {
    "deep": DEEP + "\n",
    "a line of 3 MB": '{"step": 1, "a": "' + "x" * 3_000_000 + '"}\n',
    "no numbers": '{"step": "x"}\n{"step": null}\n{"step": true}\n[1]\n"x"\n{"step": 1, "student_loss": {"a": []}}\n',
    "NaN": '{"step": 1, "student_loss": NaN}\n{"step": 2, "student_loss": Infinity}\n{"step": 3, "student_loss": 1e999}\n',
    "huge steps": '{"step": 9999999999999999999999, "student_loss": 1}\n{"step": -5, "student_loss": 1}\n',
    "many keys": '{"step": 1, ' + ", ".join(f'"k{number}": 1' for number in range(100_000)) + "}\n",
    "many keys in lines": "".join(f'{{"step": {number}, "k{number}": 1}}\n' for number in range(30_000)),
    "no UTF-8": "\udcff\udcfe\n",
    "escapes": '{"step": 1, "\\u001b[2Jkey": 1, "student_loss": "\\u001b[31m"}\n',
    "a huge number": '{"step": 1, "student_loss": ' + "9" * 4000 + "}\n",
    "nothing but brackets": "[" * 3_000_000,
}


def runs(choose: random.Random) -> Iterator[Case]:
    """A run folder in which one file is not what a run writes."""
    commands = {
        "doctor": ["doctor", "run"],
        "report": ["report", "run"],
        "export": ["export", "run", "--out", "out.safetensors"],
        "resume": ["pretrain", "run/config.yaml", "--data", "photos", "--out", "run", "--resume"],
        "push": ["push", "run", "me/model", "--dry-run", "--licence", "mit", "--out", "hub"],
    }
    for name, text in HOSTILE_JSON.items():
        for command in ["doctor", choose.choice(["report", "resume", "push"])]:
            yield Case(f"{command}: run.json is {name}", commands[command], _writer("run/run.json", text.encode()), (0, 1, 2))
    for name, text in hostile_yaml():
        for command in ["doctor", choose.choice(["report", "export", "push"])]:
            yield Case(f"{command}: config.yaml is {name}", commands[command], _writer("run/config.yaml", text), (0, 1, 2))
    for overrides in ({"depth": 10**7}, {"width": 2**40}, {"heads": 0}, {"depth": None}, {"registers": 10**12}):
        case = f"export: model of {overrides}", commands["export"]
        yield Case(*case, _changed_config(overrides))
        yield Case(f"doctor: model of {overrides}", commands["doctor"], _changed_config(overrides), (0, 1, 2))
    for name, text in METRICS.items():
        for command in ["doctor", choose.choice(["report", "resume"])]:
            written = text.encode("utf-8", "surrogateescape")
            yield Case(f"{command}: metrics are {name}", commands[command], _writer("run/metrics.jsonl", written), (0, 1, 2))
    for file in ("run.json", "config.yaml", "metrics.jsonl"):
        yield Case(f"doctor: {file} is a FIFO", commands["doctor"], _as_fifo(f"run/{file}"), (0, 1, 2))
        yield Case(f"report: {file} is a folder", commands["report"], _as_folder(f"run/{file}"), (0, 1, 2))
    for name, text in {"null": "null", "deep": DEEP, "lies": '{"prototypes": [{"file": "../../x.png", "number": "a"}]}'}.items():
        place = "run/pictures/prototypes/index.json"
        yield Case(f"report: the gallery is {name}", commands["report"], _writer(place, text.encode()), (0, 1, 2))
    picture = "run/pictures/snapshots/step_000000001_image_0.png"
    yield Case("report: a snapshot is a FIFO", commands["report"], _as_fifo(picture), (0, 1, 2))
    for name, text in HOSTILE_JSON.items():
        if name in {"deep", "null", "nulls", "half", "wrong types"}:
            case = f"push: results are {name}", [*commands["push"], "--results", "results"]
            yield Case(*case, _writer("results/results.json", text.encode()), (0, 2))


def _changed_config(model: dict[str, Any]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        import yaml

        path = folder / "run" / "config.yaml"
        tree = yaml.safe_load(path.read_text())
        tree["model"] |= model
        path.write_text(yaml.safe_dump(tree))

    return prepare


# --- weights ---------------------------------------------------------------------------------------------------------


def weights(choose: random.Random) -> Iterator[Case]:
    """Files of weights, probes and features whose headers lie."""
    load = ["export", "model.safetensors", "--out", "out.safetensors"]
    for name, change in _header_changes().items():
        yield Case(f"export: a file with {name}", load, _with_header("model.safetensors", change))
    for number in range(6):
        yield Case(f"export: a damaged file, number {number}", load, _noisy("model.safetensors", choose.randrange(2**31)), (0, 2))
    nearest = ["nearest", "features.safetensors", "photos/0.png", "--out", "sheet.png"]
    predict = ["predict", "pixels:4", "probe.safetensors", "photos", "--out", "predicted"]
    for name, text in HOSTILE_JSON.items():
        yield Case(f"export: facts are {name}", load, _with_metadata("model.safetensors", "capi", text))
        if name in {"deep", "null", "nulls", "a key twice", "wrong types"}:
            yield Case(f"nearest: facts are {name}", nearest, _with_metadata("features.safetensors", "capi_features", text))
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
    for architecture in ({"depth": 10**7}, {"width": None}, {"heads": 7}, {"grid": [2**40, 1]}, {"positions": ["x"]}, {"depth": 1000}):
        case = f"export: an architecture with {architecture}", ["export", "transformers", "--out", "out.safetensors"]
        yield Case(*case, _changed_json("transformers/config.json", architecture))
    for name in ("deep", "null", "a list", "nothing", "a key twice", "a number"):
        case = f"export: config.json is {name}", ["export", "transformers", "--out", "out.safetensors"]
        yield Case(*case, _writer("transformers/config.json", HOSTILE_JSON[name].encode()))
    for name, content in {"a pickle": b"\x80\x02cos\nsystem\nq\0.", "an empty zip": b"PK\x05\x06" + b"\0" * 18, "text": b"hello"}.items():
        yield Case(f"export: {name}", ["export", "own.pth", "--out", "out.safetensors"], _writer("own.pth", content))
    yield Case("export: a FIFO", ["export", "own.pth", "--out", "out.safetensors"], _as_fifo("own.pth"))


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
        "metadata of numbers": dumped(lambda header: header.update(__metadata__={"capi": 1})),
        "a name of escapes": dumped(lambda header: header.update({"\x1b[2J": first(header)})),
    }


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


# --- making folders --------------------------------------------------------------------------------------------------


def _writer(file: str, content: bytes) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)

    return prepare


def _linker(file: str, target: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).symlink_to(target)


def _linked(file: str, target: str) -> Callable[[Path], str]:
    def place(folder: Path) -> str:
        (folder / file).symlink_to(target)
        return file

    return place


def _fifo(folder: Path) -> str:
    os.mkfifo(folder / "photos" / "pipe.png")
    return "photos/pipe.png"


def _as_fifo(file: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return prepare


def _as_folder(file: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return prepare


def tar_bytes(members: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return buffer.getvalue()


def _png(shade: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 255 - shade, 40)).save(buffer, "PNG")
    return buffer.getvalue()


PNG = _png(90)


def make_template(folder: Path) -> None:
    """What every case finds in its folder: photos, a run of two steps, weights, features and a probe made from it."""
    import capi
    from capi.config.loading import parse_config

    for split in ("train", "test"):
        for number, kind in enumerate("ab"):
            (folder / "photos" / split / kind).mkdir(parents=True)
            for count in range(2):
                (folder / "photos" / split / kind / f"{count}.png").write_bytes(_png(100 * number + 20 * count + len(split)))
    for number in range(6):
        (folder / "photos" / f"{number}.png").write_bytes(_png(40 * number))
    config = parse_config(
        {
            "data": {"image_size": 8, "workers": 0},
            "model": {"width": 16, "depth": 1, "heads": 2, "patch_size": 4, "registers": 0},
            "clustering": {"prototypes": 8},
            "masking": {"predict": 1},
            "optimization": {"batch_size": 4, "steps": 2},
            "run": {"snapshots": 1, "report": False, "loggers": []},
        }
    )
    run, photos = folder / "run", str(folder / "photos")
    capi.pretrain(config, data=photos, out=run, device="cpu")
    capi.export(run, folder / "model.safetensors")
    capi.export(run, folder / "transformers", format="transformers")
    capi.extract("pixels:4", photos, out=folder / "features.safetensors", image_size=8)
    small = [f"data={photos}", "image_size=8", "neighbours=[1]", "features=[mean_patch]", "workers=0"]
    capi.evaluate("pixels:4", "folder/knn", small, out=folder / "evaluated")
    shutil.move(folder / "evaluated" / "probe.safetensors", folder / "probe.safetensors")
    shutil.rmtree(folder / "evaluated")


# --- running ---------------------------------------------------------------------------------------------------------


def cases_of(group: str) -> list[Case]:
    """The cases of a group: always the same ones."""
    made: Callable[[random.Random], Iterator[Case]] = globals()[group]
    return list(made(random.Random(SEED)))  # noqa: S311 - a fixed seed


def snapshot(folder: Path) -> dict[str, str]:
    """Everything under a folder, with what it holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        link = path.is_symlink()
        content = os.readlink(path).encode() if link else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def run_group(group: str, base: Path) -> Iterator[Answer]:
    """Make and run all cases, each in a fork."""
    outside, home, template = base / "outside", base / "home", base / "template"
    for folder in (outside, home, template, base / "cases"):
        folder.mkdir(parents=True)
    (outside / "private.png").write_bytes(_png(200))
    (outside / "notes.txt").write_text("to be left alone")
    make_template(template)
    before = snapshot(outside), snapshot(home), sorted(os.listdir(base)), snapshot(template)
    for number, case in enumerate(cases_of(group)):
        folder = base / "cases" / f"{number:03d}"
        shutil.copytree(template, folder, symlinks=True)
        case.prepare(folder)
        answer = run_case(case, folder)
        shutil.rmtree(folder)
        now = snapshot(outside), snapshot(home), sorted(os.listdir(base)), snapshot(template)
        if now != before or os.listdir(base / "cases"):
            answer.changed = [str(sorted(set(map(str, now)) ^ set(map(str, before))))[:500], *os.listdir(base / "cases")]
        yield answer


def run_case(case: Case, folder: Path) -> Answer:
    """One command in a fork of this process."""
    streams = [folder.parent.parent / f"{folder.name}.{name}" for name in ("out", "err")]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if child == 0:
        _become(case, folder, streams)
    code = _wait(child)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    out, err = (path.read_bytes().decode("utf-8", "backslashreplace") for path in streams)
    for path in streams:
        path.unlink()
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return Answer(case.name, code, round(cpu, 2), out[-4000:], err[-4000:], case.codes)


def _wait(child: int) -> int:
    """The exit code, or minus the signal that ended it."""
    end = time.monotonic() + WALL_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(case: Case, folder: Path, streams: list[Path]) -> None:
    """In the child: the command line, with limits."""
    code = 70
    try:
        os.setsid()
        for number, path in enumerate(streams, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(folder)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + MORE_MEMORY, size + MORE_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        sys.argv = ["capi", *case.words]
        from capi.cli import main

        main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - what a person would see
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    group, base = sys.argv[1], Path(sys.argv[2])
    os.environ |= {"HOME": str(base / "home"), "XDG_CACHE_HOME": str(base / "cache"), "HF_HUB_OFFLINE": "1"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(base / "tmp")}
    for name in ("tmp", "cache"):
        (base / name).mkdir(parents=True)
    import torch

    torch.set_num_threads(1)
    shown = os.fdopen(os.dup(1), "w")
    for answer in run_group(group, base):
        shown.write(json.dumps(asdict(answer)) + "\n")
        shown.flush()


if __name__ == "__main__":
    main()
