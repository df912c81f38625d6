"""Progress bars with the time left on a terminal, else a line now and then: for images, evaluations and runs."""

import logging
import time
from threading import Lock
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

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


class EvaluationProgress(ShowsBar):
    """Called with what is being done, how much of it is done and how much there is. Without a console it is silent."""

    def __init__(self, console: Console | None) -> None:
        self.console, self.prefix = console or Console(quiet=True), ""
        self.last_line = time.monotonic()
        self.tasks: dict[str, TaskID] = {}
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        left = (TextColumn("left"), TimeRemainingColumn())
        self.bar = Progress(*columns, *left, console=self.console, transient=True) if self.console.is_terminal else None

    def begin(self, prefix: str) -> None:
        """Something else is being evaluated from here on."""
        self.prefix = prefix
        if self.bar:
            for task in self.tasks.values():
                self.bar.remove_task(task)
        self.tasks.clear()

    def __call__(self, what: str, done: int, total: int) -> None:
        title = f"{self.prefix}{what}"
        if self.bar:
            if title not in self.tasks:
                self.tasks[title] = self.bar.add_task(title, total=total)
            self.bar.update(self.tasks[title], completed=done, total=total)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            self.console.print(f"{title}: {done} of {total}", soft_wrap=True, markup=False, highlight=False)


class RunProgress(ShowsBar):
    """Shows step, time left, and what it is told of speed and losses."""

    def __init__(self, console: Console, total: int, start: int, title: str) -> None:
        self.console, self.total, self.first = console, total, start
        self.begun = self.last_line = time.monotonic()
        self.bar = None
        if console.is_terminal:
            columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            left = (TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[values]}"))
            self.bar = Progress(*columns, *left, console=console)
            self.task = self.bar.add_task(title, total=total, completed=start, values="")

    def update(self, step: int, text: str) -> None:
        """Show a step and its numbers."""
        if self.bar:
            self.bar.update(self.task, completed=step, values=text)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES or step == self.total:
            self.last_line = time.monotonic()
            self.console.print(f"step {step}/{self.total}  {text}  {self._left(step)} left", soft_wrap=True)

    def _left(self, step: int) -> str:
        done = max(step - self.first, 1)
        return clock_time((time.monotonic() - self.begun) / done * (self.total - step))
