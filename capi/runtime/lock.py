"""Lock files: one process at a time. A lock ends with the process that holds it, also when it is killed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from capi.errors import CapiError
from capi.runtime.links import open_nofollow

try:
    import fcntl
except ImportError:  # Windows has no such locks.
    fcntl = None  # type: ignore[assignment]


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
