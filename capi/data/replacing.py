"""Writing a file or a folder so that it is either as before or complete, whoever else writes it at the same time."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write under; what lies there is flushed to the disk and renamed, or removed after an error."""
    # Of each process its own, since several may find at once that the file is missing.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(out: Path) -> Iterator[Path]:
    """A folder to make and fill; it takes the place of what lies at `out`, or is removed after an error."""
    target = out.resolve()
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        # On the disk before it has its name, so that a power cut leaves no hollow files.
        for path in (*partial.iterdir(), partial):
            _flush(path)
        _put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    replaced = partial.with_suffix(".replaced")
    target.rename(replaced)
    try:
        partial.rename(target)
    except OSError:
        replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows opens no folders.
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
