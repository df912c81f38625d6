"""Several models through several benchmarks: finished cells are kept, a cell that fails does not stop the others.

A cell is kept as long as nothing that its score depends on has changed: model, weights, benchmark, data, version. The
page of the comparison is written again after every cell.
"""

import hashlib
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from capi.api.evaluation import evaluate
from capi.config.benchmarks import BenchmarkConfig
from capi.config.files import (
    EXAMPLE,
    FILE_ENDINGS,
    Overrides,
    load_benchmark,
    overridden,
    override_texts,
    protocols_with,
    validated,
)
from capi.data.crops import image_size_of
from capi.data.sources import Files
from capi.errors import CapiError, nearest
from capi.evals.build import fingerprints, load_data
from capi.evals.comparison_cells import BenchmarkColumn, Cell, Comparison, TableView
from capi.evals.datasets import check_task, dataset_named
from capi.evals.features import is_out_of_memory
from capi.evals.fitted_probes import encoder_facts
from capi.evals.limits import PartOfImages, PartOfMasks
from capi.evals.results import ResultRecord, make_folder, read_record
from capi.evals.tasks import DataOptions, EvaluationData, SegmentationData
from capi.evals.team import Execution, executing, prepared
from capi.report.comparison import write_pages
from capi.runtime.atomic import atomic_write
from capi.runtime.documents import read_json
from capi.runtime.numerics import NUMERICS
from capi.runtime.privacy import hide_path, hide_paths
from capi.runtime.processes import Exchange, LostProcessError, SharedError, follow, lead
from capi.types import Names, listed
from capi.zoo.encoders import open_encoder
from capi.zoo.run_folder import versions
from capi.zoo.weights import WeightsName

CELLS, IDENTITY = "cells", "identity.json"
# What may go wrong with one cell: anything, since encoders may be the user's own code.
_FAILURES = Exception
_NAMED_BY_THE_BENCHMARK = ("dataset", "protocol")
_DATA_OPTIONS = frozenset(each.name for each in fields(DataOptions)) - {"verify_counts"}
_LONG_REASON, _LONG_SLUG = 400, 40

Benchmark = str | Path | BenchmarkColumn


def compare(
    models: Names,
    benchmarks: Names | Sequence[BenchmarkColumn],
    overrides: Overrides = (),
    *,
    out: str | Path,
    weights: WeightsName = "teacher",
    device: torch.device | str | None = None,
    console: Console | None = None,
    **options: Any,
) -> Comparison:
    """Evaluate every model on every benchmark; `out` gets comparison.json, .md, .csv, .html and a folder of cells.

    Overrides (`key=value`, a dict, or keywords) go to each benchmark that knows the key. Cells that are done are kept;
    the comparison that is returned has a list of the failed.
    """
    columns = [benchmarks] if isinstance(benchmarks, str | Path) else benchmarks
    texts = override_texts(overrides, options)
    with executing(device, console) as execution:
        return compare_columns(listed(models), columns, texts, out=out, weights=weights, execution=execution)


def compare_columns(
    models: Sequence[str | Path],
    benchmarks: Sequence[Benchmark],
    overrides: Overrides = (),
    *,
    out: str | Path,
    weights: WeightsName,
    execution: Execution,
    skipped: Mapping[tuple[str, str], str] | None = None,
    table: TableView | None = None,
) -> Comparison:
    """The same in an execution that has started. Of several processes the main one decides and writes, all encode.

    `skipped` has pairs of a model and a benchmark's name that are not run, with the reason; `table` is shown on top.
    """
    processes = execution.processes
    with prepared(processes):
        columns = resolve_columns(benchmarks, overrides)
        rows = tuple(dict.fromkeys(str(model) for model in models))
        if not rows:
            raise CapiError("there is no model to compare: give at least one")
        for column in columns if table is None else ():
            # Before a model is opened, which may take a download.
            if column.config.data is None and dataset_named(column.config.dataset).needs_folder:
                raise CapiError(f"{column.name} needs to know where the images lie: give data=PATH")
        if processes.is_main:
            make_folder(Path(out))
    run = _ComparisonRun(_empty(rows, columns, Path(out), weights), execution)
    run.comparison.table = table
    for pair, reason in (skipped or {}).items():
        run.comparison.cells[pair] = replace(run.comparison.cells[pair], status="skipped", reason=reason)
    if processes.size == 1:
        return run.all_cells()
    exchange = Exchange(processes)
    if not processes.is_main:
        comparison: Comparison = follow(exchange, run.assist)
        return comparison
    with lead(exchange) as findings:
        findings.result = run.all_cells()
    return run.comparison


def _empty(
    models: tuple[str, ...], columns: tuple[BenchmarkColumn, ...], out: Path, weights: WeightsName
) -> Comparison:
    cells = {
        (model, column.name): Cell(model, column.name, f"{CELLS}/{cell_name(model, column, weights)}")
        for model in models
        for column in columns
    }
    return Comparison(models, columns, out, weights, cells)


def cell_name(model: str, column: BenchmarkColumn, weights: WeightsName) -> str:
    """A folder's name that people can read, and that no other cell has."""
    whole = json.dumps([model, column.name, weights, column.config.model_dump(mode="json")], sort_keys=True)
    digest = hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{_slug(hide_path(model))}--{_slug(column.name)}-{digest}"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text)[-_LONG_SLUG:].strip("-.") or "x"


class _ComparisonRun:
    """The comparison in the making, and what was found out about its models and data on the way."""

    def __init__(self, comparison: Comparison, execution: Execution) -> None:
        self.comparison, self.execution = comparison, execution
        self.encoders: dict[str, dict[str, Any]] = {}
        self.data: dict[str, dict[str, Any]] = {}

    def all_cells(self) -> Comparison:
        try:
            write_pages(self.comparison)
            for model in self.comparison.models:
                for column in self.comparison.columns:
                    if self.comparison.cells[model, column.name].status != "skipped":
                        self.compute(model, column)
        finally:
            # Also when someone interrupts: what is done stays, and nothing looks as if it were still running.
            self.comparison.stop()
            write_pages(self.comparison)
        return self.comparison

    def assist(self, cell: tuple[str, int]) -> None:
        """Help with a cell that the main process computes; whether it failed is the main process's to note."""
        model, number = cell
        with suppress(SharedError):
            self.scored(model, self.comparison.columns[number])

    def scored(self, model: str, column: BenchmarkColumn, out: Path | None = None) -> ResultRecord:
        return evaluate(
            model,
            column.config,
            out=out,
            weights=self.comparison.weights,
            overwrite=True,
            execution=self.execution,
        ).record

    def compute(self, model: str, column: BenchmarkColumn) -> None:
        """Keep a cell, or compute it, or note why that is impossible."""
        cell = self.comparison.cells[model, column.name]
        self.change(replace(cell, status="running"))
        self.change(self.outcome(cell, column))

    def outcome(self, cell: Cell, column: BenchmarkColumn) -> Cell:
        folder = self.comparison.out / cell.folder
        try:
            identity = self.identity(cell.model, column)
            cached = self.cached(folder, identity)
            record = self.evaluated(folder, cell.model, column, identity) if cached is None else cached
        except LostProcessError:
            raise
        except _FAILURES as error:
            return replace(cell, status="failed", reason=reason_of(error))
        return replace(cell, status="done", record=record, reused=cached is not None)

    def evaluated(self, folder: Path, model: str, column: BenchmarkColumn, identity: dict[str, Any]) -> ResultRecord:
        """Remove the file that identifies results, so that those being replaced are never taken for finished."""
        (folder / IDENTITY).unlink(missing_ok=True)
        if self.execution.processes.size > 1:
            Exchange(self.execution.processes).announce((model, self.comparison.columns.index(column)))
        record = self.scored(model, column, folder)
        # A run that is still trained may have newer weights by now: what was evaluated is what counts.
        identity = identity | {"encoder": record["encoder"], "data": record["data_fingerprint"]}
        atomic_write(folder / IDENTITY, json.dumps(identity, indent=2) + "\n")
        return record

    def change(self, cell: Cell) -> None:
        self.comparison.cells[cell.model, cell.benchmark] = cell
        write_pages(self.comparison)
        if cell.status == "running":
            self.execution.progress.begin(f"{cell.model} on {cell.benchmark}: ")

    def cached(self, folder: Path, identity: dict[str, Any]) -> ResultRecord | None:
        """The finished results of the very same; None where there are none."""
        if identity["encoder"]["fingerprint"] is None:
            return None
        try:
            stored = read_json(folder / IDENTITY)
        except CapiError:
            return None
        return read_record(folder) if stored == json.loads(json.dumps(identity)) else None

    def identity(self, model: str, column: BenchmarkColumn) -> dict[str, Any]:
        """Everything that the score of a cell depends on."""
        # Data first: a wrong path shows before a model is downloaded.
        if column.name not in self.data:
            self.data[column.name] = identify_data(load_data(column.config))
        if model not in self.encoders:
            self.encoders[model] = identify_encoder(model, self.comparison.weights)
            if self.encoders[model]["encoder"]["fingerprint"] is None:
                self.comparison.unrecognized.append(model)
        return {
            # Whole paths are in the digest of the folder's name.
            "model": hide_path(model),
            "weights": self.comparison.weights,
            "config": hide_paths(column.config.model_dump(mode="json")),
            "capi": versions()["capi"],
            "numerics": NUMERICS,
            **self.encoders[model],
            **self.data[column.name],
        }


def reason_of(error: BaseException) -> str:
    """Why a cell failed, in one line."""
    said = " ".join(str(error).split())
    if is_out_of_memory(error):
        return "the memory ran out: use a smaller model, image_size or encode_batch"
    if not isinstance(error, CapiError):
        said = f"{type(error).__name__}: {said}"
    return said if len(said) <= _LONG_REASON else said[: _LONG_REASON - 1] + "…"


def identify_encoder(model: str, weights: WeightsName) -> dict[str, Any]:
    """What tells an encoder from a changed one of the same name."""
    encoder = open_encoder(model, weights=weights)
    return {
        "encoder": encoder_facts(encoder),
        "image_size": image_size_of(encoder),
        "source": _source_digest(model),
    }


def _source_digest(model: str) -> str | None:
    """The file of an encoder that is the user's own Python, whose features change with it; None for all others."""
    place, _, _ = model.rpartition(":")
    file = place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None)
    if Path(model).exists() or file is None:
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def identify_data(data: EvaluationData) -> dict[str, Any]:
    """The names, labels, sizes and dates of all files: reading the images themselves would take too long."""
    digest = hashlib.sha256()
    if isinstance(data, SegmentationData):
        digest.update(repr((sorted(data.classes.items()), sorted(data.ignored))).encode())
        sources = [source for part in (data.train, data.test) for source in (part.images, part.masks)]
    else:
        digest.update(repr(data.classes).encode())
        digest.update(data.train.labels.numpy().tobytes())
        for test in data.tests.values():
            digest.update(test.answers.numpy().tobytes())
            of_class = None if test.answer_of_class is None else test.answer_of_class.tolist()
            digest.update(repr((of_class, test.restricted)).encode())
        sources = [data.train.images, *(test.images for test in data.tests.values())]
    for source in sources:
        _add_dates(digest, source)
    return {"data": fingerprints(data), "files": digest.hexdigest()[:16]}


def _add_dates(digest: Any, source: object) -> None:
    """Masks are wrapped files, parts wrap a whole; what lies in memory is known by its fingerprint already."""
    if isinstance(source, PartOfImages | PartOfMasks):
        source = source.source if isinstance(source, PartOfImages) else source.masks
    files = getattr(source, "files", source)
    if not isinstance(files, Files):
        return
    # Masks may lie elsewhere than their names say.
    place = getattr(source, "path", lambda number: files.root / files.name(number))
    for number in range(len(files)):
        status = os.stat(place(number))
        digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())


def resolve_columns(benchmarks: Sequence[Benchmark], overrides: Overrides = ()) -> tuple[BenchmarkColumn, ...]:
    """Benchmarks with overrides and names of their own; whatever is wrong with them is an error now."""
    overrides = override_texts(overrides)
    overridden({}, overrides, example=EXAMPLE)
    columns = _named(benchmarks)
    if not columns:
        raise CapiError("there is no benchmark to compare on: give at least one")
    keys = {override: override.partition("=")[0].split(".")[0] for override in overrides}
    for key in keys.values():
        _refuse_unknown(key, columns)
    changed = []
    for column in columns:
        own = [override for override, key in keys.items() if _knows(column.config, key)]
        tree = overridden(column.config.model_dump(mode="json"), own)
        changed.append(BenchmarkColumn(column.name, validated(type(column.config), tree, column.name)))
    return tuple(changed)


def _named(benchmarks: Sequence[Benchmark]) -> list[BenchmarkColumn]:
    """Benchmarks under names that tell them apart; one that is given twice counts once."""
    given: list[str | BenchmarkColumn] = []
    for item in benchmarks:
        benchmark = item if isinstance(item, BenchmarkColumn) else str(item)
        if benchmark not in given:
            given.append(benchmark)
    configs = [item.config if isinstance(item, BenchmarkColumn) else load_benchmark(item) for item in given]
    for config in configs:
        check_task(config.dataset, config.task)
    names = _distinct_names([item.name if isinstance(item, BenchmarkColumn) else item for item in given])
    return [BenchmarkColumn(name, config) for name, config in zip(names, configs, strict=True)]


def _distinct_names(full: Sequence[str]) -> list[str]:
    """A file goes by its stem, unless another has the same; what is then still equal is numbered."""
    short = [Path(name).stem if name.endswith(FILE_ENDINGS) else name for name in full]
    counts = Counter(short)
    names: list[str] = []
    for stem, whole in zip(short, full, strict=True):
        base = stem if counts[stem] == 1 else hide_path(whole)
        tries = (base if number == 1 else f"{base} ({number})" for number in itertools.count(1))
        names.append(next(name for name in tries if name not in names))
    return names


def _knows(config: BenchmarkConfig, key: str) -> bool:
    """Whether a key means something to a benchmark: to its protocol and, where it is about files, to its data set."""
    if key not in type(config).model_fields:
        return False
    if key == "data":
        return dataset_named(config.dataset).needs_folder
    return key not in _DATA_OPTIONS or key in dataset_named(config.dataset).reads


def _refuse_unknown(key: str, columns: Sequence[BenchmarkColumn]) -> None:
    keys = {name for column in columns for name in type(column.config).model_fields} - {*_NAMED_BY_THE_BENCHMARK}
    if key in _NAMED_BY_THE_BENCHMARK:
        raise CapiError(f"{key}= cannot be given to a comparison: the name of a benchmark is DATASET/PROTOCOL")
    names = ", ".join(column.name for column in columns)
    if owners := protocols_with(key, but=[column.config.protocol for column in columns]):
        raise CapiError(f"{key} is an option of {owners}, but the benchmarks are {names}: leave it out")
    if key not in keys:
        raise CapiError(f'there is no key "{key}" in any of {names}{nearest(key, sorted(keys))}')
    if not any(_knows(column.config, key) for column in columns):
        names = ", ".join(dict.fromkeys(column.config.dataset for column in columns))
        raise CapiError(f"{key}= means nothing to the data sets of this comparison ({names}): leave it out")
