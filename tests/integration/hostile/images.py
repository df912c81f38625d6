"""Images: CSVs that lead elsewhere, pipes, tars with wrong headers, indices that lie, broken tables."""

import csv
import os
import random
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.integration.hostile.archives import archives
from tests.integration.hostile.making import (
    ESCAPES,
    LONG,
    PNG,
    Case,
    linked,
    linker,
    pipe_among_photos,
    tar_bytes,
    writer,
)


def images(choose: random.Random) -> Iterator[Case]:
    """CSVs that lead elsewhere, folders with pipes, tars with wrong headers, indices that lie, broken tables."""
    yield from _csv_cases()
    yield from _folder_cases()
    yield from _tar_cases(choose)
    yield from _index_cases()
    yield from _table_cases(choose)
    yield from archives(choose)


def _csv_cases() -> Iterator[Case]:
    places = {
        "an absolute path": lambda folder: str(folder.parents[1] / "outside" / "private.png"),
        "dots": lambda folder: "../../outside/private.png",
        "hidden dots": lambda folder: "photos/../../../outside/private.png",
        "a device": lambda folder: "/dev/zero",
        "a link to a device": linked("zero.png", "/dev/zero"),
        "a link that leads out": linked("link.png", "../../outside/private.png"),
        "a linked folder": lambda folder: (linked("linked", "../../outside")(folder), "linked/private.png")[1],
        "a FIFO": pipe_among_photos,
        "a NUL": lambda folder: "photos/0\0.png",
        "a name of 5000 letters": lambda folder: LONG,
        "nothing": lambda folder: "",
        "the folder itself": lambda folder: ".",
        "a name with escapes": lambda folder: ESCAPES,
    }
    commands = {
        "pretrain": ["pretrain", "run/config.yaml", "--data", "list.csv", "--out", "out"],
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
        yield Case(
            f"a CSV with {name}", ["evaluate", "pixels:4", "csv/knn", "data=list.csv"], writer("list.csv", content)
        )
        yield Case(
            f"data check: a CSV with {name}", ["data", "check", "list.csv"], writer("list.csv", content), (0, 1, 2)
        )


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
        yield Case(f"{command[0]}: a device", command, linker("photos/zero.png", "/dev/zero"), (0,))
    for name, content in _broken_pictures().items():
        command = ["data", "check", "photos", "--workers", "1"]
        yield Case(f"data check: {name}", command, writer("photos/bad.png", content), (0,))
    for name in ("\udcff\udcfe.png", "\x1b[2J.png", "\u202egnp.png"):
        command = ["data", "check", "photos", "--workers", "1"]
        yield Case(f"data check: a file called {name!r}", command, writer(f"photos/{name}", b"no image"), (0,))
    yield Case("a folder in itself", fifo[1], linker("photos/again", "."), (0,))
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
        chunk = lambda kind, data: (  # noqa: E731
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )
        return (
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
            + chunk(b"IEND", b"")
        )

    tiff = b"II*\0\x08\0\0\0" + struct.pack("<H", 3)
    tiff += b"".join(
        struct.pack("<HHII", tag, 4, 1, value) for tag, value in ((256, 2**31), (257, 2**31), (277, 60000))
    )
    return {
        "a PNG of 2^31 pixels a side": png(2**31 - 1, 2**31 - 1),
        "a PNG of 50000 pixels a side": png(50_000, 50_000),
        "a PNG cut off": png(8, 8)[:40],
        "a TIFF of 2^31 pixels a side": tiff + b"\0\0\0\0",
        "a TIFF that points at itself": b"II*\0\x08\0\0\0\x01\0"
        + struct.pack("<HHII", 256, 4, 1, 8)
        + struct.pack("<I", 8),
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
        yield Case(f"{command[0]}: a tar with {name}", command, writer("a.tar", content), (0, 2))
    yield Case("a tar that is a FIFO", ["data", "check", "a.tar"], lambda folder: os.mkfifo(folder / "a.tar"))
    yield Case("a tar that is a folder", ["data", "check", "a.tar"], lambda folder: (folder / "a.tar").mkdir())
    braces = ["{0..99999999999999999999999}.tar", "{" * 300 + ".tar", "{0..9}" * 9 + ".tar", "{a,b}" * 30 + ".tar"]
    for pattern in braces:
        yield Case(f"a pattern {pattern[:30]}", ["data", "check", pattern])


def _index_cases() -> Iterator[Case]:
    """An index beside a tar that is not true: it is made again, and the images are read."""
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
    for name, content in (
        ("nothing", b""),
        ("a header of 2^60 bytes", struct.pack("<Q", 2**60)),
        ("noise", b"x" * 999),
    ):
        case = f"an index with {name}", ["data", "check", "a.tar", "--workers", "1"]
        yield Case(
            *case,
            lambda folder, content=content: (_good_tar(folder), (folder / "a.tar.index").write_bytes(content)),
            (0,),
        )
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
        for name, content in (
            ("nothing", b""),
            ("noise", b"PAR1" + b"x" * 500 + b"PAR1"),
            ("half", b"ARROW1\0\0" + b"\xff" * 64),
        ):
            yield Case(f"a .{ending} of {name}", ["data", "check", f"a.{ending}"], writer(f"a.{ending}", content))


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
