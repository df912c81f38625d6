"""What a person sees while images are looked through: a bar with the time left, or a line now and then."""

import logging
import time
from threading import Lock
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LOG = logging.getLogger("capi")
SECONDS_BETWEEN_LINES = 15


# The checker of shapes knows no typing.Self.
Shown = TypeVar("Shown", bound="ShowsBar")


class ShowsBar:
    """Something with a bar that is on the screen within its `with`, or with none where nobody looks."""

    bar: Progress | None

    def __enter__(self: Shown) -> Shown:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()


def clock_time(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Telling(ShowsBar):
    """Told how much is done; says how much is left. Without a console it speaks in the log alone."""

    def __init__(self, what: str, total: int, console: Console | None = None, done: int = 0) -> None:
        self.what, self.total, self.done, self.first = what, total, done, done
        # Several threads may have something to tell.
        self.counting = Lock()
        self.begun = self.last_line = time.monotonic()
        self.bar = None
        if console is not None and console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            self.bar = Progress(*columns, *times, console=console, transient=True)
            self.task = self.bar.add_task(what, total=total, completed=done)

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        with self.counting:
            self.done += count
        if self.bar:
            self.bar.update(self.task, completed=self.done)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            _LOG.info("%s: %d of %d, %s left", self.what, self.done, self.total, self._left())

    def _left(self) -> str:
        done = max(self.done - self.first, 1)
        return clock_time((time.monotonic() - self.begun) / done * (self.total - self.done))
