"""Reference curves from made-up runs, and where others lie against them."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capi.api.demo import EVALUATION
from capi.config.files import dump_config, load_config
from capi.errors import CapiError
from capi.report import references
from capi.report.pages.data import Column
from capi.report.references import (
    POINTS,
    Band,
    Reference,
    compare,
    curve_of,
    make_reference,
    parse_reference,
    reference_for,
    shipped_references,
)
from capi.zoo.run_folder import RunFolder

STEPS = 400
SHORT = (f"optimization.steps={STEPS}",)
Metrics = Callable[[int], dict[str, Any]]


def write_run(folder: Path, metrics: Metrics, *overrides: str, steps: int = STEPS, data: str = "photos") -> Path:
    """A run of the demo recipe, as far as a doctor looks at it."""
    config = load_config("demo", [*SHORT, *overrides])
    facts = {"path": "demo", "images": 675, "fingerprint": data}
    RunFolder(folder).create(dump_config(config), {"seed": config.seed, "data": facts})
    lines = [json.dumps({"step": step, **metrics(step)}) for step in range(10, steps + 1, 10)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def falling(by: float = 0.0) -> Metrics:
    """A loss that falls from 5 to 3, shifted; what is no metric of a reference comes along."""

    def metrics(step: int) -> dict[str, Any]:
        record = {"student_loss": 5 - 2 * step / STEPS + by, "seconds": step, "learning_rate": 1e-3}
        return record | ({"demo/knn/teacher": 0.5 + by} if step % 200 == 0 else {})

    return metrics


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / f"seed{seed}", falling(0.1 * seed), f"seed={seed}") for seed in range(3)]


@pytest.fixture
def reference(runs: list[Path]) -> Reference:
    return parse_reference(json.dumps(make_reference(runs, "demo")), "made up")


def columns(metrics: Metrics, steps: int = STEPS) -> dict[str, Column]:
    records = [(step, metrics(step)) for step in range(10, steps + 1, 10)]
    return {
        key: Column(
            np.array([step for step, record in records if key in record]),
            np.array([record[key] for _, record in records if key in record], dtype=float),
        )
        for key in records[-1][1]
    }


def test__a_curve_holds_the_median_of_each_twentieth() -> None:
    steps = np.arange(0, STEPS + 1, 5)
    values = np.sin(steps / 30.0)
    values[3] = np.nan
    expected = []
    for number in range(POINTS):
        start, stop = number * STEPS / POINTS, (number + 1) * STEPS / POINTS
        inside = [v for s, v in zip(steps, values, strict=True) if start < s <= stop or (s == 0 and number == 0)]
        expected.append(float(np.median([v for v in inside if not np.isnan(v)])))
    assert curve_of(Column(steps, values), STEPS) == pytest.approx(expected)
    half = curve_of(Column(steps[:41], values[:41]), STEPS)
    assert half[: POINTS // 2] == pytest.approx(expected[: POINTS // 2])
    assert half[POINTS // 2 :] == [None] * (POINTS // 2)


def test__the_band_is_that_of_the_seeds_widened_by_its_width_or_by_two_percent() -> None:
    band = compare("x", [1.5], [[1.0], [2.0], [1.2]])
    assert (band.seeds, band.band) == (Band(1.0, 2.0), Band(0.0, 3.0))
    band = compare("x", [1.5], [[1.0], [1.0]])
    assert band.band == pytest.approx((0.98, 1.02))
    assert band.outside


def test__a_curve_is_outside_when_most_of_its_last_three_values_are() -> None:
    seeds = [[1.0] * 5, [2.0] * 5]
    for curve, outside in (
        ([1.5, 1.5, 9.0], False),
        ([1.5, 9.0, 9.0], True),
        ([9.0, 9.0, 9.0, 1.5, 1.5], False),
        ([1.5, -9.0, 1.5, 9.0], True),
        ([9.0], True),
        ([1.5, 9.0, None, None], False),
        ([0.0, 0.0, 3.0], False),
    ):
        assert compare("x", [*curve], seeds).outside == outside, curve
    assert compare("x", [None, None], seeds) is None
    assert compare("x", [1.0], [[None], [None]]) is None


def test__a_reference_holds_curves_but_no_times_and_schedules(reference: Reference) -> None:
    assert set(reference.curves) == {"student_loss", "demo/knn/teacher"}
    assert reference.seeds == (0, 1, 2)
    assert all(len(curve) == POINTS for curves in reference.curves.values() for curve in curves)
    assert reference.curves["student_loss"][2][-1] == pytest.approx(3 + 0.2 + 0.025, abs=1e-5)


def test__runs_inside_and_outside_of_the_band_are_distinguished(reference: Reference) -> None:
    config = load_config("demo", SHORT)

    def outside(by: float, steps: int = STEPS) -> dict[str, bool]:
        return {
            comparison.metric: comparison.outside
            for comparison in reference.compare(columns(falling(by), steps), config)
        }

    assert outside(0.1) == {"student_loss": False, "demo/knn/teacher": False}
    # The seeds lie 0.2 apart, so that 0.2 more on either side is taken for normal.
    assert outside(0.39) == {"student_loss": False, "demo/knn/teacher": False}
    assert outside(0.41) == {"student_loss": True, "demo/knn/teacher": True}
    assert outside(-0.21) == {"student_loss": True, "demo/knn/teacher": True}
    # Also of a run that is half-way.
    half = next(
        comparison
        for comparison in reference.compare(columns(falling(0.41), 200), config)
        if comparison.metric == "student_loss"
    )
    assert (half.share, half.outside) == (0.5, True)


def test__only_runs_of_the_same_model_images_and_length_are_compared(reference: Reference) -> None:
    assert reference.comparable(load_config("demo", SHORT))
    for free in ("seed=9", "run.loggers=[tensorboard]", "evaluations=[]", "run.log_steps=5", "data.workers=3"):
        config = load_config("demo", [*SHORT, free])
        assert reference.comparable(config), free
        assert reference.changes(config) == [], free
    for other in ("optimization.steps=401", "model.depth=3", "data.flip=false"):
        assert not reference.comparable(load_config("demo", [*SHORT, other])), other


def test__settings_that_are_tried_out_are_named(reference: Reference) -> None:
    config = load_config("demo", [*SHORT, "clustering.sinkhorn=standard"])
    assert reference.comparable(config)
    assert reference.changes(config) == ['clustering.sinkhorn was "positionwise", is "standard"']


def test__scores_are_compared_where_they_are_measured_alike(reference: Reference) -> None:
    other = load_config("demo", [*SHORT, EVALUATION])
    assert [comparison.metric for comparison in reference.compare(columns(falling()), other)] == ["student_loss"]


def test__a_reference_is_found_by_config_and_images(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "shipped_references", lambda: [reference])
    assert reference_for(load_config("demo", [*SHORT, "seed=8"]), "photos") is reference
    assert reference_for(load_config("demo", SHORT), "other photos") is None
    assert reference_for(load_config("demo"), "photos") is None


def test__what_is_shipped_can_be_read_and_is_of_the_recipe_it_is_named_for() -> None:
    assert [shipped.name for shipped in shipped_references()] == ["demo"]
    for shipped in shipped_references():
        assert shipped.comparable(load_config(shipped.name))
        assert shipped.changes(load_config(shipped.name)) == []
        assert len(shipped.seeds) >= 3


def test__the_reference_of_the_demo_is_of_the_photos_that_come_with_it() -> None:
    from capi.data.sources import demo_photos

    (shipped,) = shipped_references()
    assert shipped.fingerprint == demo_photos("train").images.fingerprint


def test__runs_that_make_no_reference_are_refused(tmp_path: Path, runs: list[Path]) -> None:
    same = write_run(tmp_path / "same", falling())
    half = write_run(tmp_path / "half", falling(), "seed=5", steps=200)
    wide = write_run(tmp_path / "wide", falling(), "seed=6", "clustering.prototypes=128")
    strange = write_run(tmp_path / "strange", falling(), "seed=7", data="other")
    for others, message in (
        ([], "needs two finished runs"),
        ([same], "the same seed"),
        ([half], "is not finished .step 200 of 400"),
        ([wide], r"another config .* \(clustering\.prototypes was 256, is 128\)"),
        ([strange], "other images"),
        ([tmp_path / "nowhere"], "there is no folder"),
    ):
        with pytest.raises(CapiError, match=message):
            make_reference([runs[0], *others], "demo")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not valid JSON"), ("{}", "no file"), ('{"format": 2}', "newer capi"), ("[1]", "expected an object")],
)
def test__files_that_are_no_reference_are_reported(text: str, message: str) -> None:
    with pytest.raises(CapiError, match=message):
        parse_reference(text, "x.json")


def test__runs_left_out_in_turn_count_false_alarms(reference: Reference) -> None:
    """Three seeds with equal distances: the outer ones lie just at the edge of the band of the other two."""
    comparisons = [comparison for comparison in reference.left_out() if comparison.metric == "student_loss"]
    assert len(comparisons) == 3 * POINTS
    far = Reference("x", reference.config, "", (0, 1, 2), {"x": [[1.0] * POINTS, [1.1] * POINTS, [5.0] * POINTS]})
    assert sum(comparison.outside for comparison in far.left_out()) == POINTS


def test__the_script_writes_the_file_and_counts_false_alarms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(Path(__file__).parents[2] / "scripts" / "reference_curves.py")
    out = tmp_path / "new" / "demo.json"
    shifts = (0.0, 0.3, 0.1)
    runs = [write_run(tmp_path / f"{seed}", falling(by), f"seed={seed}") for seed, by in enumerate(shifts)]
    monkeypatch.setattr(sys, "argv", [script, *map(str, runs), "--out", str(out)])
    runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr().out
    assert "2 metrics of 3 runs" in printed
    # The second run lies outside of what the others have, in 20 values of its loss and 2 scores.
    assert "outside 22 of 66 times" in printed
    assert "student_loss: 20" in printed
    assert parse_reference(out.read_text(), str(out)).name == "demo"
    monkeypatch.setattr(sys, "argv", [script, str(runs[0]), "--out", str(out)])
    with pytest.raises(SystemExit, match="needs two finished runs"):
        runpy.run_path(script, run_name="__main__")
