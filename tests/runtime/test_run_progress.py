import io

import pytest
from rich.console import Console

from capi.runtime.progress import RunProgress

TEXT = "123 images/s  loss 5.432"


def test__without_a_terminal_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("capi.runtime.progress.time.monotonic", lambda: now[0])
    text = io.StringIO()
    with RunProgress(Console(file=text, width=200), total=100, start=0, title="run") as progress:
        for step in range(10, 101, 10):
            now[0] += 10
            progress.update(step, TEXT)
    lines = text.getvalue().splitlines()
    # Every second update lies 20 seconds after the last line; the last step always has one.
    assert [line.split()[1] for line in lines] == ["20/100", "40/100", "60/100", "80/100", "100/100"]
    assert TEXT in lines[0]
    assert "0:01:20 left" in lines[0]


def test__a_terminal_shows_a_bar_with_the_numbers() -> None:
    text = io.StringIO()
    with RunProgress(Console(file=text, width=200, force_terminal=True), total=100, start=40, title="run") as progress:
        progress.update(50, TEXT)
    assert "50/100" in text.getvalue()
    assert "loss 5.432" in text.getvalue()
