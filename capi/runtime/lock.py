"""Lock files: one process at a time. A lock ends with the process that holds it, also when it is killed."""

import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from capi.errors import CapiError
from capi.runtime.atomic import NOFOLLOW, open_nofollow

try:
    import fcntl
except ImportError:  # Windows has no such locks.
    fcntl = None  # type: ignore[assignment]

# Layouts of `struct flock`, and where the kind of lock stands in it.
_LAYOUTS = {"linux": ("@hhqqi", 0), "darwin": ("@qqihh", 3)}
# A process loses its record locks on a file when it closes any descriptor of it, and it may be the one that trains. So
# what was opened to ask stays open, one descriptor for each run.
_OPENED: dict[tuple[int, int], int] = {}


@contextmanager
def locked(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Hold the lock file `path`. Where another process holds it, raise the sentence `busy`, or wait without one."""
    if fcntl is None:
        yield
        return
    with open_nofollow(path, "a") as file:
        try:
            # A record lock: workers that are forked do not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except OSError as error:
            if busy is None:
                raise
            raise CapiError(busy) from error
        yield


def is_being_trained(run: Path) -> bool | None:
    """Whether another process holds the lock of a run; None where this system cannot tell."""
    layout = _LAYOUTS.get(sys.platform)
    if fcntl is None or layout is None:
        return None
    try:
        descriptor = _descriptor(run / ".lock")
        question = _question(*layout)
        answer = struct.unpack(layout[0], fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return bool(answer[layout[1]] != fcntl.F_UNLCK)


def _descriptor(path: Path) -> int:
    found = path.lstat()
    key = (found.st_dev, found.st_ino)
    if key not in _OPENED:
        _OPENED[key] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | NOFOLLOW)
    return _OPENED[key]


def _question(layout: str, kind: int) -> bytes:
    """Could this process take the whole file for itself?"""
    values = [0] * 5
    values[kind] = fcntl.F_WRLCK
    return struct.pack(layout, *values)
