"""A result table of the paper as one command: its models and benchmarks, as far as weights and data are there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from capi.api.comparison import compare_columns
from capi.config.experiments import Asked, ResultTable, TableColumn, TableRow, asked_for, table_named
from capi.config.files import Overrides, override_texts
from capi.config.paper import number_of
from capi.errors import CapiError, nearest
from capi.evals.comparison_cells import NOT_IN_TABLE, BenchmarkColumn, Comparison, TableEntry, TableView, ViewRow
from capi.evals.datasets.imagenet import TEST_SETS
from capi.evals.team import executing
from capi.types import Names, listed
from capi.zoo.baselines import PREFIX, USUAL, is_baseline
from capi.zoo.baselines.load import find_weights
from capi.zoo.baselines.registry import BASELINES, baseline_named
from capi.zoo.published.cache import cache_folder
from capi.zoo.published.registry import RELEASED
from capi.zoo.weights import WeightsName


@dataclass(frozen=True)
class _Needed:
    """A cell of the table with the benchmark that it needs, where its data lies, and what keeps it from being run."""

    asked: Asked
    reason: str
    missing_test: str


def compare_table(
    table: str,
    models: Names = (),
    overrides: Overrides = (),
    *,
    out: str | Path,
    data_root: str | Path | None = None,
    paper: bool = True,
    weights: WeightsName = "teacher",
    device: torch.device | str | None = None,
    console: Console | None = None,
    **options: Any,
) -> Comparison:
    """A result table of the paper, rows and columns as printed, ours beside the paper's: rows of `models` (all where
    none is given), and rows of one's own for others. A table of a public board shows `models` beside its numbers.

    Data sets lie in `data_root` under their names, further test sets of ImageNet as imagenet-v2, imagenet-a, ... What
    is not there, weights or data, is said in its cells, and the others are computed; a cell that fails stops none.
    `overrides` and further keywords go to each benchmark that knows the key.
    """
    printed = table_named(table)
    root = None if data_root is None else Path(data_root)
    if root is not None and not root.is_dir():
        raise CapiError(f"{root} is no folder: --data-root takes the one that holds the data sets, by their names")
    rows = chosen_rows(printed, [str(model) for model in listed(models)])
    if not any(row.model for row in rows):
        raise CapiError(f"{table}: nobody has the weights of its rows: name the MODEL... to compare with them")
    needed = {
        (number, place): _needed(row, column, printed, root)
        for number, row in enumerate(rows)
        for place, column in enumerate(printed.columns)
    }
    columns = {each.asked.name: BenchmarkColumn(*each.asked) for each in needed.values()}
    with executing(device, console) as execution:
        return compare_columns(
            [row.model for row in rows if row.model],
            list(columns.values()),
            override_texts(overrides, options),
            out=out,
            weights=weights,
            execution=execution,
            skipped=_skipped(rows, printed, needed, columns),
            table=_view(table, printed, rows, needed, paper),
        )


def chosen_rows(table: ResultTable, models: Sequence[str]) -> list[TableRow]:
    """The rows of the models that are asked for; a model that the table lacks gets rows of its own."""
    if not models:
        return list(table.rows)
    # What nobody can run is there to be compared with.
    rows = [row for row in table.rows if row.model is None]
    for model in dict.fromkeys(map(_full_name, models)):
        # A name with a place, baseline:NAME=PATH, is the model of its row.
        of_model = [row for row in table.rows if row.model and _plain_name(row.model) == _plain_name(model)]
        rows += [_as_asked(row, model) for row in of_model] if of_model else _own_rows(table, model)
    return rows


def _full_name(model: str) -> str:
    """The name with the prefix of baselines, which may be left out; a name of no model raises before anything runs."""
    plain, part = _plain_name(model), _part(model)
    if is_baseline(model) or (plain in BASELINES and not Path(model).exists()):
        layout = baseline_named(plain).layout
        layout.part(part or None)
        return PREFIX + model.removeprefix(PREFIX)
    if not (Path(model).exists() or model in RELEASED or ":" in model or "/" in model):
        raise CapiError(
            f'there is no model "{model}": expected a run, a file, a name that `capi models` lists, or what `capi '
            f"evaluate` takes{nearest(model, [*BASELINES, *RELEASED])}"
        )
    return model


def _plain_name(model: str) -> str:
    """The name without place, part and resampling of baseline:NAME+RESAMPLING@PART=PLACE."""
    return model.removeprefix(PREFIX).partition("=")[0].partition("@")[0].partition("+")[0]


def _part(model: str) -> str:
    """The network of a checkpoint that is asked for; empty for the usual one."""
    return model.partition("=")[0].partition("@")[2] if _plain_name(model) in BASELINES else ""


def _as_asked(row: TableRow, model: str) -> TableRow:
    """A row of the table for weights of one's own choice; another network or resampling is part of its name."""
    resampling = model.partition("=")[0].partition("@")[0].partition("+")[2]
    said = ", ".join(each for each in (resampling, _part(model)) if each)
    name = f"{row.cells[0]} ({said})" if said else row.cells[0]
    return row.model_copy(update={"model": model, "cells": [name, *row.cells[1:]]})


def _own_rows(table: ResultTable, model: str) -> list[TableRow]:
    """A row for each that CAPI has in the table (one where it has none), without printed numbers."""
    usual = [row for row in table.rows if row.model == "capi_vitl14_lvd"] or [table.rows[-1]]
    several = len({row.cells[0] for row in usual}) > 1
    # What pools is a predictor in CAPI alone.
    pooled = {"predictor pooling": "pooled", "pred pooling": "pooled", "cat(pred pooling, avg pooling)": "both"}
    return [
        row.model_copy(
            update={
                "model": model,
                "cells": [
                    f"{model}: {pooled.get(row.cells[0], row.cells[0])}" if several else model,
                    *(text if len(usual) > 1 else "" for text in row.cells[1:]),
                ],
                "scores": [None] * len(table.columns),
            }
        )
        for row in usual
    ]


def _needed(row: TableRow, column: TableColumn, table: ResultTable, root: Path | None) -> _Needed:
    asked = asked_for(row, column)
    folder = None if root is None else root / column.dataset
    if folder is None:
        return _Needed(asked, f"no data: --data-root names the folder that holds {column.dataset}", "")
    if not folder.exists():
        return _Needed(asked, f"no data: expected {folder}", "")
    further = _further_tests(table, column.dataset, folder.parent)
    config = asked.config.model_copy(update={"data": str(folder), "more": further})
    lacking = column.score in TEST_SETS and column.score not in further
    return _Needed(
        Asked(asked.name, config),
        weights_reason(row.model) if row.model else "",
        f"no data: expected {folder.parent / _test_name(str(column.score))}" if lacking else "",
    )


def _further_tests(table: ResultTable, dataset: str, root: Path) -> dict[str, str]:
    """The test sets of ImageNet that the table has and that are there."""
    asked = dict.fromkeys(each.score for each in table.columns if each.dataset == dataset and each.score in TEST_SETS)
    folders: dict[str, str] = {}
    for name in (name for name in asked if name is not None):
        place = root / _test_name(name)
        folders |= {name: str(place)} if place.exists() else {}
    return folders


def _test_name(name: str) -> str:
    """What a further test set of ImageNet is called in the folder of data sets; ReaL is a file of labels alone."""
    return f"imagenet-{name}" + (".json" if name == "real" else "")


def weights_reason(model: str) -> str:
    """Why the weights of a model cannot be used, as far as that is known without reading them; empty where they can."""
    if is_baseline(model) and "=" not in model:
        try:
            find_weights(baseline_named(_plain_name(model)))
        except CapiError as error:
            return str(error)
    if model in RELEASED and not Path(model).exists() and not (cache_folder() / RELEASED[model].file).is_file():
        return f'the weights of {model} are not on this machine: capi.load("{model}") downloads them'
    return ""


def _skipped(
    rows: Sequence[TableRow],
    table: ResultTable,
    needed: dict[tuple[int, int], _Needed],
    columns: Iterable[str],
) -> dict[tuple[str, str], str]:
    """Why a model is not run on a benchmark: because the table does not ask for it, or because something is missing."""
    reasons = {(row.model, column): NOT_IN_TABLE for row in rows if row.model for column in columns}
    for number, row in enumerate(rows):
        if row.model is None:
            continue
        for place in range(len(table.columns)):
            each = needed[number, place]
            if each.reason:
                reasons[row.model, each.asked.name] = each.reason
            else:
                reasons.pop((row.model, each.asked.name), None)
    return reasons


def _view(
    name: str, table: ResultTable, rows: Sequence[TableRow], needed: dict[tuple[int, int], _Needed], paper: bool
) -> TableView:
    return TableView(
        name=name,
        title=table.title,
        label=number_of(table.label),
        heads=tuple(table.heads),
        columns=tuple((column.group, column.name) for column in table.columns),
        rows=tuple(
            ViewRow(
                tuple(row.cells),
                row.model,
                tuple(
                    TableEntry(each.asked.name, column.score, printed, each.missing_test)
                    for place, (column, printed) in enumerate(zip(table.columns, row.scores, strict=True))
                    for each in (needed[number, place],)
                ),
            )
            for number, row in enumerate(rows)
        ),
        notes=(*table.notes, *_model_notes(rows)),
        paper=paper,
        source=table.source,
    )


def _model_notes(rows: Sequence[TableRow]) -> list[str]:
    """What is to be known of a baseline's scores."""
    # Notes are of the network that is usual, from the file of the authors.
    names = dict.fromkeys(
        _plain_name(model)
        for model in (row.model for row in rows if row.model)
        if not _part(model) and not model.endswith(f"={USUAL}")
    )
    return [f"{name}: {BASELINES[name].note}." for name in names if name in BASELINES and BASELINES[name].note]
