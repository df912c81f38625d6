"""The report of a run, and the page that compares several.

A page is made of parts, each the inside of a section, so that a server can send those that changed.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from capi.errors import counted
from capi.report.pages.charts import chart_list, charts_data
from capi.report.pages.data import RunReport
from capi.report.pages.page import Live, as_json, render, section
from capi.train.health import is_score, metric_of, number_text

CHARTS = "charts"
_MISSING = {
    "scores": "No evaluation has been logged. The key evaluations of the config names some, which show what the "
    "features are good for.",
    "curves": "Nothing has been logged, so there are no curves to draw.",
}
_CURVES = {"scores": "Scores of teacher and student", "curves": "Curves"}


@dataclass(frozen=True)
class Pieces:
    """A page before it is put together: a title, headings in their order, sections, and the data of the charts."""

    title: str
    headings: Mapping[str, str]
    sections: Mapping[str, str]
    charts: Mapping[str, Any]

    @cached_property
    def digests(self) -> dict[str, str]:
        """A short fingerprint of each part, by which a page knows what changed."""
        written = {**self.sections, CHARTS: as_json(self.charts)}
        return {name: hashlib.sha256(value.encode()).hexdigest()[:16] for name, value in written.items()}


def run_pieces(run: RunReport) -> Pieces:
    """The report of one run: what was learnt first, then scores and curves, then health and all else."""
    steps = sorted({step for image in run.emergence for step, _ in image.pictures})
    past: dict[str, list[int]] = {}
    for step, finding in run.past:
        past.setdefault(finding.title, []).append(step)
    headings = {
        "state": "",
        "learnt": "What was learnt",
        **_CURVES,
        "health": "Health",
        "prototypes": "What the prototypes stand for",
        "cost": "Cost",
        "config": "Config",
        "provenance": "Where it comes from",
    }
    sections = {name: section(name, run) for name in ("state", "prototypes", "cost", "config", "provenance")}
    sections |= {"learnt": section("learnt", run, steps), "health": section("health", run, past)}
    return Pieces(run.name, headings, sections, charts_data([run]))


def comparison_pieces(runs: Sequence[RunReport], links: Sequence[str]) -> Pieces:
    """Several runs over each other; each link leads to the report of its run."""
    present = dict.fromkeys(key for run in runs for key in run.columns)
    compared = {
        key: f"{chart.title} {label}".strip()
        for chart in sorted(chart_list(present), key=lambda chart: chart.group == "scores")
        for key, label in chart.metrics.items()
        if chart.group == "scores" or metric_of(key).compared
    }
    rows = [(run, link, [_last_value(run, key) for key in compared]) for run, link in zip(runs, links, strict=True)]
    sections = {"runs": section("runs", rows, list(compared.values()))}
    return Pieces(counted(len(runs), "run"), {"runs": "", **_CURVES}, sections, charts_data(runs))


def page(pieces: Pieces, live: Live | None = None) -> str:
    """The whole file."""
    return render(
        "run.html",
        pieces.title,
        charts=pieces.charts,
        live=live,
        digests=pieces.digests,
        headings=pieces.headings,
        sections=pieces.sections,
        missing=_MISSING,
    )


def _last_value(run: RunReport, key: str) -> str:
    column = run.columns.get(key)
    last = column.last if column is not None else None
    if last is not None and is_score(key) and 0 <= last <= 1:
        return f"{last:.2%}"
    unit = f" {run.loss.unit}" if key == "student_loss" and run.loss else ""
    return "none" if last is None else number_text(last) + unit
