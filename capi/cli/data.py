"""Commands about images: pack them into shards, look through them.

The commands that tell of data sets: datasets, datasets show.
"""

import json
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer
from rich.table import Table

from capi import api
from capi.cli.app import app, echo, messages
from capi.cli.terminal import Terminal, wrapped
from capi.cli.usage import Commands, between, refuse_idle
from capi.errors import INTERRUPTED, CapiError, counted

data_app = typer.Typer(cls=Commands, help="Look through images before a run.", no_args_is_help=True)
app.add_typer(data_app, name="data")
Sources = Annotated[list[str], typer.Argument(help="Anything that --data takes: a folder, shards, tables, hf://name.")]
SurveyWorkers = Annotated[
    int | None,
    typer.Option(callback=between(1, 1024), help="How many work at once; by default as many as there are cores."),
]
PackingWorkers = Annotated[
    int | None,
    typer.Option(
        callback=between(1, 1024), help="How many work at once; by default as many as there are cores, at most 8."
    ),
]


@app.command()
def shards(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="Folder of images, or anything else that --data takes.")],
    out: Annotated[Path, typer.Option(help="Folder of the shards; one that is incomplete is resumed.")],
    shard_size: Annotated[
        float | None, typer.Option(callback=between(0, 1e6), help="Megabytes of a shard, about; by default 256.")
    ] = None,
    per_shard: Annotated[
        int | None, typer.Option(callback=between(0, 10**9), help="Images of a shard, in place of its size.")
    ] = None,
    shuffle: Annotated[int, typer.Option(callback=between(0, 2**63 - 1), help="Seed of the order in the shards.")] = 0,
    keep_order: Annotated[bool, typer.Option("--keep-order", help="Pack as they lie, not shuffled.")] = False,
    workers: PackingWorkers = None,
) -> None:
    """Pack images into tar shards with an index: few large files in place of many small ones."""
    if keep_order:
        refuse_idle(context, ("shuffle",), "is the seed of a shuffle, and --keep-order asks for none: leave one out")
    try:
        packed = api.pack_shards(
            source,
            out,
            shard_megabytes=shard_size,
            per_shard=per_shard,
            shuffle=None if keep_order else shuffle,
            workers=workers,
            console=messages(),
        )
    except KeyboardInterrupt:
        complete = len(list(out.glob("*.tar")))
        shards = f"{out} has {counted(complete, 'complete shard')}; the same command continues."
        echo(
            f"Stopped. {shards}" if complete else "Stopped before a shard was complete; the same command starts again."
        )
        raise typer.Exit(INTERRUPTED) from None
    reused = f", shards that were there already: {packed.reused}" if packed.reused else ""
    echo(
        f"{packed.path} has {counted(packed.images, 'image')} in {counted(packed.shards, 'shard')}{reused}, "
        f"{packed.bytes / 1e6:.1f} MB."
    )
    if packed.left_out:
        name, reason = next(iter(packed.left_out.items()))
        left_out = len(packed.left_out)
        echo(
            f"1 file is no image that can be read and was left out, {name}: {reason}"
            if left_out == 1
            else f"{left_out} files are no images that can be read and were left out, such as {name}: {reason}"
        )
    echo(f"Train on them with --data '{packed.pattern}'")


@data_app.command("check")
def check(
    source: Sources,
    limit: Annotated[
        int | None, typer.Option(callback=between(1, 10**12), help="Look at so many only, spread evenly.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all that was found to this file.")] = None,
    channels: Annotated[
        int | None, typer.Option(callback=between(1, 1024), help="Channels of an image; by default what they have.")
    ] = None,
    workers: SurveyWorkers = None,
) -> None:
    """Read all images once: counts, sizes, channel statistics, broken images, copies, images per second."""
    if json_file is not None and json_file.is_dir():
        raise CapiError(f"{json_file} is a folder: --json takes a file")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise CapiError(f"{json_file} cannot be written: there is no folder {json_file.absolute().parent}")
    try:
        survey = api.check_data(source, limit=limit, channels=channels, workers=workers, console=messages())
    except KeyboardInterrupt as stopped:
        # Not by its class: while what is needed is imported, another import would fail.
        so_far: api.Survey | None = getattr(stopped, "survey", None)
        if so_far is None or not so_far.looked_at:
            echo("Stopped before an image was looked at.")
        else:
            looked_at = f"{so_far.looked_at:,} of {counted(so_far.total, 'image')}"
            echo(f"Stopped after {looked_at}. --limit N looks at N, spread evenly.")
            _print_survey(so_far)
        raise typer.Exit(INTERRUPTED) from None
    if json_file is not None:
        api.atomic_write(json_file, json.dumps(survey.as_record(), indent=1) + "\n")
    _print_survey(survey)


def _print_survey(survey: "api.Survey") -> None:
    for name, value in survey.summary()[1].items():
        echo(
            fill(
                value,
                Terminal().width,
                initial_indent=f"{name:<12}",
                subsequent_indent=" " * 12,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


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
    width = min(Terminal().width, 120)
    echo(f"{dataset.name}: {dataset.title}\n\n{wrapped(dataset.layout.strip(), width)}\n")
    listed = sorted({*dataset.reads, "verify_counts"})
    beside = " beside data=PATH" if api.dataset_named(name).needs_folder else ""
    echo(wrapped(f"Options{beside}: {', '.join(listed)}", width))
