"""A table of a study on disk: .json for programs, .md and .html for people."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from capi.evals.results import table as markdown_table
from capi.report.ablation.html import as_html
from capi.report.ablation.outcomes import (
    RowOutcome,
    TableOutcome,
    columns_side_by_side,
    orderings,
    paper_score,
    percent_points,
    row_seconds,
    score_text,
)
from capi.runtime.atomic import atomic_write
from capi.zoo.run_folder import versions

FORMAT_VERSION = 1


def write_table(table: TableOutcome, out: Path) -> Path:
    """Each file is the old one or the new one, never a part; says where the page is."""
    page = out / f"{table.name}.html"
    atomic_write(out / f"{table.name}.json", json.dumps(as_plain(table), indent=1) + "\n")
    atomic_write(out / f"{table.name}.md", as_markdown(table))
    atomic_write(page, as_html(table))
    return page


def as_plain(table: TableOutcome) -> dict[str, Any]:
    """Everything but the pictures, as plain values."""
    return {
        "version": FORMAT_VERSION,
        "table": table.name,
        "label": table.paper.label,
        "paper_columns": table.paper.columns,
        "columns": list(table.columns),
        "finished": table.finished,
        "equal_seconds": table.shortest,
        "rows": [_row_as_plain(row, table) for row in table.everything],
        "facts": dict(table.facts),
        "benchmarks": dict(table.settings),
        "versions": versions(),
    }


def _row_as_plain(row: RowOutcome, table: TableOutcome) -> dict[str, Any]:
    return {
        "name": row.name,
        "paper": None if row.paper is None else row.paper.scores,
        "parameters": None if row.cost is None else row.cost.trained_parameters,
        "encoder_parameters": None if row.cost is None else row.cost.encoder_parameters,
        "flop_an_image": None if row.cost is None else row.cost.flop_an_image,
        "images_seen": None if row.cost is None else row.cost.images_seen,
        "scores": {column: _plain_spread(row.score(column)) for column in table.columns},
        "runs": [
            {
                "name": run.name,
                "scores": dict(run.scores),
                "training_seconds": run.seconds,
                "steps": run.steps,
                "health": run.health,
                "alarms": list(run.alarms),
                "failure": run.failure or None,
                "curves": {name: [asdict(point) for point in points] for name, points in run.curves.items()},
            }
            for run in row.runs
        ],
    }


def _plain_spread(spread: Any) -> dict[str, Any] | None:
    return None if spread is None else asdict(spread)


def as_markdown(table: TableOutcome) -> str:
    """The numbers, and what became of the paper's orderings."""
    parts = [f"# {table.paper.title}", f"{table.paper.number} of the paper, in miniature."]
    if not table.finished:
        parts.append("Not all of it has been run yet.")
    parts.append(markdown_table(_head(table), [_line(row, table) for row in table.everything]))
    parts.append("\n".join(_ordering_lines(table)))
    parts.append("\n".join(f"- {name}: {value}" for name, value in table.facts.items()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(table: TableOutcome) -> list[str]:
    ours = [f"{column} ({table.measures[column]})" if column in table.measures else column for column in table.columns]
    return ["row", *(f"paper: {column}" for column in table.paper.columns), *ours, "seconds", "parameters"]


def _line(row: RowOutcome, table: TableOutcome) -> list[str]:
    paper = [paper_score(row, number) for number in range(len(table.paper.columns))]
    ours = [score_text(row.score(column)) for column in table.columns]
    parameters = "-" if row.cost is None else f"{row.cost.trained_parameters / 1e6:.2f} M"
    return [row.name, *paper, *ours, row_seconds(row), parameters]


def _ordering_lines(table: TableOutcome) -> Iterator[str]:
    for number, column in columns_side_by_side(table):
        for one in orderings(table, number, column):
            yield (
                f"- {column}: {one.better} over {one.worse}: {percent_points(one.paper)} in the paper, "
                f"{percent_points(one.here)} here"
                + (f" (standard error {one.uncertainty:.1f})" if one.uncertainty is not None else "")
                + f": {one.verdict}"
            )
