import math
from dataclasses import replace

import numpy as np
import pytest

from capi.report.pages.data import Column, RunState
from capi.train.health import number_text
from tests.report.report_runs import column, run_report


def test__numbers_keep_the_digits_that_matter() -> None:
    said = [number_text(value) for value in (0.0012345, 12.34567, 1234567.0, None, math.nan)]
    assert said == ["0.001234", "12.35", "1,234,567", "not measured", "NaN"]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (RunState("running", 40, 60), "training, at step 40 of 60"),
        (RunState("running", None, 60), "not written metrics yet"),
        (RunState("finished", 60, 60), "finished all 60 steps"),
        (RunState("stopped", 1200, 60000), "stopped at step 1,200 of 60,000"),
        (RunState("stopped", None, 60), "ended before it wrote any"),
        (RunState("unknown", 40, None), "reached step 40;"),
    ],
)
def test__the_state_is_said_in_a_sentence(state: RunState, expected: str) -> None:
    assert expected in state.sentence


def test__states_are_distinguished_without_color() -> None:
    marks = {RunState(kind, 1, 2).mark for kind in ("running", "finished", "stopped", "unknown")}
    assert len(marks) == 4
    assert all(not mark[0].isalpha() and mark[2:].isalpha() for mark in marks)


def test__the_last_value_is_the_newest() -> None:
    assert column(1.0, 3.0).last == 3.0
    assert Column(np.empty(0, np.int64), np.empty(0)).last is None


def test__alarms_are_the_findings_that_are_wrong() -> None:
    assert run_report().alarms == []
    assert [finding.key for finding in run_report(position_share=0.9).alarms] == ["position_share"]


STEPS = np.array([0, 60])


def test__gains_compare_the_teacher_with_its_start_and_with_pixels() -> None:
    scores = {
        "demo/knn/teacher": Column(STEPS, np.array([0.2, 0.6])),
        "demo/knn/student": Column(STEPS, np.array([0.2, 0.5])),
        "mine/distance/teacher": Column(STEPS, np.array([3.0, 2.0])),
        "late/knn/teacher": Column(np.array([5]), np.array([0.5])),
    }
    (gain,) = replace(run_report(), columns=scores, pixels={"demo/knn": 0.3}).gains
    assert (gain.name, gain.untrained, gain.now, gain.pixels) == ("demo/knn", 0.2, 0.6, 0.3)
