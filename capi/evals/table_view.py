"""A table of the paper or of a board over a comparison: rows and columns as printed, our scores beside theirs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capi.evals.results import table

if TYPE_CHECKING:
    from capi.evals.comparison_cells import Cell

    Cells = Mapping[tuple[str, str], Cell]


_NOTHING = "-"
# Why a model is not run on a benchmark that only other rows need.
NOT_IN_TABLE = "it is not in this table"


@dataclass(frozen=True)
class TableEntry:
    """One cell of the table: the benchmark that it needs, which score of it, and what is printed there."""

    benchmark: str
    score: str | None
    printed: float | None
    missing: str = ""
    """Why there cannot be a score, where that is known beforehand."""


@dataclass(frozen=True)
class ViewRow:
    """What is printed before the scores, the model (None where nobody has its weights), and a cell for each column."""

    cells: tuple[str, ...]
    model: str | None
    entries: tuple[TableEntry, ...]


@dataclass(frozen=True)
class TableView:
    """One table; printed scores are shown where `paper` says so."""

    name: str
    title: str
    label: str
    heads: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    """What stands above a column (or nothing) and its name."""
    rows: tuple[ViewRow, ...]
    notes: tuple[str, ...] = ()
    paper: bool = True
    source: str = "the paper"
    """Whose numbers the printed ones are."""


def ours(row: ViewRow, entry: TableEntry, cells: "Cells") -> float | None:
    """Our score of a cell in per cent; None where there is none yet."""
    cell = cells[row.model, entry.benchmark] if row.model else None
    if cell is None or cell.record is None:
        return None
    scores = cell.record["scores"]
    value = next(iter(scores.values()), None) if entry.score is None else scores.get(entry.score)
    return None if value is None else 100 * value


def why_not(row: ViewRow, entry: TableEntry, cells: "Cells") -> str:
    """Why a cell has no score; empty where it has one, or where it is still to come."""
    if row.model is None:
        return ""
    cell = cells[row.model, entry.benchmark]
    if ours(row, entry, cells) is not None or cell.status in ("pending", "running"):
        return ""
    if cell.status != "done":
        return cell.reason
    return entry.missing or f'the results have no score "{entry.score}"'


def missing_cells(view: TableView, cells: "Cells") -> dict[str, list[str]]:
    """What is missing, each reason once, with the cells that it is about."""
    about: dict[str, list[str]] = {}
    for row in view.rows:
        for (group, name), entry in zip(view.columns, row.entries, strict=True):
            if reason := why_not(row, entry, cells):
                about.setdefault(reason, []).append(
                    f"{', '.join(filter(None, row.cells))}: {f'{group} {name}'.strip()}"
                )
    return about


def as_plain(view: TableView, cells: "Cells") -> dict[str, Any]:
    """For programs: per cent, null where there is nothing."""
    return {
        "table": view.name,
        "title": view.title,
        "label": view.label,
        "columns": [f"{group} {name}".strip() for group, name in view.columns],
        "rows": [
            {
                "row": list(row.cells),
                "model": row.model,
                "ours": [ours(row, entry, cells) for entry in row.entries],
                "paper": [entry.printed for entry in row.entries],
                "missing": [why_not(row, entry, cells) or None for entry in row.entries],
            }
            for row in view.rows
        ],
        "notes": list(view.notes),
    }


def as_markdown(view: TableView, cells: "Cells") -> list[str]:
    """The table, how it is read, and what is missing."""
    head = [*view.heads, *(f"{group} {name}".strip() for group, name in view.columns)]
    rows = [[*row.cells, *(shown_score(row, entry, cells, view.paper) for entry in row.entries)] for row in view.rows]
    parts = [f"## {view.title} ({view.label})", table(head, rows), _legend(view)]
    parts += ["\n".join(f"- {note}" for note in view.notes)] if view.notes else []
    if reasons := missing_cells(view, cells):
        lines = (f"- {reason} ({_few(about)})" for reason, about in reasons.items())
        parts += ["### Missing", "\n".join(lines)]
    return parts


def _legend(view: TableView) -> str:
    return "Ours in per cent" + (f", with the number of {view.source} in brackets." if view.paper else ".")


def shown_score(row: ViewRow, entry: TableEntry, cells: "Cells", paper: bool) -> str:
    """Our score, or a dash, and where it is asked for the printed one in brackets."""
    score = ours(row, entry, cells)
    own = _NOTHING if score is None else f"{score:.1f}"
    return own if not paper or entry.printed is None else f"{own} ({entry.printed:.1f})"


def _few(about: list[str], most: int = 4) -> str:
    return "; ".join(about[:most]) + (f" and {len(about) - most} more cells" if len(about) > most else "")
