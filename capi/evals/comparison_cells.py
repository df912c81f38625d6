"""What a comparison consists of: models by benchmarks, with a cell for each pair, and what can be read off them.

The cells may be put together to a table of the paper or of a board: its rows and columns as printed, our scores beside
theirs.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from capi.config.benchmarks import BenchmarkConfig
from capi.errors import counted
from capi.evals.results import ResultRecord, percent, shown_size, table
from capi.runtime.privacy import hide_path, hide_paths
from capi.runtime.summary import Summary
from capi.zoo.weights import WeightsName

CellStatus = Literal["pending", "running", "done", "failed", "skipped"]
Remark = Literal["deviations", "warnings"]
REMARKS: dict[Remark, str] = {"deviations": "Departures from the paper's protocol", "warnings": "Warnings"}
_LONG_NAME = 26


@dataclass(frozen=True)
class BenchmarkColumn:
    """A benchmark under the name that it is shown by."""

    name: str
    config: BenchmarkConfig


@dataclass(frozen=True)
class Cell:
    """One model on one benchmark. A `record` is there when it is done, a `reason` when it failed or was skipped."""

    model: str
    benchmark: str
    folder: str = ""
    """Where its results lie, within the folder of the comparison."""
    status: CellStatus = "pending"
    record: ResultRecord | None = field(default=None, repr=False)
    reason: str = ""
    reused: bool = False
    """Whether the results were there from an earlier comparison."""

    @property
    def quoted(self) -> tuple[str, float | None] | None:
        """Name and value of the score to quote; None where there is none. NaN is None."""
        return None if self.record is None else next(iter(self.record["scores"].items()), None)

    @property
    def value(self) -> float | None:
        return None if self.quoted is None else self.quoted[1]


Cells = Mapping[tuple[str, str], Cell]
_CELLS_NAMED = 4
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


def ours(row: ViewRow, entry: TableEntry, cells: Cells) -> float | None:
    """Our score of a cell in per cent; None where there is none yet."""
    cell = cells[row.model, entry.benchmark] if row.model else None
    if cell is None or cell.record is None:
        return None
    scores = cell.record["scores"]
    value = next(iter(scores.values()), None) if entry.score is None else scores.get(entry.score)
    return None if value is None else 100 * value


def why_not(row: ViewRow, entry: TableEntry, cells: Cells) -> str:
    """Why a cell has no score; empty where it has one, or where it is still to come."""
    if row.model is None:
        return ""
    cell = cells[row.model, entry.benchmark]
    if ours(row, entry, cells) is not None or cell.status in ("pending", "running"):
        return ""
    if cell.status != "done":
        return cell.reason
    return entry.missing or f'the results have no score "{entry.score}"'


def missing_cells(view: TableView, cells: Cells) -> dict[str, list[str]]:
    """What is missing, each reason once, with the cells that it is about."""
    about: dict[str, list[str]] = {}
    for row in view.rows:
        for (group, name), entry in zip(view.columns, row.entries, strict=True):
            if reason := why_not(row, entry, cells):
                about.setdefault(reason, []).append(
                    f"{', '.join(filter(None, row.cells))}: {f'{group} {name}'.strip()}"
                )
    return about


def as_plain(view: TableView, cells: Cells) -> dict[str, Any]:
    """The table for programs: per cent, null where there is nothing."""
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


def as_markdown(view: TableView, cells: Cells) -> list[str]:
    """The table, how it is read, and what is missing."""
    head = [*view.heads, *(f"{group} {name}".strip() for group, name in view.columns)]
    rows = [[*row.cells, *(shown_score(row, entry, cells, view.paper) for entry in row.entries)] for row in view.rows]
    legend = "Ours in per cent" + (f", with the number of {view.source} in brackets." if view.paper else ".")
    parts = [f"## {view.title} ({view.label})", table(head, rows), legend]
    parts += ["\n".join(f"- {note}" for note in view.notes)] if view.notes else []
    if reasons := missing_cells(view, cells):
        lines = (
            f"- {reason} ({'; '.join(cells[:_CELLS_NAMED])}"
            + (f" and {counted(len(cells) - _CELLS_NAMED, 'more cell')})" if len(cells) > _CELLS_NAMED else ")")
            for reason, cells in reasons.items()
        )
        parts += ["### Missing", "\n".join(lines)]
    return parts


def shown_score(row: ViewRow, entry: TableEntry, cells: Cells, paper: bool) -> str:
    """Our score, or a dash, and where it is asked for the printed one in brackets."""
    score = ours(row, entry, cells)
    own = _NOTHING if score is None else f"{score:.1f}"
    return own if not paper or entry.printed is None else f"{own} ({entry.printed:.1f})"


@dataclass(repr=False)
class Comparison(Summary):
    """Models by benchmarks, as far as they have come."""

    models: tuple[str, ...]
    columns: tuple[BenchmarkColumn, ...]
    out: Path
    weights: WeightsName
    cells: dict[tuple[str, str], Cell]
    """By model and name of the benchmark."""
    unrecognized: list[str] = field(default_factory=list)
    """Models without a fingerprint, so that their results are never reused."""
    table: TableView | None = None
    """A table of the paper that the cells are put together to."""

    def summary(self) -> tuple[str, dict[str, str]]:
        def score(cell: Cell) -> str:
            return cell.status if cell.record is None else percent(next(iter(cell.record["scores"].values())))

        rows = {
            model: ", ".join(f"{column.name} {score(self.cells[model, column.name])}" for column in self.columns)
            for model in self.models
        }
        return f"{self.out}: {counted(len(self.models), 'model')} on {counted(len(self.columns), 'benchmark')}", rows

    @property
    def remark_titles(self) -> dict[Remark, str]:
        """Headings; a table may ask for what departs elsewhere, as probing at another resolution."""
        if self.table is None:
            return REMARKS
        return REMARKS | {"deviations": "Departures from the paper's usual protocol, also those this table asks for"}

    @property
    def failed(self) -> list[Cell]:
        return [cell for cell in self.in_order if cell.status == "failed"]

    @property
    def failures(self) -> list[list[Cell]]:
        """The failed cells, those of a model that failed for the same reason together."""
        groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in self.failed:
            groups.setdefault((cell.model, cell.reason), []).append(cell)
        return list(groups.values())

    @property
    def done(self) -> list[Cell]:
        return [cell for cell in self.in_order if cell.status == "done"]

    @property
    def unfinished(self) -> list[Cell]:
        return [cell for cell in self.in_order if cell.status in {"pending", "running"}]

    @property
    def in_order(self) -> list[Cell]:
        return [self.cells[model, column.name] for model in self.models for column in self.columns]

    def finished(self, benchmark: str) -> dict[str, ResultRecord]:
        """The results of a benchmark that are there, by model."""
        records = {model: self.cells[model, benchmark].record for model in self.models}
        return {model: record for model, record in records.items() if record is not None}

    def best(self, benchmark: str) -> set[str]:
        """The models with the highest score; those that read the same as it share the place. One alone is not best."""
        values = {model: self.cells[model, benchmark].value for model in self.models}
        scores = {model: value for model, value in values.items() if value is not None}
        if len(scores) < 2:
            return set()
        highest = percent(max(scores.values()))
        return {model for model, value in scores.items() if percent(value) == highest}

    def score_name(self, benchmark: str) -> str:
        """What the quoted score of a benchmark is, and of how many images; empty until a cell of it is done."""
        column = next(column for column in self.columns if column.name == benchmark)
        for record in self.finished(benchmark).values():
            quoted, counts = next(iter(record["scores"])), record["details"]["test images"]
            if column.config.task == "segmentation":
                return f"{quoted} of {counted(counts, 'image')}"
            return f"{quoted} accuracy of {counted(counts[quoted], 'image')}"
        return ""

    def remarks(self, benchmark: str, kind: Remark) -> dict[str, list[str]]:
        """Departures or warnings of a benchmark, each once, with the models it is about; none, and first, means all."""
        finished = self.finished(benchmark)
        about: dict[str, list[str]] = {}
        for model, record in finished.items():
            for text in dict.fromkeys(record[kind]):
                about.setdefault(text, []).append(model)
        shared = {text: list[str]() for text, models in about.items() if len(models) == len(finished)}
        return shared | {text: models for text, models in about.items() if text not in shared}

    @property
    def changed(self) -> list[str]:
        """Models whose weights are not the same in all their cells: a run that trained on in the meantime."""
        prints: dict[str, set[str | None]] = {}
        for cell in self.done:
            assert cell.record is not None
            prints.setdefault(cell.model, set()).add(cell.record["encoder"]["fingerprint"])
        return [model for model in self.models if len(prints.get(model, ())) > 1]

    def licence(self, model: str) -> str | None:
        """That of a model's weights, as far as a cell that is done knows it."""
        licences = [cell.record.get("licence") for cell in self.done if cell.model == model and cell.record is not None]
        return next((each for each in licences if each), None)

    def image_size(self, model: str) -> str:
        """The sizes that a model saw images at, as far as its cells are done."""
        sizes = (shown_size(cell.record) for cell in self.done if cell.model == model and cell.record is not None)
        return ", ".join(dict.fromkeys(sizes)) or "-"

    def model_notes(self, model: str) -> list[str]:
        """What must be said about the results of a model as a whole."""
        notes = []
        if licence := self.licence(model):
            notes.append(f"licence of the weights: {licence}")
        if model in self.unrecognized:
            notes.append("it has no weights to know it by, so its cells are computed again every time")
        if model in self.changed:
            notes.append("its weights changed between the cells, which are not all of one model")
        return notes

    def stop(self) -> None:
        """Mark what was being computed as pending."""
        self.cells = {
            key: replace(cell, status="pending") if cell.status == "running" else cell
            for key, cell in self.cells.items()
        }


def shareable(comparison: Comparison) -> Comparison:
    """The same for the eyes of others: models and reasons without the places of this machine."""
    names = shared_names(comparison.models)
    table = comparison.table
    if table is not None:
        rows = [
            replace(row, model=row.model and names[row.model], cells=tuple(map(hide_path, row.cells)))
            for row in table.rows
        ]
        table = replace(table, rows=tuple(rows))
    cells = {}
    for (model, benchmark), cell in comparison.cells.items():
        # Reasons often say `MODEL: what was expected`: the model gets its name, and the rest of the sentence stays.
        before, colon, after = cell.reason.partition(f"{model}: ")
        reason = f"{hide_path(before)}{names[model]}: {hide_path(after)}" if colon else hide_path(cell.reason)
        cells[names[model], benchmark] = replace(
            cell, model=names[model], reason=reason, record=hide_paths(cell.record)
        )
    return replace(
        comparison,
        models=tuple(names.values()),
        cells=cells,
        unrecognized=[names[model] for model in comparison.unrecognized],
        table=table,
    )


def shared_names(models: Sequence[str]) -> dict[str, str]:
    """Names without paths; those that would be equal are numbered."""
    names: dict[str, str] = {}
    for model in models:
        base = hide_path(model)
        tries = (base if number == 1 else f"{base} ({number})" for number in itertools.count(1))
        names[model] = next(name for name in tries if name not in names.values())
    return names


def short_names(models: Sequence[str]) -> dict[str, str]:
    """Long paths by their end, as long as that tells them apart."""
    short = {model: _shortened(model) for model in models}
    counts = Counter(short.values())
    return {model: name if counts[name] == 1 else model for model, name in short.items()}


def _shortened(text: str) -> str:
    text = text.removeprefix("baseline:")
    if len(text) <= _LONG_NAME:
        return text
    end = ""
    for part in reversed(text.split("/")):
        if end and len(part) + len(end) + 3 > _LONG_NAME:
            break
        end = f"{part}/{end}" if end else part
    return f"…/{end}" if len(end) + 2 <= _LONG_NAME else "…" + text[1 - _LONG_NAME :]
