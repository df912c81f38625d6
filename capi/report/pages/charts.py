"""The curves of a report as data: which charts there are, what each draws, thinned to what a screen can show.

A chart has one line for each run and metric. The page's own script draws them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from capi.report.pages.data import Column, RunReport
from capi.train.health import METRICS, TABLE, is_score, metric_of, range_text

# Stretches of a curve of which the lowest and the highest value are drawn.
STRETCHES = 800
# Further charts, for metrics that this version does not know.
_FURTHER = 60
_HIDDEN = ("step", "seconds", "evaluation_seconds")


@dataclass(frozen=True)
class Chart:
    """What a chart shows: a title, what it means, and the metrics with their names in the legend."""

    key: str
    title: str
    meaning: str
    metrics: Mapping[str, str]
    group: str = "curves"
    percent: bool = False


def thin(column: Column, stretches: int = STRETCHES) -> Column:
    """Lowest and highest value of each stretch, a gap where it has one, and both ends: the same curve to the eye."""
    count = len(column.values)
    if count <= 3 * stretches:
        return column
    width = -(-count // stretches)
    filled = np.full(-(-count // width) * width, np.nan)
    filled[:count] = column.values
    rows = filled.reshape(-1, width)
    missing, starts = np.isnan(rows), np.arange(len(rows)) * width
    lowest = starts + np.where(missing, np.inf, rows).argmin(axis=1)
    highest = starts + np.where(missing, -np.inf, rows).argmax(axis=1)
    gaps = (starts + missing.argmax(axis=1))[missing.any(axis=1)]
    chosen = np.unique(np.concatenate([[0, count - 1], lowest, highest, gaps]))
    # What fills up the last row is no gap of the curve.
    chosen = chosen[chosen < count]
    return Column(column.steps[chosen], column.values[chosen])


def chart_list(keys: Iterable[str]) -> list[Chart]:
    """The charts for these metrics: scores first, then what is known in its order, then what is not."""
    present = dict.fromkeys(key for key in keys if key not in _HIDDEN)
    scores = sorted(key for key in present if is_score(key))
    usual = [metric.key for metric in METRICS if metric.key in present]
    others = sorted(key for key in present if key not in TABLE and not is_score(key))[:_FURTHER]
    metrics = {key: metric_of(key) for key in [*usual, *others]}
    plain = (Chart(key, metric.title, metric.description, {key: ""}) for key, metric in metrics.items())
    return [*_score_charts(scores), *plain]


def charts_data(runs: Sequence[RunReport]) -> dict[str, Any]:
    """All charts of some runs, as the page's script takes them."""
    charts = [
        replace(chart, meaning=loss_meaning(runs)) if chart.key == "student_loss" else chart
        for chart in chart_list(dict.fromkeys(key for run in runs for key in run.columns))
    ]
    drawn = [data for data in (_chart_data(chart, runs) for chart in charts) if data["lines"]]
    return {"charts": drawn, "runs": [run.name for run in runs]}


def loss_meaning(runs: Sequence[RunReport]) -> str:
    """What the student's loss is. Runs with different targets have losses that cannot be compared."""
    labels = list(dict.fromkeys(run.loss for run in runs if run.loss is not None))
    if len(labels) > 1:
        listed = "; ".join(f"{label.name} in {label.unit}" for label in labels)
        return f"Losses of different targets, which cannot be compared: {listed}."
    return metric_of("student_loss", labels[0]).description if labels else metric_of("student_loss").description


def _score_charts(keys: Sequence[str]) -> list[Chart]:
    """A chart for each score, with teacher and student as its lines."""
    names = dict.fromkeys(key.rpartition("/")[0] for key in keys)
    charts = []
    for name in names:
        metrics = {key: key.rpartition("/")[2] for key in keys if key.rpartition("/")[0] == name}
        # The teacher is what one uses in the end, so it comes first.
        ordered = dict(sorted(metrics.items(), key=lambda pair: (pair[1] != "teacher", pair[1])))
        charts.append(Chart(name, name, "Score of the frozen features.", ordered, group="scores", percent=True))
    return charts


def _chart_data(chart: Chart, runs: Sequence[RunReport]) -> dict[str, Any]:
    lines = [
        _line(run.columns[key], run.name, label, number, kind, several=len(runs) > 1)
        for number, run in enumerate(runs)
        for kind, (key, label) in enumerate(chart.metrics.items())
        if key in run.columns
    ]
    numbers = [value for line in lines for value in line["values"] if value is not None]
    return {
        "key": chart.key,
        "group": chart.group,
        "title": chart.title,
        "meaning": chart.meaning,
        # Scores are shares, except those of evaluations of one's own, which may be anything.
        "percent": chart.percent and all(0 <= value <= 1 for value in numbers),
        **_healthy(chart.key, runs),
        "lines": lines,
    }


def _line(column: Column, run: str, label: str, number: int, kind: int, *, several: bool) -> dict[str, Any]:
    # A measure that is not known yet is NaN; that is no gap to be shown.
    finite = ~np.isnan(column.values)
    first = int(finite.argmax()) if finite.any() else 0
    whole = Column(column.steps[first:], column.values[first:])
    drawn = thin(whole)
    return {
        "label": " ".join(part for part in (run if several else "", label) if part),
        "run": number,
        "kind": kind,
        "records": len(whole.values),
        "missing": int(np.isnan(whole.values).sum()),
        "steps": drawn.steps.tolist(),
        "values": [_short(value) for value in drawn.values.tolist()],
    }


def _short(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.6g}")


def _healthy(key: str, runs: Sequence[RunReport]) -> dict[str, Any]:
    """The healthy range in numbers and words, where all runs have the same."""
    ranges = {finding.limits for run in runs for finding in run.measures if finding.key == key}
    if len(ranges) != 1:
        return {"limits": None, "healthy": ""}
    limits = ranges.pop() or (-math.inf, math.inf)
    numbers = [float(f"{limit:.6g}") if math.isfinite(limit) else None for limit in limits]
    return {"limits": numbers, "healthy": range_text(limits)}


def score_line(
    label: str, number: int, points: Sequence[tuple[float, float]], *, faint: bool = False, level: bool = False
) -> dict[str, Any]:
    """A line of scores over anything; a faint one stands behind the others, a level does not depend on it."""
    return {
        "label": label,
        "run": number,
        "kind": int(level),
        "faint": faint,
        "records": len(points),
        "missing": 0,
        "steps": [x for x, _ in points],
        "values": [_short(y) for _, y in points],
    }


def score_chart(
    key: str,
    title: str,
    meaning: str,
    lines: Sequence[Mapping[str, Any]],
    *,
    across: str,
    group: str = "curves",
    logarithmic: bool = False,
) -> dict[str, Any]:
    """A chart of shares over something else than steps; `logarithmic` says that logarithms to base 10 are given."""
    shape = {"percent": True, "limits": None, "healthy": "", "across": across, "logarithmic": logarithmic}
    return {"key": key, "group": group, "title": title, "meaning": meaning, **shape, "lines": list(lines)}
