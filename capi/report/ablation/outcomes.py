"""What a study has come to: rows of runs with spread over seeds, and how their numbers are written."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from capi.config.paper import FIGURE_ONLY, PaperRow, PaperTable
from capi.report.pages.data import Emergence
from capi.train.cost.plan import PlannedCost

# What a column of the paper is called there, and the protocol here that does the same on other data.
_COUNTERPARTS = {"k-NN": "/knn-segmentation", "linear": "/logistic-segmentation", "attentive": "/attentive"}


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and their standard deviation, which one seed has not."""

    mean: float
    deviation: float | None
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """None where there is nothing yet."""
    known = list(values)
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known)) if known else None


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
        found = (score_at(run.curves.get(curve, ()), seconds) for run in self.runs)
        return spread(score for score in found if score is not None)


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
    """Standard error of the difference, from the spread over seeds."""

    @property
    def verdict(self) -> str:
        if self.uncertainty is not None and abs(self.here) < 2 * self.uncertainty:
            return "not told apart"
        # As it is printed: with one seed and few test images two rows often score the same.
        if round(self.here, 1) == 0:
            return "no difference"
        return "holds" if self.here > 0 else "reversed"


def orderings(table: TableOutcome, paper_column: int, column: str) -> list[Ordering]:
    """Every pair of rows that the paper prints different scores for, the better one first."""
    scored = [row for row in table.rows if row.paper is not None and not isinstance(row.paper.scores, str)]
    found = []
    for number, first in enumerate(scored):
        for second in scored[number + 1 :]:
            better, worse = sorted((first, second), key=lambda row: -_paper(row, paper_column))
            gap = _paper(better, paper_column) - _paper(worse, paper_column)
            high, low = better.score(column), worse.score(column)
            if gap > 0 and high is not None and low is not None:
                here = 100 * (high.mean - low.mean)
                found.append(Ordering(better.name, worse.name, gap, here, _uncertainty(high, low)))
    return found


def _paper(row: RowOutcome, column: int) -> float:
    assert row.paper is not None
    return float(row.paper.scores[column])


def _uncertainty(first: Spread, second: Spread) -> float | None:
    if first.deviation is None or second.deviation is None:
        return None
    return 100 * float((first.deviation**2 / first.count + second.deviation**2 / second.count) ** 0.5)


def columns_side_by_side(table: TableOutcome) -> list[tuple[int, str]]:
    """The paper's columns by number, each with the column here that judges the same way."""
    found = []
    for number, title in enumerate(table.paper.columns):
        for word, ending in _COUNTERPARTS.items():
            found += [(number, column) for column in table.columns if title.endswith(word) and column.endswith(ending)]
    return found


def score_text(spread: Spread | None) -> str:
    """A mean in per cent, with the deviation over seeds."""
    if spread is None:
        return "-"
    return f"{100 * spread.mean:.1f}" + (f" ± {100 * spread.deviation:.1f}" if spread.deviation is not None else "")


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
