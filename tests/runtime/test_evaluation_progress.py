import io

import pytest
from rich.console import Console

from capi.runtime import progress as evaluation_progress
from capi.runtime.progress import EvaluationProgress


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(evaluation_progress, "time", clock)
    return clock


def test__where_no_one_watches_a_line_comes_now_and_then(clock: Clock) -> None:
    file = io.StringIO()
    with EvaluationProgress(Console(file=file)) as progress:
        for second in range(0, 40, 2):
            clock.now = second
            progress("images of [bold]cats", second, 100)
    assert file.getvalue().splitlines() == ["images of [bold]cats: 16 of 100", "images of [bold]cats: 32 of 100"]


def test__a_terminal_gets_a_bar_for_each_part() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, height=20, color_system=None)
    with EvaluationProgress(console) as progress:
        progress.begin("one ")
        progress("training [bold]images", 3, 8)
        progress("training [bold]images", 8, 8)
        progress("test images", 0, 5)
        assert [(task.description, task.completed, task.total) for task in progress.bar.tasks] == [
            ("one training [bold]images", 8, 8),
            ("one test images", 0, 5),
        ]
    shown = file.getvalue()
    assert "one training [bold]images" in shown
    assert "8/8" in shown
    assert "0/5" in shown


def test__a_quiet_console_says_nothing(clock: Clock) -> None:
    file = io.StringIO()
    with EvaluationProgress(Console(file=file, quiet=True)) as progress:
        clock.now = 100
        progress("images", 1, 2)
    assert file.getvalue() == ""


def test__an_error_ends_the_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(ValueError, match="x"), EvaluationProgress(console) as progress:
        raise ValueError("x")
    assert not progress.bar.live.is_started
