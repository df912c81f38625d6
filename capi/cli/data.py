"""Commands about images: pack them into shards, look through them.

The commands that tell of data sets: datasets, datasets show.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from capi import api
from capi.cli.app import app, echo, messages
from capi.cli.terminal import Terminal
from capi.cli.usage import Commands, between, refuse_idle
from capi.errors import INTERRUPTED, CapiError

if TYPE_CHECKING:
    from capi.api import Survey

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
    out: Annotated[Path, typer.Option(help="Folder of the shards; one that was begun is resumed.")],
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
        echo(f"Stopped. {out} has {complete} complete shard{'' if complete == 1 else 's'}; the same command goes on.")
        raise typer.Exit(INTERRUPTED) from None
    reused = f", shards that were there already: {packed.reused}" if packed.reused else ""
    number = f"{packed.shards} shard{'s' if packed.shards > 1 else ''}"
    echo(f"{packed.path} has {packed.images} images in {number}{reused}, {packed.bytes / 1e6:.1f} MB.")
    if packed.left_out:
        name, reason = next(iter(packed.left_out.items()))
        echo(f"{len(packed.left_out)} files are no images that can be read and were left out, such as {name}: {reason}")
    echo(f"Train on them with --data '{packed.pattern}'")


@data_app.command("check")
def check(
    source: Sources,
    limit: Annotated[
        int | None, typer.Option(callback=between(1, 10**12), help="Look at so many only, spread evenly.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all that was found to this file.")] = None,
    channels: Annotated[int, typer.Option(callback=between(1, 1024), help="Channels of an image.")] = 3,
    workers: SurveyWorkers = None,
) -> None:
    """Read all images once: counts, sizes, channel statistics, broken images, copies, images per second."""
    if json_file is not None and json_file.is_dir():
        raise CapiError(f"{json_file} is a folder: --json takes a file")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise CapiError(f"{json_file} cannot be written: there is no folder {json_file.absolute().parent}")
    try:
        survey = api.check_data(source, limit=limit, channels=channels, workers=workers, console=messages())
    except KeyboardInterrupt:
        echo("Stopped, and nothing was written. --limit N looks at N images, spread evenly.")
        raise typer.Exit(INTERRUPTED) from None
    if json_file is not None:
        api.atomic_write(json_file, json.dumps(survey.as_record(), indent=1) + "\n")
    for name, value in _rows(survey).items():
        echo(f"{name:<12}{value}")


def _rows(survey: "Survey") -> dict[str, str]:
    some = "" if survey.looked_at == survey.total else f", of which {survey.looked_at} were looked at"
    rows = {
        "images": f"{survey.total}{some}; {survey.readable} can be read, {len(survey.broken)} cannot",
        "broken": f"{len(survey.broken)}{_examples([f'{name} ({why})' for name, why in survey.broken.items()])}",
    }
    if survey.animated:
        rows["frames"] = f"{survey.animated} with several frames, of which the first is read"
    if survey.readable:
        rows |= {
            "formats": ", ".join(f"{kind} {count}" for kind, count in survey.formats.items()),
            "bytes": f"{survey.bytes / 1e6:.1f} MB, {survey.bytes / survey.readable / 1e3:.1f} kB an image",
            "widths": _percentiles(survey.widths),
            "heights": _percentiles(survey.heights),
            "channels": f"{len(survey.mean)}, {_numbers(survey.lowest)} to {_numbers(survey.highest)} of full scale",
            "mean, std": f"data.mean=[{_numbers(survey.mean)}] data.std=[{_numbers(survey.std)}]",
            **_range(survey),
            "copies": f"{survey.copies} with the same bytes as another{_pairs(survey.copied, ' = ')}",
            "look alike": f"{survey.alike} more{_pairs(survey.looking_alike, ' ~ ')}",
        }
    return rows | {
        "speed": f"{survey.images_per_second:.0f} images/s with {survey.workers} processes ({survey.seconds:.1f} s)"
    }


def _range(survey: "Survey") -> dict[str, str]:
    """A warning where the images are far from the statistics of the recipes, which are those of ImageNet."""
    from capi.types import IMAGENET, Statistics

    if len(survey.mean) != len(IMAGENET.mean):
        return {}
    warning = api.statistics_warning(Statistics(tuple(survey.mean), tuple(survey.std)), IMAGENET)
    return {"range": f"{warning} (the defaults are ImageNet's)"} if warning else {}


def _examples(names: list[str]) -> str:
    return f": {'; '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else ""


def _pairs(groups: list[list[str]], joint: str) -> str:
    return _examples([joint.join(group[:2]) for group in groups])


def _percentiles(values: dict[str, float]) -> str:
    smallest, low, median, high, largest = (round(values[share]) for share in ("0", "5", "50", "95", "100"))
    return f"{smallest} to {largest} pixels, median {median}, 90 % within {low} to {high}"


def _numbers(values: list[float]) -> str:
    return api.significant(values)


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
    beside = " beside data=PATH" if api.dataset_named(name).needs_folder else ""
    echo(f"Options{beside}: {', '.join(heeded)}")
