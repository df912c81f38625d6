"""Retry of what fails for a moment, as network file systems and servers do."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from capi.runtime.documents import UnfitFileError

# Seconds before each retry of a file.
FILE_PAUSES = (0.1, 0.5, 2.0)
# Errors of files that a retry does not change.
LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, UnfitFileError)
Returned = TypeVar("Returned")


def retry(
    call: Callable[[], Returned],
    *,
    pauses: Sequence[float] | None = None,
    errors: type[Exception] | tuple[type[Exception], ...] = OSError,
    progress: Callable[[], int] = lambda: 0,
) -> Returned:
    """Call again after one of these errors, each time after the next pause; after the last one the error is raised.

    An attempt that made `progress` grow begins the pauses again.
    """
    pauses = FILE_PAUSES if pauses is None else pauses
    failures = 0
    while True:
        before = progress()
        try:
            return call()
        except LASTING:
            raise
        except errors:
            failures = 1 if progress() > before else failures + 1
            if failures > len(pauses):
                raise
        time.sleep(pauses[failures - 1])
