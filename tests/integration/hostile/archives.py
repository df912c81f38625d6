"""Zips whose directory lies, HEIC photos that are damaged, and large images that are cut into tiles."""

import functools
import io
import os
import random
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.integration.hostile.making import ESCAPES, LONG, PNG, Case, linker, writer

_DIRECTORY, _END = b"PK\1\2", b"PK\5\6"


def archives(choose: random.Random) -> Iterator[Case]:
    """Zips, HEIC photos and tiles."""
    for name, content in _zips(choose).items():
        commands = [
            ["data", "check", "a.zip", "--workers", "1"],
            ["shards", "a.zip", "--out", "out", "--per-shard", "1"],
        ]
        yield Case(f"a zip with {name}", choose.choice(commands), writer("a.zip", content), (0, 2))
    check = ["data", "check", "a.zip"]
    yield Case("a zip that is a FIFO", check, lambda folder: os.mkfifo(folder / "a.zip"))
    yield Case("a zip that is a device", check, linker("a.zip", "/dev/zero"))
    photos = ["data", "check", "photos", "--workers", "1"]
    for name, content in _heics(choose).items():
        yield Case(f"a HEIC photo with {name}", photos, writer("photos/bad.heic", content), (0,))
    tiles = ["extract", "pixels:4", "large", "--tile", "8", "--out", "tiles"]
    for name, content in _large(choose).items():
        yield Case(f"tiles of {name}", tiles, writer("large/a.tif" if "TIFF" in name else "large/a.png", content))
    yield Case("tiles of a FIFO", ["extract", "pixels:4", "large/a.png", *tiles[3:]], _fifo_among_large)


def _packed(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return buffer.getvalue()


def _zips(choose: random.Random) -> dict[str, bytes]:
    good = _packed({"0.png": PNG, "1.png": PNG})

    def changed(mark: bytes, offset: int, field: bytes) -> bytes:
        """Some bytes of the first record of a kind replaced."""
        place = good.index(mark) + offset
        return good[:place] + field + good[place + len(field) :]

    link = zipfile.ZipInfo("link.png")
    link.external_attr = 0o120777 << 16
    linking = io.BytesIO(good)
    with zipfile.ZipFile(linking, "a") as archive:
        archive.writestr(link, "../../outside/private.png")
    cases = {
        "names that lead out": _packed({"../../outside/x.png": PNG, "/outside/y.png": PNG, "1.png": PNG}),
        "escapes in a name": _packed({f"{ESCAPES}\u202e.png": b"no image", "1.png": PNG}),
        "a name of 5000 letters": _packed({f"{LONG}.png": PNG}),
        "a link": linking.getvalue(),
        "a bomb": _packed({"0.png": b"\0" * 60_000_000, "1.png": PNG}),
        "a size of 4 GB": changed(_DIRECTORY, 24, struct.pack("<I", 2**32 - 2)),
        "a packed size of 4 GB": changed(_DIRECTORY, 20, struct.pack("<I", 2**32 - 2)),
        "an offset beyond the end": changed(_DIRECTORY, 42, struct.pack("<I", 2**31)),
        "an unknown method": changed(_DIRECTORY, 10, struct.pack("<H", 99)),
        "a password": changed(_DIRECTORY, 8, struct.pack("<H", 1)),
        "a directory of 4 GB": changed(_END, 12, struct.pack("<I", 2**32 - 2)),
        "a directory of 65534 members": changed(_END, 8, struct.pack("<HH", 65534, 65534)),
        "an end that is missing": good[:-30],
        "nothing in it": _packed({}),
        "zips in it": _packed({"a.zip": good}),
    }
    for number in range(5):
        cases[f"noise, number {number}"] = _noisy(good, choose, 15)
    return cases


@functools.cache
def _heic() -> bytes:
    import pillow_heif
    from PIL import Image

    pillow_heif.register_heif_opener()
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 40, 40)).save(buffer, "HEIF")
    return buffer.getvalue()


def _heics(choose: random.Random) -> dict[str, bytes]:
    good = _heic()
    size = good.index(b"ispe") + 8
    cases = {
        "its end missing": good[: len(good) // 2],
        "a brand alone": good[:24],
        "sides of 2^31 pixels": good[:size] + struct.pack(">II", 2**31 - 1, 2**31 - 1) + good[size + 8 :],
        "sides of 0 pixels": good[:size] + struct.pack(">II", 0, 0) + good[size + 8 :],
        "a box of 4 GB": good.replace(good[good.index(b"meta") - 4 :][:4], b"\xff" * 4, 1),
    }
    # The boxes, which come first, say where everything lies.
    for number in range(4):
        cases[f"noise, number {number}"] = _noisy(good[:300], choose, 8) + good[300:]
    return cases


def _large(choose: random.Random) -> dict[str, bytes]:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (10, 200, 30)).save(buffer, "TIFF")
    tags = ((256, 2**31), (257, 2**31), (277, 60000))
    endless = b"II*\0\x08\0\0\0" + struct.pack("<H", 3) + b"".join(struct.pack("<HHII", t, 4, 1, v) for t, v in tags)
    return {
        "a TIFF of 2^31 pixels a side": endless + b"\0" * 4,
        "a TIFF that points at itself": b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 256, 4, 1, 8) + b"\x08\0\0\0",
        "a TIFF that is cut off": buffer.getvalue()[:60],
        "a TIFF of noise": b"II*\0" + bytes(choose.randrange(256) for _ in range(200)),
        "no image": b"hello",
    }


def _noisy(content: bytes, choose: random.Random, count: int) -> bytes:
    damaged = bytearray(content)
    for _ in range(count):
        damaged[choose.randrange(len(damaged))] = choose.randrange(256)
    return bytes(damaged)


def _fifo_among_large(folder: Path) -> None:
    (folder / "large").mkdir()
    os.mkfifo(folder / "large" / "a.png")
