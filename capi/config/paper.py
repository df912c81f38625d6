"""The paper's models and tables as data: a recipe for every model, and the scores with the table that they stand in.

Numbers and short names are the paper's. Where it draws a score without printing it, there is none here.
"""

import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field, model_validator

from capi.config.schema import Section
from capi.errors import CapiError, nearest

FIGURE_ONLY = "figure only"
# What the paper prints above its tables and figures, by their labels in its text.
_NUMBERS = {
    "fig:pullfig": "Figure 1",
    "fig:scaling": "Figure 7",
    "tab:ablations": "Table 1",
    "tab:ablations:pred_arch": "Table 1a",
    "tab:ablations:mask_type": "Table 1b",
    "tab:ablations:proj_head": "Table 1c",
    "tab:ablations:crop_range": "Table 1d",
    "tab:ablations:mask_ratio": "Table 1e",
    "tab:ablations:pred_shape": "Table 1f",
    "tab:ablations:n_reg": "Table 1g",
    "tab:ablations:posenc": "Table 1h",
    "tab:ablations:sinkhorn": "Table 1i",
    "tab:main_results": "Table 2",
    "tab:dense": "Table 3",
    "tab:high_res": "Table 4",
    "tab:global_repr": "Table 5",
    "tab:pred_vs_attentive_pooling": "Table 6",
    "tab:standardization": "Table 8",
    "tab:gen_table_our_models": "Table 9",
    "tab:fig_to_model": "Table 10",
}
COMMENT_WIDTH = 118


def number_of(label: str) -> str:
    """A table's or figure's number, from its label; of a figure's part, such as "fig:scaling, left", with the part.

    The name of a board, which the paper does not number, stays."""
    name, comma, part = label.partition(",")
    return f"{_NUMBERS.get(name, name)}{comma}{part}"


def find_table(name: str, labels: Mapping[str, str]) -> str | None:
    """The name of a table from its name, its number ("Table 3", "3", "figure 7 left") or its label."""

    def plain(text: str) -> str:
        return text.lower().replace(" ", "").replace(",", "").removeprefix("table")

    asked = plain(name)
    return next(
        (table for table, label in labels.items() if asked in (table, plain(label), plain(number_of(label)))), None
    )


class PaperModel(Section):
    """One model of the paper, as a recipe that extends another."""

    title: str
    """What it is, in a few words."""
    data: Literal["LVD-142M", "ImageNet-22k", "ImageNet-1k", "Places205"]
    """What it was trained on."""
    extends: str
    """Another model, or a recipe that comes with the package."""
    changes: dict[str, Any] = Field(default_factory=dict)
    """What differs in the config."""
    source: Literal["tab:gen_table_our_models", "tab:fig_to_model", "fig:scaling"] = "tab:gen_table_our_models"
    """Label of the list that has the model: the list of models, the list of figures, or a figure alone."""
    same_as: str | None = None
    """The model that stands for this one in the tables, being the same."""
    figures: list[str] = Field(default_factory=list)
    """Figures that show it without a score."""
    measured: str | None = None
    """What the paper says that it cost."""
    open: str | None = None
    """What the paper leaves open or says twice differently, and what was chosen."""


class PaperRow(Section):
    """A row of a table. A row with several models is their mean."""

    name: str
    """The row's name in the table."""
    models: Annotated[list[str], Field(min_length=1)]
    """The recipes of the row."""
    scores: list[float] | Literal["figure only"]
    """One score for each column of the table, in per cent as printed."""
    numbers_in: list[str] = Field(default_factory=list)
    """Labels of the tables that the numbers stand in, where it is not this one."""
    default: bool = False
    """Whether it is the default setting."""


class PaperTable(Section):
    """A table, or a figure, with scores of the paper's own models."""

    title: str
    """What is compared."""
    label: str
    """The table's label in the paper's text."""
    columns: list[str]
    """What is scored."""
    rows: list[PaperRow]
    open: str | None = None
    """What the paper leaves open about it, and what was chosen."""

    @property
    def number(self) -> str:
        return number_of(self.label)

    @model_validator(mode="after")
    def _scores_fill_columns(self) -> "PaperTable":
        for row in self.rows:
            if row.scores != FIGURE_ONLY and len(row.scores) != len(self.columns):
                raise ValueError(f"{self.label}, row {row.name}: {len(row.scores)} scores for {self.columns}")
        return self


class PaperResult(NamedTuple):
    """Where a model stands in the tables."""

    table: PaperTable
    row: PaperRow


class _Models(Section):
    version: int
    models: dict[str, PaperModel]


class _Tables(Section):
    tables: dict[str, PaperTable]


def paper_models() -> dict[str, PaperModel]:
    """Every model of the paper, by uid, in the paper's order; models without one are called by what they vary."""
    return _models().models


@cache
def paper_tables() -> dict[str, PaperTable]:
    """The tables that list the paper's models, by name."""
    return _Tables.model_validate(_read("paper_tables.yaml")).tables


def paper_table(name: str) -> PaperTable:
    """One table by name or number."""
    table_name = find_table(name, {labels: table.label for labels, table in paper_tables().items()})
    if table_name is None:
        listed = ", ".join(f"{labels} ({table.number})" for labels, table in paper_tables().items())
        raise CapiError(f'there is no table "{name}"{nearest(name, paper_tables())} (there are {listed})')
    return paper_tables()[table_name]


def results_of(name: str) -> list[PaperResult]:
    """The rows that a model stands in, table by table; the paper may give it another score in each."""
    listed = paper_models()[name].same_as or name
    return [PaperResult(table, row) for table in paper_tables().values() for row in table.rows if listed in row.models]


def paper_recipe(name: str) -> str:
    """The recipe of a model as YAML that holds what differs; it opens with title, command and the paper's results."""
    model = paper_models()[name]
    tree = {"version": _models().version, "extends": model.extends} | model.changes
    comment = "\n".join(f"# {line}".rstrip() for line in _comment_lines(name, model))
    return f"{comment}\n{yaml.safe_dump(tree, sort_keys=False)}"


def describe_results(name: str) -> list[str]:
    """What the paper says of a model: each set of scores once, with the labels of the tables they stand in."""
    places: dict[str, list[PaperResult]] = {}
    for result in results_of(name):
        # Numbers that a figure borrows from a table are printed where the table is.
        if not result.row.numbers_in:
            places.setdefault(_scores_text(result), []).append(result)
    texts = []
    for scores, results in places.items():
        (table, row), *others = results
        text = "; ".join(result.table.number for result in results) if others else f"{table.number}: {row.name}"
        texts.append(f"{scores} ({text})")
    return texts


def _scores_text(result: PaperResult) -> str:
    table, row = result
    if row.scores == FIGURE_ONLY:
        return FIGURE_ONLY
    mean = f"mean of {' and '.join(row.models)}: " if len(row.models) > 1 else ""
    return mean + ", ".join(f"{column} {score:.1f}" for column, score in zip(table.columns, row.scores, strict=True))


def _comment_lines(name: str, model: PaperModel) -> Iterator[str]:
    yield f"{name}: {model.title}, pretrained on {model.data} (paper, {number_of(model.source)})."
    yield ""
    yield from _entry("Command:", f"capi pretrain {name} --data IMAGES --out RUN")
    if model.measured:
        yield from _entry("Measured:", model.measured)
    for number, text in enumerate(describe_results(name)):
        yield from _entry("" if number else "Expected:", text)
    if model.open:
        yield from _entry("Open:", model.open)


def _entry(word: str, text: str) -> list[str]:
    """A word and its text; later lines stand below it, a little further in."""
    return textwrap.wrap(text, COMMENT_WIDTH, initial_indent=f"{word:<10}", subsequent_indent=" " * 12)


@cache
def _models() -> _Models:
    return _Models.model_validate(_read("paper_models.yaml"))


def _read(file: str) -> Any:
    return yaml.safe_load((resources.files("capi.config") / file).read_text(encoding="utf-8"))
