"""Writing a file so that it is either as before or complete, whoever else writes it at the same time."""

import os
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
