"""The page of a study: the paper's numbers and ours, curves, pictures and health, in one file without scripts."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from capi.report.ablation.outcomes import (
    RowOutcome,
    RunOutcome,
    TableOutcome,
    columns_side_by_side,
    orderings,
    paper_score,
    percent_points,
    row_seconds,
    score_text,
)
from capi.report.pages.data import Picture, text
from capi.report.pages.static import Level, Series, chart, static_page

_IMAGES_SHOWN = 6


def as_html(table: TableOutcome) -> str:
    """The whole page."""
    parts = [_opening(table), _scores(table), _orderings(table), _curves(table), _size(table), _pictures(table)]
    parts += [_health(table), _facts(table)]
    return static_page(f"{table.paper.title}, in miniature", "\n".join(part for part in parts if part))


def _opening(table: TableOutcome) -> str:
    open_question = f'<p class="notice">{text(table.paper.open)}</p>' if table.paper.open else ""
    done = sum(run.done for row in table.everything for run in row.runs)
    total = sum(len(row.runs) for row in table.everything)
    state = "" if table.finished else f'<p class="notice">{done} of {total} models are done; the rest is to come.</p>'
    return (
        f"<p>{text(table.paper.number)} of the paper, run again with small models. Numbers of the paper and numbers of "
        "this study are of other models on other data: what can be compared is the order of the rows.</p>"
        f"{open_question}{state}"
    )


def _section(title: str, inside: str, note: str = "") -> str:
    soft = f'<p class="soft">{text(note)}</p>' if note else ""
    return f"<section><h2>{text(title)}</h2>{soft}{inside}</section>" if inside else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int = 1) -> str:
    """Cells are HTML already."""

    def cells(values: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="number">{value}</{tag}>' if place >= numbers_from else f"<{tag}>{value}</{tag}>"
            for place, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="box" tabindex="0"><table class="runs"><thead><tr>{cells(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _scores(table: TableOutcome) -> str:
    shortest = table.shortest
    curves = table.curves if shortest is not None else []
    head = ["row"]
    head += [f"paper<br>{text(column)}" for column in table.paper.columns]
    head += [f"here<br>{text(column)}<br>{text(table.measures.get(column, ''))}" for column in table.columns]
    head += [f"after {shortest:.0f} s<br>{text(curve)}" for curve in curves]
    head += ["images seen", "training seconds", "encoder", "all that is trained"]
    rows = []
    for row in table.everything:
        name = f"<b>{text(row.name)}</b>" if row.paper is not None and row.paper.default else text(row.name)
        cells = [name, *(paper_score(row, number) for number in range(len(table.paper.columns)))]
        cells += [score_text(row.score(column)) for column in table.columns]
        cells += [score_text(row.score_at(curve, shortest or 0.0)) for curve in curves]
        rows.append([*cells, *_cost_cells(row)])
    note = (
        "Scores are in per cent, as mean ± standard deviation over the seeds that are done. All rows see the same "
        "images. They differ in seconds, so the columns in the middle give what each had reached after as many seconds "
        "of training as the quickest needed for all (between two evaluations a straight line; a slower row's learning "
        "rate was then still higher). The default row is bold."
    )
    return _section("Scores", _table(head, rows), note)


def _cost_cells(row: RowOutcome) -> list[str]:
    if row.cost is None:
        return ["-"] * 4
    return [
        f"{row.cost.images_seen:,}",
        row_seconds(row),
        f"{row.cost.encoder_parameters / 1e6:.2f} M",
        f"{row.cost.trained_parameters / 1e6:.2f} M",
    ]


def _orderings(table: TableOutcome) -> str:
    rows = []
    for number, column in columns_side_by_side(table):
        for one in orderings(table, number, column):
            error = "-" if one.uncertainty is None else f"{one.uncertainty:.1f}"
            pair = f"{text(one.better)} over {text(one.worse)}"
            rows.append([text(column), pair, one.verdict, percent_points(one.paper), percent_points(one.here), error])
    if not rows:
        return ""
    head = ["judged by", "the paper puts", "here it", "points in the paper", "points here", "standard error"]
    note = (
        "Every pair of rows that the paper prints different scores for. A difference below two standard errors over "
        "the seeds tells nothing apart; with one seed nobody knows the error, and the sign alone is given."
    )
    return _section("Which orderings of the paper hold", _table(head, rows, numbers_from=3), note)


def _curves(table: TableOutcome) -> str:
    charts = []
    for curve in table.curves:
        for across, unit in (("images", "images seen"), ("seconds", "seconds of training")):
            series = [one for number, row in enumerate(table.rows) for one in _lines(row, curve, across, number)]
            charts.append(chart(curve, series, across=unit, up="score on the way"))
    note = "The mean over seeds, and each seed behind it. These evaluations use fewer images than the scores above."
    return _section("Curves", f'<div class="charts">{"".join(charts)}</div>' if charts else "", note)


def _lines(row: RowOutcome, curve: str, across: str, color: int) -> Iterator[Series]:
    runs = [run.curves[curve] for run in row.runs if curve in run.curves]
    points = [[(float(getattr(point, across)), point.score) for point in run] for run in runs]
    if len(points) > 1:
        yield from (Series(row.name, color, one, faint=True) for one in points)
    # Runs that are not done yet are left out of the mean, which would jump where they end.
    whole = [one for one in points if len(one) == max(map(len, points))]
    if whole:
        mean = [(sum(x for x, _ in at) / len(at), sum(y for _, y in at) / len(at)) for at in zip(*whole, strict=True)]
        yield Series(row.name, color, mean)


def _size(table: TableOutcome) -> str:
    """Scores against the work of a whole run, where rows differ in it: the paper's figure of model sizes."""
    costs = {row.cost.flop for row in table.rows if row.cost is not None}
    if len(costs) < 2 or max(costs) < 1.5 * min(costs):
        return ""
    charts = []
    for column in table.columns:
        series = [
            Series(row.name, number, [(row.cost.flop, spread.mean)])
            for number, row in enumerate(table.rows)
            if row.cost is not None and (spread := row.score(column)) is not None
        ]
        levels = [
            Level(row.name, len(table.rows) + number, spread.mean)
            for number, row in enumerate(table.baselines)
            if (spread := row.score(column)) is not None
        ]
        charts.append(chart(column, series, levels, across="FLOP of the whole run", up="score", logarithmic=True))
    return _section("Scores against FLOP", f'<div class="charts">{"".join(charts)}</div>' if any(charts) else "")


def _pictures(table: TableOutcome) -> str:
    shown = [(row.name, run) for row in table.rows for run in row.runs[:1] if run.pictures]
    if not shown:
        return ""
    photos = shown[0][1].pictures[:_IMAGES_SHOWN]
    head = ["", *(_drawn(one.photo, f"photo {one.number + 1}") if one.photo else "" for one in photos)]
    rows = [["untrained", *_pca(shown[0][1], 0)], *([text(name), *_pca(run, -1)] for name, run in shown)]
    note = (
        "Each pixel is a patch; its colour is the first three principal components of the teacher's features of these "
        "images. The first seed of each row at its end, and one at its beginning. Colours of different rows have "
        "nothing to do with each other."
    )
    return _section("What the features show", _table(head, rows, numbers_from=99), note)


def _pca(run: RunOutcome, which: int) -> list[str]:
    return [
        _drawn(one.pictures[which][1], f"features of image {one.number + 1}") for one in run.pictures[:_IMAGES_SHOWN]
    ]


def _drawn(picture: Picture, alt: str) -> str:
    return f'<img class="pixels" src="{escape(picture.address)}" width="96" height="96" alt="{text(alt)}">'


def _health(table: TableOutcome) -> str:
    rows = []
    for row in table.rows:
        for run in row.runs:
            said = f"broke off: {run.failure}" if run.failure else run.health or "not begun"
            alarms = ", ".join(run.alarms) or "-"
            link = f'<a href="{escape(run.report)}">{text(run.name)}</a>' if run.report else text(run.name)
            rows.append([text(row.name), link, text(said), text(alarms)])
    note = "What `capi doctor` says of each run, at the end of it or as far as it has come."
    return _section("Health", _table(["row", "run", "diagnosis", "alarms"], rows, numbers_from=99), note)


def _facts(table: TableOutcome) -> str:
    settings = {
        f"benchmark {name}": ", ".join(f"{key}={value}" for key, value in _told(config).items())
        for name, config in table.settings.items()
    }
    rows = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>"
        for name, value in (dict(table.facts) | settings).items()
    )
    return _section("How it was run", f'<dl class="facts">{rows}</dl>')


def _told(config: Mapping[str, object]) -> dict[str, object]:
    """The settings of a benchmark that are set."""
    return {
        key: value
        for key, value in config.items()
        if value not in (None, {}, "") and key not in {"dataset", "protocol"}
    }
