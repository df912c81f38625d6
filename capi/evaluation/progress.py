"""What a person sees while an evaluation goes on: a bar for each part with the time left, or a line now and then."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from capi.data.telling import SECONDS_BETWEEN_LINES, ShowsBar


class EvaluationProgress(ShowsBar):
    """Called with what is being done, how much of it is done and how much there is."""

    def __init__(self, console: Console) -> None:
        self.console, self.prefix = console, ""
        self.last_line = time.monotonic()
        self.tasks: dict[str, TaskID] = {}
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        left = (TextColumn("left"), TimeRemainingColumn())
        self.bar = Bar(*columns, *left, console=console, transient=True) if console.is_terminal else None

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
