"""The curves of a report as data: which charts there are, what each draws, thinned to what a screen can show.

A chart has one line for each run and metric. The page's own script draws them.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from capi.report.pages.data import Column, RunReport
from capi.train.health import RULES, spoken

# Stretches of a curve of which the lowest and the highest value are drawn.
STRETCHES = 800
# Further charts, for metrics that this version does not know.
_FURTHER = 60
_SCORE_MARK = "/"
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


_RULED = {rule.key: Chart(rule.key, rule.title, rule.meaning, {rule.key: ""}) for rule in RULES}
_PLAIN = {
    key: Chart(key, title, meaning, {key: ""})
    for key, title, meaning in (
        (
            "student_loss",
            "Loss of the student",
            "How far predictions are from the targets.",
        ),
        (
            "clustering_loss",
            "Loss of the clustering",
            "Cross-entropy to the balanced assignments, in nat.",
        ),
        (
            "prototype_use",
            "Balance of the assignments",
            "How evenly the targets use the prototypes; 1 is even.",
        ),
        ("images_per_second", "Speed", "Images a second, since the run was last started."),
        ("learning_rate", "Learning rate", "Of the student, at each step."),
        ("teacher_momentum", "Momentum of the teacher", "How slowly the teacher follows the student; 1 is not at all."),
        ("broken_images", "Broken images", "Images that could not be read so far, and were replaced by others."),
    )
}
_FIRST = ("student_loss", "clustering_loss", "target_entropy")
_LAST = ("prototype_use", "images_per_second", "learning_rate", "teacher_momentum", "broken_images")
_ORDER = (*_FIRST, *(key for key in _RULED if key not in _FIRST), *_LAST)


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
    known = {**_PLAIN, **_RULED}
    present = {key for key in keys if key not in _HIDDEN}
    scores = sorted(key for key in present if _SCORE_MARK in key)
    others = sorted(present - set(scores) - set(known))
    further = [Chart(key, key, "A metric that this version of capi has no words for.", {key: ""}) for key in others]
    return [*_score_charts(scores), *(known[key] for key in _ORDER if key in present), *further[:_FURTHER]]


def charts_data(runs: Sequence[RunReport]) -> dict[str, Any]:
    """All charts of some runs, as the page's script takes them."""
    charts = [
        replace(chart, meaning=loss_meaning(runs)) if chart.key == "student_loss" else chart
        for chart in chart_list(dict.fromkeys(key for run in runs for key in run.columns))
    ]
    drawn = [one for one in (_chart_data(chart, runs) for chart in charts) if one["lines"]]
    return {"charts": drawn, "runs": [run.name for run in runs]}


def loss_meaning(runs: Sequence[RunReport]) -> str:
    """What the student's loss is. Runs with different targets have losses that cannot be compared."""
    labels = list(dict.fromkeys(run.loss for run in runs if run.loss is not None))
    if len(labels) > 1:
        listed = "; ".join(f"{label.name} in {label.unit}" for label in labels)
        return f"Losses of different targets, which cannot be compared: {listed}."
    return labels[0].meaning if labels else _PLAIN["student_loss"].meaning


def as_json(data: Any) -> str:
    """JSON that can stand inside a page: nothing in it can end the element that holds it."""
    written = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _score_charts(keys: Sequence[str]) -> list[Chart]:
    """A chart for each score, with teacher and student as its lines."""
    names = dict.fromkeys(key.rpartition(_SCORE_MARK)[0] for key in keys)
    charts = []
    for name in names:
        metrics = {key: key.rpartition(_SCORE_MARK)[2] for key in keys if key.rpartition(_SCORE_MARK)[0] == name}
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
    known = [value for line in lines for value in line["values"] if value is not None]
    return {
        "key": chart.key,
        "group": chart.group,
        "title": chart.title,
        "meaning": chart.meaning,
        # Scores are shares, except those of evaluations of one's own, which may be anything.
        "percent": chart.percent and all(0 <= value <= 1 for value in known),
        **_healthy(chart.key, runs),
        "lines": lines,
    }


def _line(column: Column, run: str, label: str, number: int, kind: int, *, several: bool) -> dict[str, Any]:
    whole = _without_leading_gap(column)
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


def _without_leading_gap(column: Column) -> Column:
    """A measure that is not known yet has no number; that is no fault to be shown."""
    known = ~np.isnan(column.values)
    first = int(known.argmax()) if known.any() else 0
    return Column(column.steps[first:], column.values[first:])


def _short(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.6g}")


def _healthy(key: str, runs: Sequence[RunReport]) -> dict[str, Any]:
    """The healthy range in numbers and words, where all runs have the same."""
    found = {finding.limits for run in runs for finding in run.findings if finding.rule.key == key}
    if len(found) != 1:
        return {"limits": None, "healthy": ""}
    limits = found.pop()
    numbers = [float(f"{limit:.6g}") if math.isfinite(limit) else None for limit in limits]
    return {"limits": numbers, "healthy": spoken(limits)}
