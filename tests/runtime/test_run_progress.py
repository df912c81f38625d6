import io

import pytest
from rich.console import Console

from capi.runtime.progress import RunProgress

NUMBERS = ["123 images/s", "loss 5.432", "clustering 3.210", "entropy 0.56"]


def test__without_a_terminal_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("capi.runtime.progress.time.monotonic", lambda: now[0])
    text = io.StringIO()
    with RunProgress(Console(file=text, width=200), total=100, start=0, title="run") as progress:
        for step in range(10, 101, 10):
            now[0] += 10
            progress.update(step, NUMBERS)
    lines = text.getvalue().splitlines()
    # Every second update lies 20 seconds after the last line; the last step always has one.
    assert [line.split()[1] for line in lines] == ["20/100", "40/100", "60/100", "80/100", "100/100"]
    assert "  ".join(NUMBERS) in lines[0]
    assert "0:01:20 left" in lines[0]


def test__a_terminal_shows_a_bar_with_the_numbers() -> None:
    text = io.StringIO()
    with RunProgress(Console(file=text, width=200, force_terminal=True), total=100, start=40, title="run") as progress:
        progress.update(50, NUMBERS)
    assert "50/100" in text.getvalue()
    assert "loss 5.432" in text.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("total", [40, 125_000])
def test__a_narrow_terminal_shows_step_times_speed_and_loss_whole(width: int, total: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, color_system=None)
    with RunProgress(console, total=total, start=0, title="a_run_with_quite_a_long_name") as progress:
        progress.update(total // 2, ["1234 images/s", *NUMBERS[1:]])
        assert progress.bar is not None
        progress.bar.refresh()
    last = [line for line in screen.getvalue().splitlines() if "loss" in line][-1]
    for shown in (f"{total // 2}/{total} 0:00:00 left", "1234 images/s  loss 5.432"):
        assert shown in last
    assert ("entropy 0.56" in last) == (width == 200 or (width == 120 and total == 40))


def test__the_time_left_is_shown_from_the_first_record_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("capi.runtime.progress.time.monotonic", lambda: now[0])
    screen = io.StringIO()
    console = Console(file=screen, width=100, force_terminal=True, color_system=None)
    with RunProgress(console, total=100, start=0, title="run") as progress:
        now[0] = 30.0
        progress.update(10, NUMBERS)
        assert progress.bar is not None
        progress.bar.refresh()
    assert "left 0:04:30" in " ".join(screen.getvalue().split())
