"""Writing a file so that it is either as before or complete, also after a power cut."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write under another name, flush to the disk, rename."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
