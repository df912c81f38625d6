"""A case, and what its folder is made of."""

import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LONG, ESCAPES = "a" * 5000, "\x1b]0;title\x07\x1b[31mred\x1b[2J"


@dataclass(frozen=True)
class Case:
    """A command, and what makes its folder hostile."""

    name: str
    words: list[str]
    prepare: Callable[[Path], object] = lambda folder: None
    codes: tuple[int, ...] = (2,)
    """What it may end with: some files are reported as broken, or left out, and the rest is done."""


def writer(file: str, content: bytes) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)

    return prepare


def linker(file: str, target: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).symlink_to(target)


def linked(file: str, target: str) -> Callable[[Path], str]:
    def place(folder: Path) -> str:
        (folder / file).symlink_to(target)
        return file

    return place


def pipe_among_photos(folder: Path) -> str:
    os.mkfifo(folder / "photos" / "pipe.png")
    return "photos/pipe.png"


def as_fifo(file: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return prepare


def as_folder(file: str) -> Callable[[Path], None]:
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


def png_bytes(shade: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 255 - shade, 40)).save(buffer, "PNG")
    return buffer.getvalue()


PNG = png_bytes(90)
