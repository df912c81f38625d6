"""A comparison on disk: comparison.json and .csv for programs, .md and .html for people.

All four are written again after every cell, so that a look during the comparison shows what is there.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from capi.evals.comparison_cells import (
    NOT_IN_TABLE,
    BenchmarkColumn,
    Cell,
    Comparison,
    Remark,
    TableView,
    ViewRow,
    missing_cells,
    ours,
    shareable,
    short_names,
    why_not,
)
from capi.evals.comparison_cells import as_markdown as table_markdown
from capi.evals.comparison_cells import as_plain as plain_table
from capi.evals.results import percent, table
from capi.report.pages.page import render
from capi.runtime.atomic import atomic_write
from capi.runtime.privacy import hide_paths
from capi.zoo.run_folder import versions

NAME = "comparison"
FORMAT_VERSION = 1
CSV_HEAD = ("model", "benchmark", "score", "value", "seconds", "chosen", "status", "reason", "licence", "image_size")


def write_pages(comparison: Comparison) -> None:
    """Each file is the old one or the new one, never a part."""
    comparison = shareable(comparison)
    pages = {"json": as_json(comparison), "csv": as_csv(comparison), "md": as_markdown(comparison)}
    for ending, text in (pages | {"html": as_html(comparison, facts(comparison))}).items():
        atomic_write(comparison.out / f"{NAME}.{ending}", text)


def as_json(comparison: Comparison) -> str:
    """Everything but the grids, which lie in the folders of the cells."""
    tree = {
        "version": FORMAT_VERSION,
        "models": list(comparison.models),
        "benchmarks": {column.name: hide_paths(column.config.model_dump(mode="json")) for column in comparison.columns},
        "weights": comparison.weights,
        "never_kept": comparison.unrecognized,
        "licences": {model: comparison.licence(model) for model in comparison.models},
        "table": None if comparison.table is None else plain_table(comparison.table, comparison.cells),
        "cells": [
            {
                "model": cell.model,
                "benchmark": cell.benchmark,
                "status": cell.status,
                "folder": cell.folder,
                "kept": cell.reused,
                "reason": cell.reason or None,
                "results": {name: value for name, value in (cell.record or {}).items() if name != "grid"} or None,
            }
            for cell in comparison.in_order
        ],
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def as_csv(comparison: Comparison) -> str:
    """A row for each score of each cell; a cell without a score has a row that says why."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for cell in comparison.in_order:
        writer.writerows(_csv_rows(cell))
    return text.getvalue()


def _csv_rows(cell: Cell) -> Iterator[tuple[object, ...]]:
    if cell.record is None:
        yield cell.model, cell.benchmark, None, None, None, None, cell.status, cell.reason, None, None
        return
    chosen = json.dumps(cell.record["chosen"], ensure_ascii=False)
    size = "x".join(map(str, cell.record["image_size"]))
    end = (cell.record["seconds"], chosen, cell.status, cell.reason, cell.record.get("licence"), size)
    for name, value in cell.record["scores"].items():
        yield cell.model, cell.benchmark, name, value, *end


def facts(comparison: Comparison) -> dict[str, str]:
    """When, where and with what the cells were computed; a comparison may be put together over time."""
    records = [cell.record for cell in comparison.done if cell.record is not None]
    dates = sorted(record["date"] for record in records)
    reused = sum(cell.reused for cell in comparison.done)
    skipped = sum(cell.status == "skipped" and cell.reason != NOT_IN_TABLE for cell in comparison.in_order)
    facts = {
        "cells": f"{len(records)} done ({reused} of them kept from before), {len(comparison.failed)} failed, "
        f"{len(comparison.unfinished)} pending" + (f", {skipped} skipped" if skipped else ""),
        "seconds": f"{sum(record['seconds'] for record in records):.1f}",
        "evaluated": " to ".join(dict.fromkeys((*dates[:1], *dates[-1:]))),
        "weights of runs": comparison.weights,
        "device": _listed(record["device"] for record in records),
        "capi": _listed(record["versions"]["capi"] for record in records),
        "torch": _listed(record["versions"]["torch"] for record in records),
        "python": _listed(record["versions"]["python"] for record in records),
        "page written": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in facts.items() if value}


def _listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def as_markdown(comparison: Comparison) -> str:
    """The table first, then what must be known to read it."""
    names = {model: plain_text(name) for model, name in short_names(comparison.models).items()}
    parts = ["# Comparison"]
    if comparison.unfinished:
        parts.append(f"{len(comparison.unfinished)} of {len(comparison.cells)} cells are still to come.")
    if comparison.table is not None:
        parts += [*table_markdown(comparison.table, comparison.cells), "## All cells"]
    parts.append(_table_of_scores(comparison, names))
    footnotes = []
    for number, cells in enumerate(comparison.failures, 1):
        where = plain_text(", ".join(cell.benchmark for cell in cells))
        footnotes.append(f"[^{number}]: {plain_text(cells[0].model)} on {where}: {plain_text(cells[0].reason)}")
    parts.append("\n".join(footnotes))
    for kind, title in comparison.remark_titles.items():
        parts += _remarks(comparison, kind, title, names)
    parts += ["## Seconds", _table_of_seconds(comparison, names)]
    parts += ["## Models", "\n".join(_model_lines(comparison, names))]
    parts += ["## Facts", table(("what", "value"), list(facts(comparison).items()))]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain_text(text: str) -> str:
    """Text that Markdown shows as it is, and in which no HTML is run."""
    escaped = re.sub(r"([\\`*\[\]])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _table_of_scores(comparison: Comparison, names: dict[str, str]) -> str:
    numbers = {
        (cell.model, cell.benchmark): number for number, cells in enumerate(comparison.failures, 1) for cell in cells
    }
    best = {column.name: comparison.best(column.name) for column in comparison.columns}

    def shown(cell: Cell) -> str:
        if cell.status == "failed":
            return f"failed[^{numbers[cell.model, cell.benchmark]}]"
        if cell.status != "done":
            return cell.status
        return f"**{percent(cell.value)}**" if cell.model in best[cell.benchmark] else percent(cell.value)

    rows = [
        [
            names[model],
            comparison.image_size(model),
            *(shown(comparison.cells[model, column.name]) for column in comparison.columns),
        ]
        for model in comparison.models
    ]
    head = ["model", "image size"]
    for column in comparison.columns:
        score = plain_text(comparison.score_name(column.name))
        head.append(f"{plain_text(column.name)} ({score})" if score else plain_text(column.name))
    return table(head, rows)


def _remarks(comparison: Comparison, kind: Remark, title: str, names: dict[str, str]) -> list[str]:
    parts = []
    for column in comparison.columns:
        if remarks := comparison.remarks(column.name, kind):
            parts.append(f"### {plain_text(column.name)}")
            lines = []
            for text, about in remarks.items():
                models = ", ".join(names[model] for model in about)
                lines.append(f"- {plain_text(text)}" + (f" ({models})" if models else ""))
            parts.append("\n".join(lines))
    return [f"## {title}", *parts] if parts else []


def _table_of_seconds(comparison: Comparison, names: dict[str, str]) -> str:
    def shown(cell: Cell) -> str:
        return "-" if cell.record is None else f"{cell.record['seconds']:.1f}" + (" (kept)" if cell.reused else "")

    head = ["model", *(plain_text(column.name) for column in comparison.columns)]
    cells = comparison.cells
    rows = [
        [names[model], *(shown(cells[model, column.name]) for column in comparison.columns)]
        for model in comparison.models
    ]
    return table(head, rows)


def _model_lines(comparison: Comparison, names: dict[str, str]) -> Iterator[str]:
    for model in comparison.models:
        whole = plain_text(model)
        line = f"- {names[model]}" + (f": {whole}" if whole != names[model] else "")
        line += "".join(f"; {note}" for note in comparison.model_notes(model))
        yield line


# Where the bars of a benchmark may end.
_SCALES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
_IOU = "IoU by class"


def as_html(comparison: Comparison, facts: Mapping[str, str]) -> str:
    """One file for screens of any width, light and dark."""
    view, cells = comparison.table, comparison.cells
    titled = {title: kind for kind, title in comparison.remark_titles.items()}
    remarks: list[tuple[str, dict[str, Any]]] = []
    for title, kind in titled.items():
        by_column = {column.name: comparison.remarks(column.name, kind) for column in comparison.columns}
        remarks.append((title, {name: remark for name, remark in by_column.items() if remark}))
    return render(
        "comparison.html",
        "Models compared",
        comparison=comparison,
        facts=facts,
        names=short_names(comparison.models),
        view=view,
        table_rows=[] if view is None else [_table_row(row, view, cells) for row in view.rows],
        missing={} if view is None else missing_cells(view, cells),
        bars=[_bars(comparison, column) for column in comparison.columns],
        remarks=[(title, by_column) for title, by_column in remarks if by_column],
        details=[*_score_details(comparison), *_class_details(comparison)],
        model_facts={model: _model_facts(comparison, model) for model in comparison.models},
    )


def scale_of(values: Iterable[float]) -> float:
    """Where the bars of a benchmark end: the first round number that is not below the longest."""
    longest = max(values, default=1.0)
    return next((scale for scale in _SCALES if scale >= longest), 1.0)


def _bars(comparison: Comparison, column: BenchmarkColumn) -> dict[str, Any]:
    cells = [comparison.cells[model, column.name] for model in comparison.models]
    return {
        "name": column.name,
        "score": comparison.score_name(column.name),
        "cells": cells,
        "best": comparison.best(column.name),
        "scale": scale_of(cell.value for cell in cells if cell.value is not None),
    }


def _table_row(row: ViewRow, view: TableView, cells: Mapping[tuple[str, str], Cell]) -> dict[str, Any]:
    scores = [
        (ours(row, entry, cells), entry.printed if view.paper else None, why_not(row, entry, cells))
        for entry in row.entries
    ]
    return {"cells": row.cells, "scores": scores}


Details = tuple[str, list[str], list[list[str]]]


def _score_details(comparison: Comparison) -> Iterator[Details]:
    names = short_names(comparison.models)
    for column in comparison.columns:
        if finished := comparison.finished(column.name):
            scores = list(dict.fromkeys(name for record in finished.values() for name in record["scores"]))
            rows = []
            for model, record in finished.items():
                chosen = []
                for name, value in record["chosen"].items():
                    short = float(f"{value:.4g}") if isinstance(value, float) else value
                    chosen.append(f"{name} {short if isinstance(short, str) else json.dumps(short)}")
                values = (percent(record["scores"].get(name)) for name in scores)
                rows.append([names[model], *values, ", ".join(chosen)])
            title = f"All scores of {column.name}, and the settings chosen"
            yield title, ["model", *scores, "chosen settings"], rows


def _class_details(comparison: Comparison) -> Iterator[Details]:
    names = short_names(comparison.models)
    for column in comparison.columns:
        by_model = {
            model: record["details"][_IOU]
            for model, record in comparison.finished(column.name).items()
            if record["details"].get(_IOU)
        }
        if by_model:
            classes = dict.fromkeys(name for values in by_model.values() for name in values)
            rows = [[name, *(percent(values.get(name)) for values in by_model.values())] for name in classes]
            yield f"IoU by class of {column.name}", ["class", *(names[model] for model in by_model)], rows


def _model_facts(comparison: Comparison, model: str) -> list[str]:
    records = [cell.record for cell in comparison.done if cell.model == model and cell.record is not None]
    encoder = [record["encoder"] for record in records[:1]]
    facts = [f"width {each['width']}, patches of {each['patch_size']} px" for each in encoder]
    return [*facts, *comparison.model_notes(model)]
