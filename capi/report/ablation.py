"""A table of a study: what it has come to, as rows of runs with spread over seeds, and its files on disk.

.json for programs, .md and .html for people.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup

from capi.config.paper import FIGURE_ONLY, PaperRow, PaperTable
from capi.evals.results import table as markdown_table
from capi.report.pages.charts import score_chart, score_line
from capi.report.pages.data import Emergence
from capi.report.pages.page import render
from capi.runtime.atomic import atomic_write
from capi.train.cost.plan import PlannedCost
from capi.zoo.run_folder import versions

# What a column of the paper is called there, and the protocol here that does the same on other data.
_COUNTERPARTS = {"k-NN": "/knn-segmentation", "linear": "/logistic-segmentation", "attentive": "/attentive"}


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and their standard deviation, which one seed has not."""

    mean: float
    std: float | None
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """None where there is nothing yet."""
    numbers = list(values)
    return Spread(fmean(numbers), stdev(numbers) if len(numbers) > 1 else None, len(numbers)) if numbers else None


@dataclass(frozen=True)
class Point:
    """A score on the way: after so many images, and so many seconds of training."""

    images: int
    seconds: float
    score: float


def score_at(points: Sequence[Point], seconds: float) -> float | None:
    """Between two evaluations a straight line is drawn; before the first and after the last nothing is known."""
    for before, after in pairwise(points):
        if before.seconds <= seconds <= after.seconds:
            share = (seconds - before.seconds) / max(after.seconds - before.seconds, 1e-9)
            return before.score + share * (after.score - before.score)
    return None


@dataclass(frozen=True)
class RunOutcome:
    """One run, as far as it has come; of an encoder that is not trained, its scores alone."""

    name: str
    scores: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    steps: int = 0
    total_steps: int = 0
    seconds: float | None = None
    """Of training, without evaluations."""
    health: str = ""
    alarms: Sequence[str] = ()
    failure: str = ""
    pictures: Sequence[Emergence] = ()
    report: str | None = None

    @property
    def trained(self) -> bool:
        return self.steps == self.total_steps

    @property
    def done(self) -> bool:
        return bool(self.scores or self.failure)


@dataclass(frozen=True)
class RowOutcome:
    """A row of the table, or one of those to compare with, which the paper has not and which cost nothing to train."""

    name: str
    runs: Sequence[RunOutcome]
    paper: PaperRow | None = None
    cost: PlannedCost | None = None

    def score(self, column: str) -> Spread | None:
        return spread(run.scores[column] for run in self.runs if column in run.scores)

    @property
    def seconds(self) -> Spread | None:
        return spread(run.seconds for run in self.runs if run.seconds is not None and run.trained)

    def score_at(self, curve: str, seconds: float) -> Spread | None:
        """The score on the way after so many seconds of training."""
        scores = (score_at(run.curves.get(curve, ()), seconds) for run in self.runs)
        return spread(score for score in scores if score is not None)


@dataclass(frozen=True)
class TableOutcome:
    """A table of a study, and what there is to know to read it."""

    name: str
    paper: PaperTable
    rows: Sequence[RowOutcome]
    baselines: Sequence[RowOutcome]
    columns: Sequence[str]
    measures: Mapping[str, str]
    """The name of each column's score, where one is known."""
    facts: Mapping[str, str]
    settings: Mapping[str, Any]

    @property
    def everything(self) -> list[RowOutcome]:
        return [*self.rows, *self.baselines]

    @property
    def finished(self) -> bool:
        return all(run.done for row in self.everything for run in row.runs)

    @property
    def curves(self) -> list[str]:
        """What was measured on the way."""
        return list(dict.fromkeys(name for row in self.rows for run in row.runs for name in run.curves))

    @property
    def shortest(self) -> float | None:
        """The training seconds of the quickest row: as long as every row has trained."""
        return min((row.seconds.mean for row in self.rows if row.seconds is not None), default=None)


@dataclass(frozen=True)
class Ordering:
    """Two rows that the paper puts in an order, and what was found here. Differences are in per cent points."""

    better: str
    worse: str
    paper: float
    here: float
    uncertainty: float | None
    """Standard error of the difference, from the spread over seeds; None where it is not known or means nothing."""

    @property
    def verdict(self) -> str:
        if self.uncertainty is None:
            return "not judged"
        # As it is printed: with few test images two rows often score the same.
        if round(self.here, 1) == 0:
            return "no difference"
        if abs(self.here) < 2 * self.uncertainty:
            return "not told apart"
        return "holds" if self.here > 0 else "reversed"


def orderings(table: TableOutcome, paper_column: int, column: str) -> list[Ordering]:
    """Every pair of rows that the paper prints different scores for, the better one first."""
    scored = [row for row in table.rows if row.paper is not None and not isinstance(row.paper.scores, str)]
    pairs = []
    for number, first in enumerate(scored):
        for second in scored[number + 1 :]:
            better, worse = sorted((first, second), key=lambda row: -_paper(row, paper_column))
            gap = _paper(better, paper_column) - _paper(worse, paper_column)
            high, low = better.score(column), worse.score(column)
            if gap > 0 and high is not None and low is not None:
                here = 100 * (high.mean - low.mean)
                uncertainty = None if _is_smoke(table) else _uncertainty(high, low)
                pairs.append(Ordering(better.name, worse.name, gap, here, uncertainty))
    return pairs


_VERDICTS = ("holds", "reversed", "not told apart", "no difference")


def verdicts(table: TableOutcome) -> dict[str, int]:
    """How many of the paper's orderings came out which way here."""
    pairs = [each for number, column in columns_side_by_side(table) for each in orderings(table, number, column)]
    counts = Counter(each.verdict for each in pairs)
    return {verdict: counts[verdict] for verdict in _VERDICTS if counts[verdict]}


def orderings_sentence(table: TableOutcome) -> str:
    """What the study came to: how many of the paper's orderings hold, else its own order by the first score."""
    counts = verdicts(table)
    if total := sum(counts.values()):
        holds = counts.pop("holds", 0)
        others = ", ".join(
            f"{count} {'shows' if count == 1 else 'show'} {verdict}"
            if verdict == "no difference"
            else f"{count} {verdict}"
            for verdict, count in counts.items()
        )
        if total == 1:
            return "The one ordering of the paper " + ("holds here" if holds else f"does not hold here: {others}")
        return f"{holds} of {total} orderings of the paper hold here" + (f"; {others}" if others else "")
    scored = [(row, column) for column in table.columns[:1] for row in table.rows if row.score(column) is not None]
    if not scored:
        return "Nothing has been scored yet"
    listed = ", ".join(f"{row.name} {score_text(row.score(column))}" for row, column in scored)
    return f"No ordering of the paper is judged: {_why_unjudged(table)}; {scored[0][1]} here: {listed}"


def _why_unjudged(table: TableOutcome) -> str:
    if not any(orderings(table, number, column) for number, column in columns_side_by_side(table)):
        return "none of its printed scores stands beside these"
    if _is_smoke(table):
        return "runs at smoke scale are too short to learn"
    return "one seed does not tell a difference from chance (--seeds 3 does more)"


def _is_smoke(table: TableOutcome) -> bool:
    return table.facts.get("scale") == "smoke"


def _paper(row: RowOutcome, column: int) -> float:
    assert row.paper is not None
    return float(row.paper.scores[column])


def _uncertainty(first: Spread, second: Spread) -> float | None:
    if first.std is None or second.std is None:
        return None
    return 100 * float((first.std**2 / first.count + second.std**2 / second.count) ** 0.5)


def columns_side_by_side(table: TableOutcome) -> list[tuple[int, str]]:
    """The paper's columns by number, each with the column here that judges the same way."""
    columns = []
    for number, title in enumerate(table.paper.columns):
        for word, ending in _COUNTERPARTS.items():
            columns += [
                (number, column) for column in table.columns if title.endswith(word) and column.endswith(ending)
            ]
    return columns


def score_text(spread: Spread | None) -> str:
    """A mean in per cent, with the std over seeds."""
    if spread is None:
        return "-"
    return f"{100 * spread.mean:.1f}" + (f" ± {100 * spread.std:.1f}" if spread.std is not None else "")


def paper_score(row: RowOutcome, column: int) -> str:
    """What the paper prints; it has no score of our own rows, and draws some without printing them."""
    if row.paper is None:
        return "-"
    return FIGURE_ONLY if isinstance(row.paper.scores, str) else f"{row.paper.scores[column]:.1f}"


def row_seconds(row: RowOutcome) -> str:
    """Seconds of training, on average."""
    return "-" if row.seconds is None else f"{row.seconds.mean:.0f}"


def percent_points(value: float) -> str:
    """A difference of scores, with its sign."""
    return f"{value:+.1f}" if round(value, 1) else "0.0"


FORMAT_VERSION = 1


def write_table(table: TableOutcome, out: Path) -> Path:
    """Each file is the old one or the new one, never a part; says where the page is."""
    page = out / f"{table.name}.html"
    atomic_write(out / f"{table.name}.json", json.dumps(as_plain(table), indent=1) + "\n")
    atomic_write(out / f"{table.name}.md", as_markdown(table))
    atomic_write(page, as_html(table))
    return page


def as_plain(table: TableOutcome) -> dict[str, Any]:
    """Everything but the pictures, as plain values."""
    return {
        "version": FORMAT_VERSION,
        "table": table.name,
        "label": table.paper.label,
        "paper_columns": table.paper.columns,
        "columns": list(table.columns),
        "finished": table.finished,
        "equal_seconds": table.shortest,
        "rows": [_row_as_plain(row, table) for row in table.everything],
        "facts": dict(table.facts),
        "benchmarks": dict(table.settings),
        "versions": versions(),
    }


def _row_as_plain(row: RowOutcome, table: TableOutcome) -> dict[str, Any]:
    return {
        "name": row.name,
        "paper": None if row.paper is None else row.paper.scores,
        "parameters": None if row.cost is None else row.cost.trained_parameters,
        "encoder_parameters": None if row.cost is None else row.cost.encoder_parameters,
        "flop_an_image": None if row.cost is None else row.cost.flop_an_image,
        "images_seen": None if row.cost is None else row.cost.images_seen,
        "scores": {
            column: None
            if (spread := row.score(column)) is None
            else {"mean": spread.mean, "deviation": spread.std, "count": spread.count}
            for column in table.columns
        },
        "runs": [
            {
                "name": run.name,
                "scores": dict(run.scores),
                "training_seconds": run.seconds,
                "steps": run.steps,
                "health": run.health,
                "alarms": list(run.alarms),
                "failure": run.failure or None,
                "curves": {name: [asdict(point) for point in points] for name, points in run.curves.items()},
            }
            for run in row.runs
        ],
    }


def as_markdown(table: TableOutcome) -> str:
    """The numbers, and what became of the paper's orderings."""
    parts = [f"# {table.paper.title}", f"{table.paper.number} of the paper, in miniature."]
    parts.append(f"{orderings_sentence(table)}.")
    if not table.finished:
        parts.append("Not all of it has been run yet.")
    ours = [f"{column} ({table.measures[column]})" if column in table.measures else column for column in table.columns]
    head = ["row", *(f"paper: {column}" for column in table.paper.columns), *ours, "seconds", "parameters"]
    parts.append(markdown_table(head, [_line(row, table) for row in table.everything]))
    parts.append("\n".join(_ordering_lines(table)))
    parts.append("\n".join(f"- {name}: {value}" for name, value in table.facts.items()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _line(row: RowOutcome, table: TableOutcome) -> list[str]:
    paper = [paper_score(row, number) for number in range(len(table.paper.columns))]
    ours = [score_text(row.score(column)) for column in table.columns]
    parameters = "-" if row.cost is None else f"{row.cost.trained_parameters / 1e6:.2f} M"
    return [row.name, *paper, *ours, row_seconds(row), parameters]


def _ordering_lines(table: TableOutcome) -> Iterator[str]:
    for number, column in columns_side_by_side(table):
        for ordering in orderings(table, number, column):
            yield (
                f"- {column}: {ordering.better} over {ordering.worse}: {percent_points(ordering.paper)} in the paper, "
                f"{percent_points(ordering.here)} here"
                + (f" (standard error {ordering.uncertainty:.1f})" if ordering.uncertainty is not None else "")
                + f": {ordering.verdict}"
            )


_CURVES = (
    "curves",
    "Curves",
    "The mean over seeds, and each seed behind it. These evaluations use fewer images than the scores above.",
)
_SIZES = ("sizes", "Scores against FLOP", "Of a whole run; what is not trained is a dashed line.")


def as_html(table: TableOutcome) -> str:
    """The paper's numbers and ours, curves, pictures and health, in one file."""
    every = [run for row in table.everything for run in row.runs]
    charts = [*_curve_charts(table), *_size_charts(table)]
    drawn = {chart["group"] for chart in charts}
    settings = {
        f"benchmark {name}": ", ".join(
            f"{key}={value}"
            for key, value in config.items()
            if value not in (None, {}, "") and key not in {"dataset", "protocol"}
        )
        for name, config in table.settings.items()
    }
    return render(
        "ablation.html",
        f"{table.paper.title}, in miniature",
        charts={"charts": charts, "runs": [row.name for row in table.everything], "apart": True},
        study=table,
        sentence=orderings_sentence(table),
        shares=list(verdicts(table).items()),
        done=sum(run.done for run in every),
        total=len(every),
        head=_html_head(table),
        rows=[_html_row(row, table) for row in table.everything],
        orderings=list(_ordering_rows(table)),
        groups=[group for group in (_CURVES, _SIZES) if group[0] in drawn],
        shown=[(row.name, run.pictures) for row in table.rows for run in row.runs[:1] if run.pictures],
        facts_of_study=list((dict(table.facts) | settings).items()),
    )


def _html_head(table: TableOutcome) -> list[str]:
    after = [] if table.shortest is None else [f"after {table.shortest:.0f} s: {curve}" for curve in table.curves]
    here = [f"here: {column} {table.measures.get(column, '')}".strip() for column in table.columns]
    paper = [f"paper: {column}" for column in table.paper.columns]
    return ["row", *paper, *here, *after, "images seen", "training seconds", "encoder", "all that is trained"]


def _html_row(row: RowOutcome, table: TableOutcome) -> list[str]:
    bold = row.paper is not None and row.paper.default
    name = Markup("<b>{}</b>").format(row.name) if bold else row.name
    curves = [] if table.shortest is None else [row.score_at(curve, table.shortest) for curve in table.curves]
    scores = [score_text(spread) for spread in (*map(row.score, table.columns), *curves)]
    cost = ["-"] * 4
    if row.cost is not None:
        sizes = [f"{size / 1e6:.2f} M" for size in (row.cost.encoder_parameters, row.cost.trained_parameters)]
        cost = [f"{row.cost.images_seen:,}", row_seconds(row), *sizes]
    return [name, *(paper_score(row, number) for number in range(len(table.paper.columns))), *scores, *cost]


def _ordering_rows(table: TableOutcome) -> Iterator[list[str]]:
    for number, column in columns_side_by_side(table):
        for ordering in orderings(table, number, column):
            error = "-" if ordering.uncertainty is None else f"{ordering.uncertainty:.1f}"
            pair = f"{ordering.better} over {ordering.worse}"
            yield [column, pair, ordering.verdict, percent_points(ordering.paper), percent_points(ordering.here), error]


def _curve_charts(table: TableOutcome) -> Iterator[dict[str, Any]]:
    for curve in table.curves:
        for across, unit in (("images", "images seen"), ("seconds", "seconds of training")):
            lines = [line for number, row in enumerate(table.rows) for line in _lines(row, curve, across, number)]
            if lines:
                yield score_chart(f"{curve}/{across}", curve, "Score on the way.", lines, across=unit)


def _lines(row: RowOutcome, curve: str, across: str, color: int) -> Iterator[dict[str, Any]]:
    runs = [run.curves[curve] for run in row.runs if curve in run.curves]
    points = [[(float(getattr(point, across)), point.score) for point in run] for run in runs]
    if len(points) > 1:
        yield from (score_line("", color, points_of_run, faint=True) for points_of_run in points)
    # Runs that are not done yet are left out of the mean, which would jump where they end.
    whole = [points_of_run for points_of_run in points if len(points_of_run) == max(map(len, points))]
    if whole:
        mean = [(fmean(x for x, _ in at), fmean(y for _, y in at)) for at in zip(*whole, strict=True)]
        yield score_line(row.name, color, mean)


def _size_charts(table: TableOutcome) -> Iterator[dict[str, Any]]:
    """Scores against the work of a whole run, where rows differ in it: the paper's figure of model sizes."""
    costs = {row.cost.flop for row in table.rows if row.cost is not None}
    if len(costs) < 2 or max(costs) < 1.5 * min(costs):
        return
    ends = math.log10(min(costs)), math.log10(max(costs))
    for column in table.columns:
        lines = [
            score_line(row.name, number, [(math.log10(row.cost.flop), spread.mean)])
            for number, row in enumerate(table.rows)
            if row.cost is not None and (spread := row.score(column)) is not None
        ]
        levels = [
            score_line(row.name, len(table.rows) + number, [(end, spread.mean) for end in ends], level=True)
            for number, row in enumerate(table.baselines)
            if (spread := row.score(column)) is not None
        ]
        meaning, across = "Score at the end.", "FLOP of the whole run"
        if lines:
            yield score_chart(
                f"{column}/size", column, meaning, [*lines, *levels], across=across, group="sizes", logarithmic=True
            )
