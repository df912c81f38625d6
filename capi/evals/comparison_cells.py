"""What a comparison consists of: models by benchmarks, with a cell for each pair, and what can be read off them."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from capi.config.benchmarks import BenchmarkConfig
from capi.evals.results import Record, percent, shown_size
from capi.evals.table_view import TableView
from capi.runtime.privacy import hide_path, hide_paths
from capi.runtime.summary import Summary
from capi.zoo.weights import Weights

Status = Literal["pending", "running", "done", "failed", "skipped"]
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
    status: Status = "pending"
    record: Record | None = field(default=None, repr=False)
    reason: str = ""
    kept: bool = False
    """Whether the results were there from an earlier comparison."""

    @property
    def quoted(self) -> tuple[str, float | None] | None:
        """Name and value of the score to quote; None where there is none. NaN is None."""
        return None if self.record is None else next(iter(self.record["scores"].items()), None)

    @property
    def value(self) -> float | None:
        return None if self.quoted is None else self.quoted[1]


@dataclass(repr=False)
class Comparison(Summary):
    """Models by benchmarks, as far as they have come."""

    models: tuple[str, ...]
    columns: tuple[BenchmarkColumn, ...]
    out: Path
    weights: Weights
    cells: dict[tuple[str, str], Cell]
    """By model and name of the benchmark."""
    unrecognised: list[str] = field(default_factory=list)
    """Models that cannot be told from changed ones, so that their results are never kept."""
    table: TableView | None = None
    """A table of the paper that the cells are put together to."""

    def summary(self) -> tuple[str, dict[str, str]]:
        def score(cell: Cell) -> str:
            return cell.status if cell.record is None else percent(next(iter(cell.record["scores"].values())))

        rows = {
            model: ", ".join(f"{column.name} {score(self.cells[model, column.name])}" for column in self.columns)
            for model in self.models
        }
        return f"{self.out}: {len(self.models)} models on {len(self.columns)} benchmarks", rows

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

    def finished(self, benchmark: str) -> dict[str, Record]:
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
        """What the quoted score of a benchmark is; empty until a cell of it is done."""
        column = next(column for column in self.columns if column.name == benchmark)
        for model in self.models:
            if quoted := self.cells[model, benchmark].quoted:
                return quoted[0] if column.config.task == "segmentation" else f"{quoted[0]} accuracy"
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
        """Models whose weights are not the same in all their cells: a run that went on in the meantime."""
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
        if model in self.unrecognised:
            notes.append("it has no weights to know it by, so its cells are computed again every time")
        if model in self.changed:
            notes.append("its weights changed between the cells, which are not all of one model")
        return notes

    def stop(self) -> None:
        """What was being computed is not going on."""
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
    return replace(
        comparison,
        models=tuple(names.values()),
        cells={
            (names[model], benchmark): replace(
                cell, model=names[model], reason=hide_path(cell.reason), record=hide_paths(cell.record)
            )
            for (model, benchmark), cell in comparison.cells.items()
        },
        unrecognised=[names[model] for model in comparison.unrecognised],
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
