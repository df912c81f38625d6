"""The page of a comparison: one file without scripts, for screens of any width, light and dark."""

import colorsys
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from capi.evals.comparison_cells import BenchmarkColumn, Cell, Comparison, Remark, short_names
from capi.evals.results import Record, percent
from capi.evals.table_view import as_html as table_html

# Colours that people with any kind of sight tell apart, on white and on black.
_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999")
_GOLDEN = (math.sqrt(5) - 1) / 2
_SCALES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
_IOU = "IoU by class"
_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1c2430; --soft: #5c6675; --line: #dfe3e8;
  --track: #eceff3; --bad: #b3261e; --bad-soft: #fdecea; }
@media (prefers-color-scheme: dark) { :root { --page: #12151a; --card: #1b2027; --text: #e6e9ee; --soft: #9aa5b4;
  --line: #2f3742; --track: #29313b; --bad: #ff9b92; --bad-soft: #3a1f1d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
main { max-width: 72rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { margin: 0; font-size: 1.75rem; letter-spacing: -.01em; }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.2rem; }
h3 { margin: 0; font-size: 1rem; }
p { margin: .25rem 0; }
.soft { color: var(--soft); font-size: .875rem; }
.banner { margin: 1rem 0 0; padding: .6rem .9rem; border-radius: .5rem; background: var(--card);
  border: 1px solid var(--line); }
.banner.bad { background: var(--bad-soft); border-color: transparent; }
.bad-text { color: var(--bad); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 1.25rem 0; padding: 0; list-style: none; }
.swatch { display: inline-block; width: .75rem; height: .75rem; margin-right: .45rem; border-radius: .2rem; }
.charts { display: grid; gap: 1rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
.card { margin: 0; padding: 1rem 1.1rem; min-width: 0; background: var(--card); border: 1px solid var(--line);
  border-radius: .75rem; }
.bars { margin: .75rem 0 0; padding: 0; list-style: none; }
.bars li { margin-bottom: .7rem; }
.label { display: flex; justify-content: space-between; gap: .75rem; font-size: .9rem; }
.name { min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.value { flex: none; font-variant-numeric: tabular-nums; }
.best { font-weight: 700; }
.star { color: var(--soft); font-weight: 400; }
.track { height: .8rem; margin-top: .15rem; border-radius: .25rem; overflow: hidden; background: linear-gradient(90deg,
  transparent calc(50% - .5px), var(--line) calc(50% - .5px) calc(50% + .5px), transparent calc(50% + .5px)),
  var(--track); }
.fill { height: 100%; border-radius: 0 .25rem .25rem 0; }
.axis { display: flex; justify-content: space-between; color: var(--soft); font-size: .75rem; }
.box { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .75rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; overflow-wrap: normal; }
th, td { padding: .5rem .9rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
th { font-weight: 600; }
th .soft { font-weight: 400; }
td:first-child { min-width: min(13rem, 34vw); overflow-wrap: anywhere; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
ul { padding-left: 1.2rem; margin: .25rem 0 1rem; }
li.failure { margin-bottom: .5rem; }
details { margin: .75rem 0; }
summary { cursor: pointer; padding: .25rem 0; }
code { font-size: .85em; }
"""


def as_html(comparison: Comparison, facts: Mapping[str, str]) -> str:
    """The whole page; whatever comes from outside is escaped, and a policy keeps anything from being run or fetched."""
    body = [
        *_opening(comparison, facts),
        *(() if comparison.table is None else table_html(comparison.table, comparison.cells)),
        *_charts(comparison),
        *_scores(comparison),
        *_failures(comparison),
        *(part for kind, title in comparison.remark_titles.items() for part in _remarks(comparison, kind, title)),
        *_settings(comparison),
        *_classes(comparison),
        *_models(comparison),
        *_facts(facts),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>Models compared</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def colors(models: Sequence[str]) -> dict[str, str]:
    """The colour of each model in the whole page; steps of the golden angle go on where the named ones end."""
    return {model: _COLORS[n] if n < len(_COLORS) else _further_color(n) for n, model in enumerate(models)}


def _further_color(number: int) -> str:
    red, green, blue = colorsys.hls_to_rgb((number * _GOLDEN) % 1.0, 0.5, 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def scale_of(values: Iterable[float]) -> float:
    """Where the bars of a benchmark end: the first round number that is not below the longest."""
    longest = max(values, default=1.0)
    return next((scale for scale in _SCALES if scale >= longest), 1.0)


def _opening(comparison: Comparison, facts: Mapping[str, str]) -> Iterator[str]:
    models, columns = len(comparison.models), len(comparison.columns)
    yield "<h1>Models compared</h1>"
    yield (
        f'<p class="soft">{models} model{"s" * (models != 1)} on {columns} benchmark{"s" * (columns != 1)} · '
        f"{escape(facts['cells'])}</p>"
    )
    if comparison.unfinished:
        left = f"{len(comparison.unfinished)} of {len(comparison.cells)} cells are still to come"
        yield f'<p class="banner">{left}; load the page again to see more.</p>'
    if comparison.failed:
        number = len(comparison.failed)
        which = "1 cell" if number == 1 else f"{number} cells"
        reasons = '<a class="bad-text" href="#failures">the reasons</a>'
        yield f'<p class="banner bad">{which} failed; {reasons} are below.</p>'
    names = short_names(comparison.models)
    swatches = (
        f'<li title="{escape(model)}">{_swatch(color)}{escape(names[model])}</li>'
        for model, color in colors(comparison.models).items()
    )
    yield f'<ul class="legend">{"".join(swatches)}</ul>'


def _swatch(color: str) -> str:
    return f'<span class="swatch" style="background:{color}"></span>'


def _charts(comparison: Comparison) -> Iterator[str]:
    yield '<div class="charts">'
    for column in comparison.columns:
        yield from _chart(comparison, column)
    yield "</div>"


def _chart(comparison: Comparison, column: BenchmarkColumn) -> Iterator[str]:
    cells = [comparison.cells[model, column.name] for model in comparison.models]
    scale = scale_of(cell.value for cell in cells if cell.value is not None)
    best = comparison.best(column.name)
    yield f'<section class="card"><h3>{escape(column.name)}</h3>'
    yield f'<p class="soft">{escape(comparison.score_name(column.name)) or "&nbsp;"}</p><ul class="bars">'
    names, palette = short_names(comparison.models), colors(comparison.models)
    for cell in cells:
        yield _bar(cell, names[cell.model], palette[cell.model], scale, best=cell.model in best)
    ticks = "".join(f"<span>{100 * part:g} %</span>" for part in (0, scale / 2, scale))
    yield f'</ul><div class="axis" aria-hidden="true">{ticks}</div></section>'


def _bar(cell: Cell, name: str, color: str, scale: float, *, best: bool) -> str:
    share = 0.0 if cell.value is None else min(max(cell.value / scale, 0.0), 1.0)
    star = '<span class="star">best</span> ' if best else ""
    return (
        f'<li><div class="label"><span class="name{" best" * best}" title="{escape(cell.model)}">{escape(name)}</span>'
        f'<span class="value{" best" * best}">{star}{_shown(cell)}</span></div><div class="track">'
        f'<div class="fill" style="width:{100 * share:.2f}%;background:{color}"></div></div></li>'
    )


def _shown(cell: Cell) -> str:
    if cell.status == "failed":
        return '<span class="bad-text">failed</span>'
    return escape(percent(cell.value)) if cell.status == "done" else f'<span class="soft">{cell.status}</span>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML already, in a box that scrolls by itself; all columns but the first are numbers."""
    titles = "".join(f"<th{_number(place)}>{title}</th>" for place, title in enumerate(head))
    lines = ("".join(f"<td{_number(place)}>{value}</td>" for place, value in enumerate(row)) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="box" tabindex="0"><table><thead><tr>{titles}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _number(place: int) -> str:
    return ' class="number"' if place else ""


def _scores(comparison: Comparison) -> Iterator[str]:
    names = short_names(comparison.models)
    best = {column.name: comparison.best(column.name) for column in comparison.columns}

    def shown(cell: Cell) -> str:
        value = f'<span class="best">{_shown(cell)}</span>' if cell.model in best[cell.benchmark] else _shown(cell)
        if cell.record is None:
            return value
        took = f"{cell.record['seconds']:.1f} s" + (", kept" if cell.kept else "")
        return f'{value}<br><span class="soft">{took}</span>'

    head = [
        f'{escape(column.name)}<br><span class="soft">{escape(comparison.score_name(column.name))}</span>'
        for column in comparison.columns
    ]
    rows = [
        [
            _named(model, names),
            comparison.image_size(model),
            *(shown(comparison.cells[model, column.name]) for column in comparison.columns),
        ]
        for model in comparison.models
    ]
    yield "<h2>Scores</h2>"
    yield _table(["model", "image size", *head], rows)


def _named(model: str, names: Mapping[str, str]) -> str:
    return f'<span title="{escape(model)}">{escape(names[model])}</span>'


def _failures(comparison: Comparison) -> Iterator[str]:
    if not comparison.failed:
        return
    yield '<h2 id="failures">Failed</h2><ul>'
    for cells in comparison.failures:
        where = escape(", ".join(cell.benchmark for cell in cells))
        what = f"<b>{escape(cells[0].model)}</b> on <b>{where}</b>"
        yield f'<li class="failure">{what}<br>{escape(cells[0].reason)}</li>'
    yield "</ul>"


def _remarks(comparison: Comparison, kind: Remark, title: str) -> Iterator[str]:
    names = short_names(comparison.models)
    found = {column.name: comparison.remarks(column.name, kind) for column in comparison.columns}
    if not any(found.values()):
        return
    yield f"<h2>{title}</h2>"
    for benchmark, remarks in found.items():
        if remarks:
            lines = (_remark(text, [names[model] for model in about]) for text, about in remarks.items())
            yield f"<h3>{escape(benchmark)}</h3><ul>{''.join(lines)}</ul>"


def _remark(text: str, about: Sequence[str]) -> str:
    whom = f' <span class="soft">({escape(", ".join(about))})</span>' if about else ""
    return f"<li>{escape(text)}{whom}</li>"


def _settings(comparison: Comparison) -> Iterator[str]:
    names = short_names(comparison.models)
    yield "<h2>Details</h2>"
    for column in comparison.columns:
        if finished := comparison.finished(column.name):
            scores = list(dict.fromkeys(name for record in finished.values() for name in record["scores"]))
            rows = [
                [_named(model, names), *_score_cells(record, scores), _settings_text(record["chosen"])]
                for model, record in finished.items()
            ]
            head = ["model", *(escape(name) for name in scores), "chosen settings"]
            yield f"<details><summary>All scores of {escape(column.name)}, and the settings chosen</summary>"
            yield _table(head, rows) + "</details>"


def _score_cells(record: Record, scores: Sequence[str]) -> list[str]:
    return [escape(percent(record["scores"].get(name))) for name in scores]


def _settings_text(chosen: Mapping[str, Any]) -> str:
    shown = (f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in _short(chosen))
    return escape(", ".join(shown))


def _short(chosen: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in chosen.items():
        yield name, float(f"{value:.4g}") if isinstance(value, float) else value


def _classes(comparison: Comparison) -> Iterator[str]:
    names = short_names(comparison.models)
    for column in comparison.columns:
        by_model = {
            model: record["details"][_IOU]
            for model, record in comparison.finished(column.name).items()
            if record["details"].get(_IOU)
        }
        if by_model:
            classes = dict.fromkeys(name for values in by_model.values() for name in values)
            rows = [[escape(name), *(percent(values.get(name)) for values in by_model.values())] for name in classes]
            yield f"<details><summary>IoU by class of {escape(column.name)}</summary>"
            yield _table(["class", *(_named(model, names) for model in by_model)], rows) + "</details>"


def _models(comparison: Comparison) -> Iterator[str]:
    names, palette = short_names(comparison.models), colors(comparison.models)
    yield "<h2>Models</h2><ul>"
    for model in comparison.models:
        said = escape(", ".join([*_encoder_facts(comparison, model), *comparison.model_notes(model)]))
        whole = f"<br><code>{escape(model)}</code>" if names[model] != model else ""
        yield f'<li>{_swatch(palette[model])}{escape(names[model])}{whole}<br><span class="soft">{said}</span></li>'
    yield "</ul>"


def _encoder_facts(comparison: Comparison, model: str) -> list[str]:
    for cell in comparison.done:
        if cell.model == model and cell.record is not None:
            facts = cell.record["encoder"]
            return [f"width {facts['width']}", f"patches of {facts['patch_size']} px"]
    return []


def _facts(facts: Mapping[str, str]) -> Iterator[str]:
    lines = (f"<li>{escape(name)}: {escape(value)}</li>" for name, value in facts.items())
    yield f'<h2>Facts</h2><ul class="soft">{"".join(lines)}</ul>'
