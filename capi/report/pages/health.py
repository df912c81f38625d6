"""Health in a report: alarms with advice, then every measure with its value, its healthy range and a small curve."""

import math
from collections.abc import Iterator

import numpy as np

from capi.report.pages.charts import thin
from capi.report.pages.data import Column, RunReport, text
from capi.train.health import Finding, metric_of, number_text, range_text

_WIDTH, _HEIGHT, _MARGIN = 200.0, 48.0, 4.0
_SPARK_STRETCHES = 60
# A sign and a word for each state, so that nobody needs to tell colours apart.
_MARKS = {"well": ("✓", "well"), "alarm": ("▲", "alarm"), "unknown": ("…", "too early to judge")}


def health(run: RunReport) -> str:
    """The verdict, what is wrong with advice, what was wrong before, and all measures."""
    judged = '<p class="soft">Values are the median of the last records, so that one odd batch raises no alarm.</p>'
    without = '<p class="soft">Health cannot be judged without the config of the run.</p>'
    cards = f"{judged}{_cards(run)}" if run.measures else without
    return "\n".join([f'<p class="verdict">{text(run.verdict)}</p>', *_alarms(run), *_earlier(run), cards])


def spark(column: Column, finding: Finding) -> str:
    """A curve without axes, on a band where the healthy range is."""
    drawn = thin(column, _SPARK_STRETCHES)
    known = drawn.values[~np.isnan(drawn.values)]
    if not len(known):
        return ""
    low, high = _domain(float(known.min()), float(known.max()), finding)

    def height(value: float) -> float:
        inside = min(max((value - low) / (high - low), 0.0), 1.0)
        return _HEIGHT - _MARGIN - inside * (_HEIGHT - 2 * _MARGIN)

    top, bottom = (0.0 if _limits(finding)[1] >= high else height(_limits(finding)[1])), _HEIGHT
    if _limits(finding)[0] > low:
        bottom = height(_limits(finding)[0])
    band = f'<rect class="band" width="{_WIDTH:g}" y="{top:.1f}" height="{max(bottom - top, 0):.1f}"/>'
    first, last = float(drawn.steps[0]), float(drawn.steps[-1])
    points = [
        None if math.isnan(value) else f"{(step - first) / max(last - first, 1) * _WIDTH:.1f} {height(value):.1f}"
        for step, value in zip(drawn.steps.tolist(), drawn.values.tolist(), strict=True)
    ]
    return (
        f'<svg class="spark" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" aria-hidden="true">'
        f'{band}<path d="{_path(points)}"/></svg>'
    )


def _domain(low: float, high: float, finding: Finding) -> tuple[float, float]:
    """The range of the values, with the limit in sight where it was crossed."""
    crossed = _crossed(finding)
    if crossed is not None:
        low, high = min(low, crossed), max(high, crossed)
    least = max(abs(low), abs(high), 1e-12) * 1e-6
    return (low, high) if high - low > least else (low - least, high + least)


def _crossed(finding: Finding) -> float | None:
    low, high = _limits(finding)
    if finding.value is None:
        return None
    return low if finding.value < low else high if finding.value > high else None


def _path(points: list[str | None]) -> str:
    """Lines between neighbours, with gaps; a point alone is a short line, so that it can be seen."""
    parts, pen_is_down = [], False
    for index, point in enumerate(points):
        if point is not None:
            parts.append(("L" if pen_is_down else "M") + point)
            alone = not pen_is_down and (index + 1 == len(points) or points[index + 1] is None)
            parts += ["h2"] * alone
        pen_is_down = point is not None
    return "".join(parts)


def _alarms(run: RunReport) -> Iterator[str]:
    if run.alarms:
        yield f'<ul class="alarms" aria-label="Alarms">{"".join(map(_alarm, run.alarms))}</ul>'


def _alarm(finding: Finding) -> str:
    return (
        f'<li><b><span aria-hidden="true">▲</span> {text(finding.title)}</b>: {text(finding.text)}'
        f"<br>{text(finding.advice)}</li>"
    )


def _earlier(run: RunReport) -> Iterator[str]:
    """Alarms by measure, since one that comes and goes would fill the page."""
    steps: dict[str, list[int]] = {}
    for step, finding in run.past:
        steps.setdefault(finding.title, []).append(step)
    if steps:
        lines = "".join(f"<li>{text(title)}: {_times(found)}</li>" for title, found in steps.items())
        yield f"<details><summary>When alarms were raised</summary><ul>{lines}</ul></details>"


def _times(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"at step {steps[0]:,}"
    return f"{len(steps)} times, first at step {steps[0]:,}, last at step {steps[-1]:,}"


def _cards(run: RunReport) -> str:
    ordered = sorted(run.measures, key=lambda finding: finding.state != "alarm")
    return f'<div class="measures">{"".join(_card(finding, run) for finding in ordered)}</div>'


def _card(finding: Finding, run: RunReport) -> str:
    sign, word = _MARKS[finding.state]
    column = run.columns.get(finding.key)
    if finding.value is None:
        word = "not measured"
    shown = "" if finding.value is None else f'<p class="value">{number_text(finding.value)}</p>'
    curve = spark(column, finding) if column is not None else ""
    return (
        f'<article class="measure {finding.state}"><h3>{text(finding.title)}</h3>'
        f'<p class="state"><span aria-hidden="true">{sign}</span> {word}</p>'
        f"{shown}{curve}"
        f'<p class="soft">Healthy: {text(range_text(_limits(finding)))}. '
        f"{text(metric_of(finding.key).description)}</p></article>"
    )


def _limits(finding: Finding) -> tuple[float, float]:
    return finding.limits or (-math.inf, math.inf)
