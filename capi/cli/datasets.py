"""The commands that tell of data sets: datasets, datasets show."""

from typing import Annotated

import typer
from rich.table import Table

from capi import api
from capi.cli.app import app, echo
from capi.cli.terminal import Terminal
from capi.cli.usage import Commands

datasets_app = typer.Typer(
    cls=Commands, help="List the data sets of evaluations, or show how the files of one must lie."
)
app.add_typer(datasets_app, name="datasets")


@datasets_app.callback(invoke_without_command=True)
def datasets(context: typer.Context) -> None:
    """List the data sets that evaluations know."""
    if context.invoked_subcommand is not None:
        return
    table = Table("data set", "what it is", "for", box=None, pad_edge=False)
    for dataset in api.DATASETS.values():
        tasks = (("classification", dataset.classification), ("segmentation", dataset.segmentation))
        table.add_row(dataset.name, dataset.title, ", ".join(name for name, reader in tasks if reader is not None))
    Terminal().print(table)


@datasets_app.command("show")
def show(name: Annotated[str, typer.Argument(help="A data set's name.")]) -> None:
    """Show how the files of a data set must lie, where it comes from, and what can be said about it."""
    dataset = api.dataset_named(name)
    echo(f"{dataset.name}: {dataset.title}\n\n{dataset.layout.strip()}\n")
    heeded = sorted({*dataset.heeds, "verify_counts"})
    beside = "" if name in api.WITHOUT_FOLDER else " beside data=PATH"
    echo(f"Options{beside}: {', '.join(heeded)}")
