"""Lock files: one process at a time. A lock ends with the process that holds it, also when it is killed."""

import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout, lock_descriptor

from capi.errors import CapiError
from capi.runtime.atomic import NOFOLLOW, refuse_link

_LOG = logging.getLogger("capi")
# Whoever asks `is_being_trained` holds the lock for less.
_SECONDS_TO_ASK = 0.5


@contextmanager
def locked(path: Path, *, busy: str | None = None, waiting: str | None = None) -> Iterator[None]:
    """Hold the lock file `path`. Where another process or thread holds it, raise the sentence `busy`, or else wait,
    and say `waiting` first.

    Workers that are forked do not inherit it.
    """
    # The library opens nothing through a link either; this is the sentence that says so.
    refuse_link(path)
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise CapiError(f"{path} is no regular file: expected a lock; remove it")
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=_SECONDS_TO_ASK if busy or waiting else -1)
    except Timeout as error:
        if busy:
            raise CapiError(busy) from error
        _LOG.info("%s", waiting)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def is_being_trained(run: Path) -> bool | None:
    """Whether a process holds the lock of a run; None where this system cannot tell. Nothing is created or changed."""
    try:
        descriptor = os.open(run / ".lock", os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        if lock_descriptor(descriptor, blocking=False):
            return False
        # It may be another one who asks.
        time.sleep(_SECONDS_TO_ASK / 10)
        return not lock_descriptor(descriptor, blocking=False)
    except OSError:
        return None
    finally:
        os.close(descriptor)
