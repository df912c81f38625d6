"""The paper's ablations and result tables, as data.

Ablations are in miniature: rows that differ from a small recipe as the paper's do from its own. Result tables have
their baselines: rows and columns as printed, and how each cell is evaluated.
"""

import re
from functools import cache
from importlib import resources
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import Field, model_validator

from capi.config.benchmarks import PROTOCOL_CONFIGS, BenchmarkConfig
from capi.config.files import dump_config, load_benchmark, load_config, merge, parse_config
from capi.config.paper import PaperRow, PaperTable, find_table, number_of, paper_table, paper_tables
from capi.config.schema import Config, Count, Options, Positive, Section
from capi.errors import CapiError, nearest
from capi.runtime.protocol import PAPER_SIZE, Task
from capi.runtime.yaml_documents import parse_yaml

# By task and protocol, the options of a benchmark.
Benchmarks = dict[Task, dict[str, Options]]
# The run of the recipe as it is: the row that tables have in common.
DEFAULT_RUN = "default"


class Scale(Section):
    """How large the runs of a study are, and how they are judged."""

    recipe: str
    """What all rows are changes to."""
    changes: dict[str, Any] = Field(default_factory=dict)
    """Changes to the recipe, of all rows."""
    curve_points: Count
    """How often a run is evaluated on its way."""
    scores: Benchmarks
    """Benchmarks of the finished encoders."""
    curves: Benchmarks
    """Benchmarks on the way, which must be quick."""


class AblationRow(Section):
    """A row: what differs from the recipe."""

    changes: dict[str, Any] = Field(default_factory=dict)
    """Values to change."""
    scaled: dict[str, Positive] = Field(default_factory=dict)
    """Numbers to multiply, by key."""


class Ablation(Section):
    """A table of the paper that can be run again."""

    short: str
    """A shorter name."""
    here: str | None = None
    """What a row is called where its numbers are not the paper's, with values of the config in braces."""
    rows: Annotated[dict[str, AblationRow], Field(min_length=2)]
    """By the name of the paper's row."""


class PlannedRow(NamedTuple):
    """A row that can be run: the paper's, and its config here, but for the seed."""

    name: str
    paper: PaperRow
    run: str
    config: Config


class PlannedTable(NamedTuple):
    """A table of the paper as it will be run."""

    name: str
    paper: PaperTable
    rows: list[PlannedRow]


class _File(Section):
    scales: dict[str, Scale]
    ablations: dict[str, Ablation]

    @model_validator(mode="after")
    def _rows_are_the_papers(self) -> "_File":
        for name, ablation in self.ablations.items():
            names = [row.name for row in paper_table(name).rows]
            if list(ablation.rows) != names:
                raise ValueError(f"{name} has the rows {list(ablation.rows)}, but the paper has {names}")
        return self


def scales() -> dict[str, Scale]:
    """How large a study may be, by name."""
    return _file().scales


def ablations() -> dict[str, Ablation]:
    """The tables that can be run again, by the paper's table."""
    return _file().ablations


def find_scale(name: str) -> Scale:
    """A scale by name."""
    if name not in scales():
        raise CapiError(f'there is no scale "{name}"{nearest(name, scales())} (there are {", ".join(scales())})')
    return scales()[name]


def find_ablation(name: str) -> str:
    """The name of a table, from its name or its short name."""
    shorts = {ablation.short: full for full, ablation in ablations().items()}
    if name in ablations() or name in shorts:
        return shorts.get(name, name)
    listed = ", ".join(full if full == short else f"{full} or {short}" for short, full in shorts.items())
    raise CapiError(f'there is no ablation "{name}"{nearest(name, [*ablations(), *shorts])} (there are {listed})')


def plan_table(name: str, scale: Scale, overrides: list[str]) -> PlannedTable:
    """The rows of a table with their configs; overrides are for all of them."""
    full = find_ablation(name)
    base = base_config(scale, overrides)
    paper_rows = {row.name: row for row in paper_table(full).rows}
    rows = [
        PlannedRow(
            _shown(row_name, ablations()[full], config := _row_config(base, row, f"{full}, {row_name}")),
            paper_rows[row_name],
            DEFAULT_RUN
            if config == base
            else "-".join(re.findall(r"[^\W_]+", f"{ablations()[full].short} {row_name}")).lower(),
            config,
        )
        for row_name, row in ablations()[full].rows.items()
    ]
    return PlannedTable(full, paper_table(full), rows)


def base_config(scale: Scale, overrides: list[str]) -> Config:
    """What all rows are changes to."""
    recipe = parse_yaml(dump_config(load_config(scale.recipe)), scale.recipe)
    return parse_config(merge(recipe, scale.changes), overrides, source=scale.recipe)


def _row_config(base: Config, row: AblationRow, source: str) -> Config:
    tree: dict[str, Any] = base.model_dump(mode="json")
    # Left to follow the encoder they could not be scaled.
    sizes = {"model.predictor.depth": base.model.predictor_depth, "model.predictor.width": base.model.predictor_width}
    for key, factor in row.scaled.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place[section]
        place[last] = max(round(sizes.get(key, place[last]) * factor), 1)
    return parse_config(merge(tree, row.changes), source=source)


def _shown(row: str, ablation: Ablation, config: Config) -> str:
    """The paper's name, and what its numbers are here where they are not the same."""
    if ablation.here is None:
        return row
    here = ablation.here.format(**{name: getattr(config, name) for name in Config.model_fields})
    return row if here == row else f"{row} (here {here})"


@cache
def _file() -> _File:
    text = (resources.files("capi.config") / "ablations.yaml").read_text(encoding="utf-8")
    return _File.model_validate(parse_yaml(text, "ablations.yaml"))


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
    model: str | None
    """null: its weights were never published, so its numbers can only be read."""
    protocol: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    scores: list[float | None]
    """As printed, in per cent."""

    @property
    def title(self) -> str:
        return ", ".join(self.cells)


class ResultTable(Section):
    """One table of the paper, or of a public board with the same protocol."""

    title: str
    label: str
    """Its own in the paper's text; a board's name."""
    source: str = "the paper"
    """Whose numbers these are."""
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
    fields = PROTOCOL_CONFIGS[protocol].model_fields
    options = {name: value for name, value in (column.options | row.options).items() if name in fields}
    # Also for models of one's own, whatever they were trained at: the numbers beside them are of this size.
    usual = {"image_size": PAPER_SIZE[0]}
    said = ", ".join(
        f"{name} {'+'.join(map(str, value)) if isinstance(value, list) else str(value).lower()}"
        for name, value in options.items()
    )
    name = f"{column.dataset}/{protocol}" + (f" ({said})" if said else "")
    return Asked(name, load_benchmark(f"{column.dataset}/{protocol}", options=usual | options))


@cache
def result_tables() -> dict[str, ResultTable]:
    """All tables by the name that a user gives."""
    text = (resources.files("capi.config") / "result_tables.yaml").read_text(encoding="utf-8")
    return {name: ResultTable.model_validate(table) for name, table in yaml.safe_load(text)["tables"].items()}


def table_named(name: str) -> ResultTable:
    """A table by name or number; another name is an error with the closest one."""
    tables = result_tables()
    key = find_table(name, {own: table.label for own, table in tables.items()})
    if key is not None:
        return tables[key]
    if find_table(name, {own: table.label for own, table in paper_tables().items()}):
        raise CapiError(
            f"{name} compares trainings: `capi recipes --table` shows it, `capi ablate` runs it in miniature"
        )
    listed = ", ".join(f"{own} ({number_of(table.label)})" for own, table in tables.items())
    raise CapiError(f'there is no table "{name}"{nearest(name, tables)}: expected {listed}')
