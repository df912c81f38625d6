import io
import logging
import re

import pytest
from rich.console import Console

from capi.runtime import progress
from capi.runtime.progress import EvaluationProgress, TaskProgress, clock_time


def test__without_a_terminal_lines_tell_how_much_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, logger="capi"), TaskProgress("packing", 100, done=20) as shown:
        for _ in range(4):
            now[0] += 10
            shown.advance(10)
    assert caplog.messages == ["packing: 40 of 100, 0:01:00 left", "packing: 60 of 100, 0:00:40 left"]


def test__on_a_terminal_there_is_a_bar() -> None:
    screen = io.StringIO()
    with TaskProgress("packing", 3, Console(file=screen, force_terminal=True, width=100)) as shown:
        shown.advance(2)
        assert shown.bar is not None
        shown.bar.refresh()
    assert "packing" in screen.getvalue()
    assert "2/3" in screen.getvalue()


@pytest.mark.parametrize("width", [60, 80])
def test__a_long_name_is_cut_and_the_numbers_are_not(width: int) -> None:
    screen = io.StringIO()
    names = ("study/runs/default-seed0 on folder/attentive: training images", "study/runs/default-seed0: test")
    with EvaluationProgress(Console(file=screen, force_terminal=True, width=width)) as shown:
        for name in names:
            shown(name, 1234, 1281167)
        assert shown.bar is not None
        shown.bar.refresh()
    shown = screen.getvalue()
    assert "training images" in shown
    assert "1234/1281167" in shown
    assert "0:00:00" in shown
    # No number and no time ends in an ellipsis.
    assert re.search(r"[0-9:]\u2026", shown) is None


def test__the_bar_is_on_the_screen_within_the_block_alone() -> None:
    with TaskProgress("packing", 3, Console(file=io.StringIO(), force_terminal=True)) as shown:
        assert shown.bar is not None
        assert shown.bar.live.is_started
    assert not shown.bar.live.is_started


def test__an_interruption_says_how_far_it_came(caplog: pytest.LogCaptureFixture) -> None:
    def packed() -> None:
        with TaskProgress("packing", 9) as shown:
            shown.advance(4)
            raise KeyboardInterrupt

    with caplog.at_level(logging.WARNING, logger="capi"), pytest.raises(KeyboardInterrupt):
        packed()
    assert caplog.messages == ["packing: stopped after 4 of 9"]


@pytest.mark.parametrize(("seconds", "said"), [(0.0, "0:00:00"), (59.9, "0:00:59"), (3600.0 * 30 + 61, "30:01:01")])
def test__times_are_hours_minutes_and_seconds(seconds: float, said: str) -> None:
    assert clock_time(seconds) == said


@pytest.mark.parametrize("terminal", [True, False])
def test__progress_is_shown_by_default_where_someone_looks(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    assert (progress.default_console() is not None) == terminal
