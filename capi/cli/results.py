"""What evaluations and comparisons print at their end."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from capi import api
from capi.cli.terminal import Terminal

if TYPE_CHECKING:
    from capi.api import Comparison


def print_record(record: Mapping[str, Any]) -> None:
    """Scores, and what departs from the paper."""
    console = Terminal(soft_wrap=True)
    console.print(f"{record['benchmark']}: {record['model']}")
    table = Table("score", box=None, pad_edge=False)
    table.add_column("value", justify="right")
    for name, value in record["scores"].items():
        table.add_row(name, api.percent(value))
    console.print(table)
    chosen = ", ".join(f"{name} {_short(value)}" for name, value in record["chosen"].items() if name != "validation")
    ran = f"images of {api.shown_size(record)}, {record['seconds']:.0f} s on {record['device']}"
    console.print(f"chosen: {chosen}; {ran}")
    for title, lines in (("departs from the paper", record["deviations"]), ("warning", record["warnings"])):
        for line in lines:
            console.print(f"{title}: {line}")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_comparison(done: "Comparison") -> None:
    """The table, and what every cell has to say."""
    console = Terminal()
    if done.table is not None:
        _print_table(done, console)
    else:
        table = Table("model", "image size", *(column.name for column in done.columns), box=None, pad_edge=False)
        for model in done.models:
            cells = [done.cells[model, column.name] for column in done.columns]
            table.add_row(model, done.image_size(model), *(_cell(cell.record) for cell in cells))
        console.print(table)
    for cell in done.failed:
        console.print(f"failed: {cell.model} on {cell.benchmark}: {cell.reason}", soft_wrap=True)


def _print_table(done: "Comparison", console: Console) -> None:
    """A table of the paper: ours, the paper's number in brackets, and what is missing."""
    view = done.table
    assert view is not None
    table = Table(*view.heads, title=f"{view.title} ({view.label})", box=None, pad_edge=False)
    for group, name in view.columns:
        table.add_column(f"{group} {name}".strip(), justify="right")
    for row in view.rows:
        numbers = (api.shown_score(row, entry, done.cells, view.paper) for entry in row.entries)
        table.add_row(*row.cells, *numbers)
    # A narrow terminal breaks lines; numbers that were cut off would be lost.
    wanted = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.print(table, width=max(console.width, wanted), crop=False, soft_wrap=True)
    for reason, about in api.missing_cells(view, done.cells).items():
        cells = "1 cell" if len(about) == 1 else f"{len(about)} cells"
        console.print(f"missing in {cells}: {reason}", soft_wrap=True)


def _cell(record: Mapping[str, Any] | None) -> str:
    return "failed" if record is None else api.percent(next(iter(record["scores"].values())))
