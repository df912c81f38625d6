"""Trying again where reading fails for a moment, as it does on network file systems."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from capi.data.sources import ImageSource
from capi.runtime.documents import UnfitFileError
from capi.runtime.image_files import read_image

PAUSES = (0.1, 0.5, 2.0)
# What another try does not change.
LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, UnfitFileError)
Value = TypeVar("Value")


def retried(read: Callable[[], Value], sleep: Callable[[float], None] = time.sleep) -> Value:
    """What `read` gives; after an error of the system it is asked again, with growing pauses, and then given up."""
    for pause in PAUSES:
        try:
            return read()
        except LASTING:
            raise
        except OSError:
            sleep(pause)
    return read()


def read_bytes(source: ImageSource, index: int) -> bytes:
    """The bytes of an image's file, wherever it lies."""

    def read() -> bytes:
        content = source.read(index)
        return read_image(content) if isinstance(content, Path) else content

    return retried(read)
