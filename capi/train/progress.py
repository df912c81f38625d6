"""What a person sees while a run goes on: a bar with the time left on a terminal, else a line now and then."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from capi.data.telling import SECONDS_BETWEEN_LINES, ShowsBar, clock_time

# What targets say of themselves: its name here, its key, and digits.
_OF_TARGET = (("clustering", "clustering_loss", 3), ("entropy", "target_entropy", 2), ("spread", "target_deviation", 2))


class RunProgress(ShowsBar):
    """Shows step, time left, images/s, losses and entropy."""

    def __init__(self, console: Console, total: int, start: int, title: str) -> None:
        self.console, self.total, self.first = console, total, start
        self.begun = self.last_line = time.monotonic()
        self.bar = None
        if console.is_terminal:
            columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            left = (TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[values]}"))
            self.bar = Bar(*columns, *left, console=console)
            self.task = self.bar.add_task(title, total=total, completed=start, values="")

    def update(self, step: int, values: dict[str, float]) -> None:
        """Show the numbers of a step."""
        text = f"{values['images_per_second']:.0f} images/s  loss {values['student_loss']:.3f}"
        text += "".join(f"  {name} {values[key]:.{digits}f}" for name, key, digits in _OF_TARGET if key in values)
        if self.bar:
            self.bar.update(self.task, completed=step, values=text)
        elif time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES or step == self.total:
            self.last_line = time.monotonic()
            self.console.print(f"step {step}/{self.total}  {text}  {self._left(step)} left", soft_wrap=True)

    def _left(self, step: int) -> str:
        done = max(step - self.first, 1)
        return clock_time((time.monotonic() - self.begun) / done * (self.total - step))
