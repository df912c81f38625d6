"""Pages and charts without scripts, in the style of a report: one HTML file that needs nothing else; SVG charts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from capi.report.pages.data import text
from capi.report.pages.run import asset, digest

WIDTH, HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 40
_TICKS = 5
COLORS = 8


@dataclass(frozen=True)
class Series:
    """A line through points, or a single point; a faint one stands behind the others and out of the legend."""

    label: str
    color: int
    points: Sequence[tuple[float, float]]
    faint: bool = False


@dataclass(frozen=True)
class Level:
    """A value that does not depend on what is drawn to the right."""

    label: str
    color: int
    value: float


def chart(
    title: str,
    series: Sequence[Series],
    levels: Sequence[Level] = (),
    *,
    across: str,
    up: str,
    logarithmic: bool = False,
) -> str:
    """One chart with its legend. Values up are shares, written in per cent; those across may be on a log scale."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    axes = _Axes.around(drawn, levels, logarithmic=logarithmic)
    parts = [
        *axes.grid(across),
        *(_level(one, axes) for one in levels),
        *(part for one in sorted(drawn, key=lambda one: not one.faint) for part in _series(one, axes)),
    ]
    described = f"{title}: {up} by {across}"
    return (
        f'<figure class="card chart"><h3>{text(title)}</h3><p class="soft">{text(up)}</p>'
        f'<svg class="axes" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(described)}">'
        + "".join(parts)
        + f'</svg><ul class="legend">{_legend(drawn, levels)}</ul></figure>'
    )


def ticks(low: float, high: float, count: int = _TICKS) -> list[float]:
    """Round numbers between two others, about so many."""
    span = max(high - low, 1e-12)
    size = 10 ** math.floor(math.log10(span / count))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [float(number * step) for number in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Axes:
    """From values to places on the sheet."""

    left: float
    right: float
    low: float
    high: float
    logarithmic: bool

    @classmethod
    def around(cls, series: Sequence[Series], levels: Sequence[Level], *, logarithmic: bool) -> "_Axes":
        across = [x for one in series for x, _ in one.points]
        up = [y for one in series for _, y in one.points] + [one.value for one in levels]
        room = max((max(up) - min(up)) * 0.08, 0.002)
        left, right = (math.log10(x) if logarithmic else x for x in (min(across), max(across)))
        # A single value across has the chart to itself.
        margin = 0.0 if right > left else 0.5
        return cls(left - margin, right + margin, min(up) - room, max(up) + room, logarithmic)

    def x(self, value: float) -> float:
        placed = math.log10(value) if self.logarithmic else value
        return round(_LEFT + (placed - self.left) / (self.right - self.left) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - _TOP - _BOTTOM), 1)

    def grid(self, across: str) -> Iterator[str]:
        for value in ticks(self.low, self.high):
            y = self.y(value)
            yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
            yield f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{100 * value:.4g} %</text>'
        for value in self._ticks_across():
            yield f'<text x="{self.x(value)}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_short(value)}</text>'
        yield f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{text(across)}</text>'

    def _ticks_across(self) -> list[float]:
        if not self.logarithmic:
            return ticks(self.left, self.right)
        powers = range(math.floor(self.left), math.ceil(self.right) + 1)
        candidates = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        within = [value for value in candidates if self.left <= math.log10(value) <= self.right]
        # Less than a factor of some has no such number; there the scale is almost a plain one.
        return within if len(within) > 1 else ticks(10**self.left, 10**self.right, 3)


def _series(one: Series, axes: _Axes) -> Iterator[str]:
    placed = [(axes.x(x), axes.y(y)) for x, y in one.points]
    faint = ' opacity="0.25"' if one.faint else ""
    if len(placed) > 1:
        path = " L".join(f"{x} {y}" for x, y in placed)
        yield f'<path class="line run-{one.color % COLORS}"{faint} d="M{path}"/>'
    if not one.faint:
        yield from (f'<circle class="dot run-{one.color % COLORS}" cx="{x}" cy="{y}" r="3"/>' for x, y in placed)


def _level(one: Level, axes: _Axes) -> str:
    y = axes.y(one.value)
    return f'<path class="line dash-1 run-{one.color % COLORS}" d="M{_LEFT} {y} L{WIDTH - _RIGHT} {y}"/>'


def _legend(series: Sequence[Series], levels: Sequence[Level]) -> str:
    named = [(one.label, one.color, "") for one in series if not one.faint]
    named += [(one.label, one.color, " dash-1") for one in levels]
    return "".join(
        f'<li><svg class="key" viewBox="0 0 24 8"><path class="line run-{color % COLORS}{dash}" d="M0 4 L24 4"/></svg>'
        f"{text(label)}</li>"
        for label, color, dash in named
    )


def _short(value: float) -> str:
    """A number in few letters."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def static_page(title: str, body: str) -> str:
    """The whole file; a policy keeps anything from being run or fetched but the pictures that it carries."""
    style = asset("report.css")
    policy = f"default-src 'none'; style-src {digest(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<link rel="icon" href="data:,">\n'
        f"<title>{text(title)} · capi</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{text(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )
