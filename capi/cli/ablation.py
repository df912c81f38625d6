"""The command that runs one of the paper's ablations again."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from capi import api
from capi.cli.app import Device, Overrides, app, echo, messages
from capi.cli.terminal import Terminal
from capi.cli.usage import others_than, refuse_idle
from capi.config.ablations import ablations
from capi.config.paper import paper_table
from capi.errors import INTERRUPTED, CapiError


@app.command()
def ablate(
    context: typer.Context,
    table: Annotated[str | None, typer.Argument(help="A table, such as predictor; --list names them.")] = None,
    overrides: Overrides = None,
    data: Annotated[str | None, typer.Option(help="Images with labels: a folder, a CSV, or demo.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; tables may share it.")] = None,
    scale: Annotated[str, typer.Option(help="mini (minutes a run) or smoke (seconds).")] = "mini",
    seeds: Annotated[int, typer.Option(help="Runs of each row.", min=1, max=1000)] = 1,
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the benchmarks, such as label=breed; may be repeated.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs that go on at once.", min=1, max=1024)] = 1,
    photos: Annotated[bool, typer.Option(help="Whether the page shows some of the images.")] = True,
    device: Device = None,
    listing: Annotated[bool, typer.Option("--list", help="Name the tables and their rows.")] = False,
) -> None:
    """Run the rows of one of the paper's tables in miniature, and put them beside the paper's numbers on a page.

    Each row trains on the same images for the same number of steps, with each seed. Interrupted, the same command goes
    on. KEY=VALUE changes the recipe of all rows, such as optimization.steps=2000.
    """
    if listing:
        refuse_idle(
            context, others_than(context, "listing"), "is of no use to --list, which runs nothing: leave it out"
        )
        Terminal().print(_tables())
        return
    if table is None or data is None or out is None:
        raise CapiError("ablate needs a table, --data with images and labels, and --out, a folder (or --list)")
    page = api.ablate(
        table,
        overrides or [],
        data=data,
        out=out,
        scale=scale,
        seeds=seeds,
        options=option or [],
        device=device,
        jobs=jobs,
        photos=photos,
        console=messages(),
    )
    if page is None:
        echo("Stopped and saved. The same command goes on.")
        raise typer.Exit(INTERRUPTED)
    echo(f"wrote {page}: open it in a browser")


def _tables() -> Table:
    table = Table("table", "or", "what it compares", "rows", box=None, pad_edge=False)
    for name, ablation in ablations().items():
        rows = "; ".join(ablation.rows)
        table.add_row(name, "" if ablation.short == name else ablation.short, paper_table(name).title, rows)
    return table
