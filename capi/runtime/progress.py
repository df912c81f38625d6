"""Progress bars with the time left on a terminal, else a line now and then: for images, evaluations and runs."""

import logging
import sys
import time
from collections.abc import Sequence
from threading import Lock
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

_LOG = logging.getLogger("capi")
SECONDS_BETWEEN_LINES = 15
# Characters of both times, a short bar and the gaps between them; and those that a name keeps at least.
_BESIDE_NAMES, _SHORTEST_NAME = len("0:00:00left0:00:00━━━━━") + 6, 8

# The checker of shapes knows no typing.Self.
Shown = TypeVar("Shown", bound="ShowsBar")


def default_console() -> Console | None:
    """Where progress is shown to whoever gives no console: in a terminal or notebook. A quiet console shows none."""
    console = Console(stderr=True)
    return console if console.is_jupyter or sys.stderr.isatty() else None


def _progress(console: Console, *, transient: bool = True) -> Progress:
    """A bar that is as wide as the numbers beside it leave it: a narrow terminal cuts the bar, not the numbers."""
    whole = [Column(no_wrap=True) for _ in range(3)]
    return Progress(
        _NameColumn(console),
        BarColumn(bar_width=None),
        MofNCompleteColumn(table_column=whole[0]),
        TimeElapsedColumn(table_column=whole[1]),
        TextColumn("left"),
        _LeftColumn(table_column=whole[2]),
        TextColumn("{task.fields[values]}", markup=False),
        console=console,
        expand=True,
        transient=transient,
    )


class _LeftColumn(TimeRemainingColumn):
    """The time left: until `ends` where whoever shows the bar knows it, which is from its first update on."""

    def render(self, task: Task) -> Text:
        ends = task.fields.get("ends")
        if ends is None:
            return super().render(task)
        return Text(clock_time(max(ends - time.monotonic(), 0.0)), "progress.remaining")


class _NameColumn(TextColumn):
    """What is being done; of a long name the end, so that the numbers beside it are whole."""

    def __init__(self, console: Console) -> None:
        super().__init__("{task.description}", markup=False)
        self.console = console

    def render(self, task: Task) -> Text:
        numbers = 2 * len(f"{task.total or 0:.0f}") + 1
        room = max(self.console.width - _BESIDE_NAMES - numbers - len(task.fields["values"]), _SHORTEST_NAME)
        name = task.description
        return Text(name if len(name) <= room else f"\N{HORIZONTAL ELLIPSIS}{name[1 - room :]}")


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


class TaskProgress(ShowsBar):
    """Gets how much is done and shows how much is left. Without a console it writes to the log alone."""

    def __init__(self, what: str, total: int, console: Console | None = None, done: int = 0) -> None:
        self.what, self.total, self.done, self.first = what, total, done, done
        # Several threads may report.
        self.counting = Lock()
        self.start_time = self.last_line = time.monotonic()
        self.bar = None
        if console is not None and console.is_terminal:
            self.bar = _progress(console)
            self.task = self.bar.add_task(what, total=total, completed=done, values="")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)
        if kind is KeyboardInterrupt:
            _LOG.warning("%s: stopped after %d of %d", self.what, self.done, self.total)

    def advance(self, count: int = 1) -> None:
        """Count so many more as done."""
        with self.counting:
            self.done += count
        if self.bar:
            self.bar.update(self.task, completed=self.done)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            done = max(self.done - self.first, 1)
            left = (time.monotonic() - self.start_time) / done * (self.total - self.done)
            _LOG.info("%s: %d of %d, %s left", self.what, self.done, self.total, clock_time(left))


class EvaluationProgress(ShowsBar):
    """Called with what is being done, how much of it is done and how much there is. Without a console it is silent."""

    def __init__(self, console: Console | None) -> None:
        self.console, self.prefix = console or Console(quiet=True), ""
        self.last_line = time.monotonic()
        self.tasks: dict[str, TaskID] = {}
        self.bar = _progress(self.console) if self.console.is_terminal else None

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
                self.tasks[title] = self.bar.add_task(title, total=total, values="")
            self.bar.update(self.tasks[title], completed=done, total=total)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            self.console.print(f"{title}: {done} of {total}", soft_wrap=True, markup=False, highlight=False)


class RunProgress(ShowsBar):
    """Shows step, time left, images/s and loss; then what else fits beside them, the most important first."""

    def __init__(self, console: Console, total: int, start: int, title: str) -> None:
        self.console, self.total, self.first = console, total, start
        self.start_time = self.last_line = time.monotonic()
        self.bar = None
        if console.is_terminal:
            self.bar = _progress(console, transient=False)
            length = self._room() - 30
            if len(title) > length:
                title = title[: max(length - 1, 0)] + "…" * (length > 0)
            self.task = self.bar.add_task(title, total=total, completed=start, values="", ends=None)

    def update(self, step: int, numbers: Sequence[str]) -> None:
        """Show a step and its numbers, the most important first."""
        parts = list(numbers)
        text = "  ".join(parts)
        if self.bar:
            room = self._room() - len(self.bar.tasks[0].description)
            while len(text) > room and len(parts) > 2:
                parts.pop()
                text = "  ".join(parts)
            ends = time.monotonic() + self._seconds_left(step)
            self.bar.update(self.task, completed=step, values=text, ends=ends)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES or step == self.total:
            self.last_line = time.monotonic()
            left = clock_time(self._seconds_left(step))
            self.console.print(f"step {step}/{self.total}  {text}  {left} left", soft_wrap=True)

    def _room(self) -> int:
        """Characters that step, times and a short bar leave for the title and the values."""
        return self.console.width - (2 * len(str(self.total)) + 1) - _BESIDE_NAMES

    def _seconds_left(self, step: int) -> float:
        done = max(step - self.first, 1)
        return (time.monotonic() - self.start_time) / done * (self.total - step)
