"""The paper's result tables with their baselines: rows and columns as printed, and how each cell is evaluated."""

from functools import cache
from importlib import resources
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import Field, model_validator

from capi.config.benchmark_loading import load_benchmark
from capi.config.benchmarks import PROTOCOLS, BenchmarkConfig
from capi.config.section import Section
from capi.errors import CapiError, nearest
from capi.runtime.protocol import PAPER_SIZE


class TableColumn(Section):
    """A column: a benchmark, and which of its scores is printed."""

    name: str
    group: str = ""
    """What stands above several columns."""
    dataset: str
    protocol: str
    score: str | None = None
    """The test set whose score is printed; null takes the first score."""
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.group} {self.name}".strip()


class TableRow(Section):
    """A row: a model, and what its cells have in place of the column's protocol or options."""

    cells: Annotated[list[str], Field(min_length=1)]
    """What is printed before the scores."""
    model: str
    protocol: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    scores: list[float | None]
    """As printed, in per cent."""

    @property
    def title(self) -> str:
        return ", ".join(self.cells)


class ResultTable(Section):
    """One table of the paper."""

    title: str
    label: str
    """Its own in the paper's text."""
    heads: list[str]
    columns: list[TableColumn]
    rows: list[TableRow]
    notes: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _complete(self) -> "ResultTable":
        for row in self.rows:
            if len(row.scores) != len(self.columns) or len(row.cells) != len(self.heads):
                raise ValueError(f"the row {row.title} does not fit the columns")
        return self


class Asked(NamedTuple):
    """The benchmark that a cell needs."""

    name: str
    config: BenchmarkConfig


def asked_for(row: TableRow, column: TableColumn) -> Asked:
    """The benchmark of a cell: the column's, as far as the row does not change it."""
    protocol = row.protocol or column.protocol
    known = PROTOCOLS[protocol].model_fields
    options = {name: value for name, value in (column.options | row.options).items() if name in known}
    # Also for models of one's own, whatever they were trained at: the numbers beside them are of this size.
    usual = {"image_size": PAPER_SIZE[0]}
    said = ", ".join(f"{name} {_plain(value)}" for name, value in options.items())
    name = f"{column.dataset}/{protocol}" + (f" ({said})" if said else "")
    return Asked(name, load_benchmark(f"{column.dataset}/{protocol}", options=usual | options))


def _plain(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value).lower()


@cache
def result_tables() -> dict[str, ResultTable]:
    """All tables by the name that a user gives."""
    text = (resources.files("capi.config") / "result_tables.yaml").read_text(encoding="utf-8")
    return {name: ResultTable.model_validate(table) for name, table in yaml.safe_load(text)["tables"].items()}


def table_named(name: str) -> ResultTable:
    """A table; another name is an error with the closest one."""
    tables = result_tables()
    if name not in tables:
        raise CapiError(f'there is no table "{name}"{nearest(name, tables)}: expected {", ".join(tables)}')
    return tables[name]
