"""Numbers of a study as people read them, and which of our columns stands beside which of the paper's."""

from capi.config.paper import FIGURE_ONLY
from capi.report.ablation.outcomes import RowOutcome, Spread, TableOutcome

# What a column of the paper is called there, and the protocol here that does the same on other data.
_COUNTERPARTS = {"k-NN": "/knn-segmentation", "linear": "/logistic-segmentation", "attentive": "/attentive"}


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
    return f"{value:+.1f}"
