"""The report of a run, and the page that compares several: one HTML file that needs nothing else.

A page is made of parts, each the inside of a section, so that a server can send those that changed. Curves travel as
JSON and are drawn by the page's own script; all else is plain HTML. A policy with the digests of script and style keeps
anything else from being run or fetched.
"""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from html import escape
from importlib import resources
from itertools import groupby
from typing import Any

from capi.report.pages.charts import as_json, chart_list, charts_data
from capi.report.pages.data import RunReport, text
from capi.report.pages.health import health
from capi.report.pages.pictures import emergence, gallery
from capi.train.health import number_text

CHARTS = "charts"
_NO_SCORES = (
    "No evaluation has been logged. Name one in the config, under `evaluations`, to see what the features are good for."
)
_NO_CURVES = "Nothing has been logged, so there are no curves to draw."
# Metrics in the table of several runs, beside all scores.
_COMPARED = ("student_loss", "clustering_loss", "target_entropy", "images_per_second")


@dataclass(frozen=True)
class Live:
    """Where a served page asks for what changed, and how often."""

    base: str
    seconds: float
    home: str | None = None


@dataclass(frozen=True)
class Pieces:
    """A page before it is put together: a title, sections in their order, and the data of the charts."""

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
    """The report of one run."""
    headings = {
        "state": "",
        "health": "Health",
        "scores": "Scores of teacher and student",
        "curves": "Curves",
        "features": "Features of fixed images over time",
        "prototypes": "What the prototypes stand for",
        "cost": "Cost",
        "config": "Config",
        "provenance": "Where it comes from",
    }
    sections = {
        "state": _state(run),
        "health": health(run),
        "features": emergence(run),
        "prototypes": gallery(run),
        "cost": _cost(run),
        "config": f"<details><summary>Every value</summary><pre>{text_lines(run.config)}</pre></details>",
        "provenance": _facts(run.provenance),
    }
    return Pieces(run.name, headings, sections, charts_data([run]))


def comparison_pieces(runs: Sequence[RunReport], links: Sequence[str]) -> Pieces:
    """Several runs over each other; each link leads to the report of its run."""
    headings = {"runs": "", "scores": "Scores of teacher and student", "curves": "Curves"}
    return Pieces(f"{len(runs)} runs", headings, {"runs": overview(runs, links)}, charts_data(runs))


def page(pieces: Pieces, live: Live | None = None) -> str:
    """The whole file."""
    asking = {"base": live.base, "seconds": live.seconds, "digests": pieces.digests} if live else None
    home = f'<p><a href="{text(live.home)}">All runs</a></p>' if live and live.home else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(live is not None)}">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{text(pieces.title)} · capi</title>\n<style>{asset('report.css')}</style>\n</head>\n<body>\n<main>\n"
        f'{home}<h1>{text(pieces.title)}</h1>\n{_links(pieces)}<p id="banner" role="status" hidden></p>\n'
        + "\n".join(_sections(pieces))
        + '\n<noscript><p class="notice">Curves are drawn by a script, which is switched off in this browser.</p>'
        "</noscript>\n</main>\n"
        f'<script type="application/json" id="settings">{as_json({"live": asking})}</script>\n'
        f'<script type="application/json" id="data">{as_json(pieces.charts)}</script>\n'
        f"<script>{script()}</script>\n</body>\n</html>\n"
    )


def policy(live: bool) -> str:
    """What a page may do: run its script and style, show the pictures it carries, ask its server if there is one."""
    rules = {
        "default-src": "'none'",
        "script-src": digest(script()),
        "style-src": digest(asset("report.css")),
        "img-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


@cache
def script() -> str:
    """The script of a page, in a scope of its own."""
    return f'"use strict";\n{{\n{asset("report_chart.js")}{asset("report.js")}}}'


@cache
def asset(name: str) -> str:
    """A text file that lies beside this module."""
    return resources.files("capi.report.pages").joinpath(name).read_text(encoding="utf-8")


def text_lines(value: str) -> str:
    """Text of several lines, made harmless; its spaces carry meaning and stay."""
    return escape(value.encode("utf-8", "replace").decode("utf-8"))


def digest(content: str) -> str:
    """How a policy names a script or a style that may be used."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _links(pieces: Pieces) -> str:
    """To each section, since a page is long."""
    named = [name for name, heading in pieces.headings.items() if heading]
    return "<nav>" + "".join(f'<a href="#{name}">{name.capitalize()}</a>' for name in named) + "</nav>\n"


def _sections(pieces: Pieces) -> Iterator[str]:
    """In their order; those with curves together, since they are zoomed together."""
    for drawn, names in groupby(pieces.headings, lambda name: name not in pieces.sections):
        inside = "\n".join(_section(name, pieces) for name in names)
        yield f'<div class="zoomed">{inside}</div>' if drawn else inside


def _section(name: str, pieces: Pieces) -> str:
    heading = pieces.headings[name]
    title = f'<h2 id="{name}">{text(heading)}</h2>' if heading else ""
    if name in pieces.sections:
        return f'<section>{title}<div data-part="{name}">{pieces.sections[name]}</div></section>'
    missing = _NO_SCORES if name == "scores" else _NO_CURVES
    return (
        f'<section>{title}<p class="soft" data-missing="{name}" hidden>{missing}</p>'
        f'<div class="charts" data-group="{name}"></div></section>'
    )


def _state(run: RunReport) -> str:
    notes = "".join(f'<p class="notice">{text(note)}</p>' for note in run.notes)
    ringing = len(run.alarms)
    alarms = f'<span class="badge alarm">▲ {ringing} alarm{"s" * (ringing != 1)}</span>' if ringing else ""
    return (
        f'<p class="badges"><span class="badge {run.state.kind}">{run.state.mark}</span>{alarms}</p>'
        f"<p>{text(run.state.sentence)}</p>{notes}"
    )


def _cost(run: RunReport) -> str:
    assumed = "".join(f"<li>{text(one)}</li>" for one in run.assumptions)
    return f'{_facts(run.cost)}<ul class="soft">{assumed}</ul>'


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{rows}</dl>'


def overview(runs: Sequence[RunReport], links: Sequence[str]) -> str:
    """A row for each run; the table scrolls by itself where the screen is narrow."""
    columns = list(_compared_columns(runs))
    titles = "".join(f'<th scope="col" class="number">{text(title)}</th>' for _, title in columns)
    rows = "".join(
        _run_row(run, link, number, [key for key, _ in columns])
        for number, (run, link) in enumerate(zip(runs, links, strict=True))
    )
    return (
        '<div class="box" tabindex="0"><table class="runs"><thead><tr><th scope="col">Run</th>'
        f'<th scope="col">State</th><th scope="col">Alarms</th><th scope="col" class="number">Step</th>{titles}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div>"
        '<p class="soft">Values are the last of each run. A name leads to the report of its run.</p>'
    )


def _compared_columns(runs: Sequence[RunReport]) -> Iterator[tuple[str, str]]:
    """Metrics that any of the runs has: the main ones, then all scores."""
    present = dict.fromkeys(key for run in runs for key in run.columns)
    for chart in sorted(chart_list(present), key=lambda chart: chart.group == "scores"):
        for key, label in chart.metrics.items():
            if chart.group == "scores" or key in _COMPARED:
                yield key, f"{chart.title} {label}".strip()


def _run_row(run: RunReport, link: str, index: int, keys: Sequence[str]) -> str:
    values = "".join(f'<td class="number">{_last_value(run, key)}</td>' for key in keys)
    titles = ", ".join(finding.title for finding in run.alarms)
    ringing = f"▲ {text(titles)}" if titles else "none"
    step = "none" if run.state.step is None else f"{run.state.step:,}"
    return (
        f'<tr><th scope="row"><svg class="key" viewBox="0 0 24 8" aria-hidden="true">'
        f'<path class="line run-{index % 8}" d="M0 4H24"/></svg><a href="{text(link)}">{text(run.name)}</a></th>'
        f'<td class="nowrap">{run.state.mark}</td><td class="alarms-rung">{ringing}</td>'
        f'<td class="number">{step}</td>{values}</tr>'
    )


def _last_value(run: RunReport, key: str) -> str:
    column = run.columns.get(key)
    last = column.last if column is not None else None
    if last is not None and "/" in key and 0 <= last <= 1:
        return f"{last:.2%}"
    unit = f" {text(run.loss.unit)}" if key == "student_loss" and run.loss else ""
    return "none" if last is None else number_text(last) + unit
