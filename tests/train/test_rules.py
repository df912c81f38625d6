"""Losses, scores, speed and broken images by made-up metrics: rules that hold for any run."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from capi.config.files import parse_config
from capi.train.health import Finding, Watchman
from capi.train.run import run_facts
from tests.variants import TARGETS

STEPS = 1000
SCORE = "demo/knn/teacher"


def findings(
    columns: Mapping[str, Sequence[float]], *overrides: str, images: int = 10**6, last: int = STEPS, config: bool = True
) -> dict[str, Finding]:
    """Findings by metric, of values spread evenly over a run up to a step; NaN as the file of metrics has it."""
    records: dict[int, dict[str, float | None]] = {}
    for key, values in columns.items():
        for step, value in zip(np.linspace(last / len(values), last, len(values)), values, strict=True):
            records.setdefault(int(step), {})[key] = None if math.isnan(value) else float(value)
    parsed = parse_config({}, [f"optimization.steps={STEPS}", *overrides])
    watchman = Watchman(run_facts(parsed, {"data": {"images": images}}, "cpu") if config else None)
    for step in sorted(records):
        watchman.see({"step": step, **records[step]})
    return {finding.key or finding.title: finding for finding in watchman.findings()}


def loss_state(values: Sequence[float], **others: Sequence[float]) -> str:
    return findings({"student_loss": values, **others})["student_loss"].state


FALLING = list(np.linspace(6, 3, 40))
STANDING = [*np.linspace(6, 4, 20), *[4.0] * 20]


def test__a_falling_loss_is_well_and_one_that_never_fell_is_an_alarm() -> None:
    assert loss_state(FALLING) == "well"
    assert loss_state([5.5] * 40) == "alarm"
    assert loss_state(list(np.linspace(5.5, 7, 40))) == "alarm"
    # One odd record at the end changes nothing.
    assert loss_state([*FALLING, 100.0]) == "well"


def test__a_loss_that_stands_still_is_worth_a_look_unless_scores_rise() -> None:
    assert loss_state(STANDING) == "look"
    assert loss_state(STANDING, **{SCORE: [0.1, 0.2, 0.3, 0.4]}) == "well"
    assert loss_state(STANDING, **{SCORE: [0.1, 0.3, 0.3, 0.2]}) == "look"


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test__of_a_run_without_clustering_nothing_is_said_of_clusters(kind: str) -> None:
    judged = findings({"student_loss": FALLING}, "clustering.prototypes=256", *TARGETS[kind])
    assert judged["student_loss"].state == "well"
    assert "clustering_loss" not in judged
    assert not [
        difference
        for difference in judged.values()
        if difference.key != "target_entropy" and "prototypes" in difference.text + difference.advice
    ]


@pytest.mark.parametrize(
    ("kind", "harder"), [("features", True), ("ema_head", True), ("pixels", False), ("frozen", False)]
)
def test__targets_get_harder_only_where_the_teacher_makes_them(kind: str, harder: bool) -> None:
    for scores in ([0.1, 0.2, 0.3, 0.4], [0.1, 0.3, 0.3, 0.2]):
        finding = findings({"student_loss": STANDING, SCORE: scores}, *TARGETS[kind])["student_loss"]
        assert ("the targets get harder" in (finding.text + finding.advice).lower()) == harder


def test__losses_are_not_judged_early_or_by_few_records() -> None:
    assert loss_state([5.5] * 8) == "unknown"
    assert findings({"student_loss": [5.5] * 40}, last=150)["student_loss"].state == "unknown"
    assert findings({})["student_loss"].state == "unknown"


def score_state(values: Sequence[float]) -> str:
    return findings({SCORE: values})[SCORE].state


def test__scores_below_their_start_are_an_alarm() -> None:
    assert score_state([0.3, 0.4, 0.5, 0.6]) == "well"
    assert score_state([0.3, 0.29, 0.2, 0.31]) == "alarm"
    # Scores of few images vary: one that is low by chance is no alarm.
    assert score_state([0.3, 0.4, 0.4, 0.2]) == "well"
    assert score_state([0.3, 0.9, 0.4, 0.35, 0.7]) == "look"
    assert score_state([0.3, 0.9, 0.4, 0.35, 0.8]) == "well"
    assert score_state([0.3, 0.1]) == "unknown"
    assert score_state([0.3]) == "unknown"
    assert findings({})["Scores"].text == "no evaluation was made"


def test__nan_is_reported_with_its_step() -> None:
    nan = math.nan
    finding = findings({"student_loss": [3, nan, 2, 1]})["student_loss"]
    assert finding.state == "look"
    assert "1 of 4 values are NaN, the last at step 500" in finding.text
    assert loss_state([3, 2, nan]) == "alarm"
    # Losses are numbers from the first step on; what else is not known at first becomes known later.
    assert loss_state([nan, nan]) == "alarm"
    assert findings({"effective_rank": [nan, nan, 99, 99, 99]})["effective_rank"].state == "well"
    assert findings({"prototype_use": [0.9, 0.9, nan]})["prototype_use"].state == "alarm"
    assert "prototype_use" not in findings({"prototype_use": [nan, 0.9, 0.9]})
    # One NaN at the end of a measure with a range is judged by the median.
    assert findings({"effective_rank": [99, 99, 99, nan]})["effective_rank"].state == "look"


def test__a_speed_that_fell_by_half_is_worth_a_look() -> None:
    steady = np.cumsum([1.0] * 30)
    slow = np.cumsum([1.0] * 24 + [2.5] * 6)
    assert [findings({"seconds": list(stretch)})["seconds"].state for stretch in (steady, slow)] == ["well", "look"]
    # The clock restarts when a run is resumed, and an evaluation between two records takes its time.
    resumed = np.cumsum([1.0] * 10 + [30.0] + [1.0] * 9).tolist() + np.cumsum([1.0] * 20).tolist()
    finding = findings({"seconds": resumed}, "optimization.batch_size=6")["seconds"]
    assert finding.state == "well"
    # 25 steps a second, of 6 images.
    assert finding.text == "150 images/s now, 150 as a rule"
    assert "seconds" not in findings({"seconds": [1.0, 2.0]})


@pytest.mark.parametrize(("broken", "state"), [(0, "well"), (9, "well"), (11, "look"), (101, "alarm")])
def test__broken_images_are_judged_by_their_share(broken: int, state: str) -> None:
    finding = findings({"broken_images": [0, broken]}, images=1000)["broken_images"]
    assert finding.state == state
    assert f"{broken} of 1000" in finding.text
    assert bool(finding.advice) == (state != "well")


def test__without_a_config_what_can_be_said_is_said() -> None:
    judged = findings({"student_loss": FALLING, SCORE: [0.1, 0.2, 0.3, 0.4]}, config=False)
    assert judged["student_loss"].state == judged[SCORE].state == "well"
    assert set(judged) == {"student_loss", SCORE}
    assert set(findings({}, config=False)) == {"student_loss", "Scores"}
