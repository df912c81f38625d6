"""Commands that use an encoder: evaluate, predict, compare, extract, nearest, visualize.

What evaluations and comparisons print at their end.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count as count_up
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from capi import api
from capi.cli.app import Device, TrustOption, app, check_weights, echo, fail_silently, is_first, messages, one_of
from capi.cli.terminal import Terminal, print_scores
from capi.cli.usage import between, refuse_idle
from capi.errors import INTERRUPTED, CapiError, counted

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
    chosen = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in record["chosen"].items()
        if name != "validation"
    )
    counts = record["details"]["test images"]
    tests = counts if isinstance(counts, Mapping) else {"test": counts}
    images = ", ".join(counted(count, f"{name} image") for name, count in tests.items())
    ran = f"{images} of {api.shown_size(record)}, {record['seconds']:.0f} s on {record['device']}"
    console.print(f"chosen: {chosen}; {ran}")
    # The paper says nothing of a user's own data.
    dataset = record["benchmark"].partition("/")[0]
    if record["deviations"] and not (dataset in api.DATASETS and api.DATASETS[dataset].own_split):
        console.print(f"departs from the paper: {'; '.join(record['deviations'])}")
    for line in record["warnings"]:
        console.print(f"warning: {line}")


def print_comparison(done: "Comparison") -> None:
    """The table, and what every cell has to say."""
    console = Terminal()
    if done.table is not None:
        _print_table(done, console)
    else:
        records = [[done.cells[model, column.name].record for column in done.columns] for model in done.models]
        print_scores(
            console,
            ("model", "image size"),
            [column.name for column in done.columns],
            [
                (
                    (model, done.image_size(model)),
                    ["failed" if each is None else api.percent(next(iter(each["scores"].values()))) for each in row],
                )
                for model, row in zip(done.models, records, strict=True)
            ],
        )
        for column in done.columns:
            if score := done.score_name(column.name):
                console.print(f"{column.name}: {score}")
    for cell in done.failed:
        console.print(f"failed: {cell.model} on {cell.benchmark}: {cell.reason}", soft_wrap=True)


def _print_table(done: "Comparison", console: Console) -> None:
    """A table of the paper: ours, the paper's number in brackets, and what is missing."""
    view = done.table
    assert view is not None
    console.print(f"{view.title} ({view.label})", soft_wrap=True)
    columns = [f"{group} {name}".strip() for group, name in view.columns]
    numbers = [[api.shown_score(row, entry, done.cells, view.paper) for entry in row.entries] for row in view.rows]
    print_scores(
        console,
        view.heads,
        columns,
        [(row.cells, row_numbers) for row, row_numbers in zip(view.rows, numbers, strict=True)],
    )
    for reason, about in api.missing_cells(view, done.cells).items():
        console.print(f"missing in {counted(len(about), 'cell')}: {reason}", soft_wrap=True)


MODEL_HELP = (
    "A run folder, an exported file, a released checkpoint, a folder of transformers, a published name (capi models), "
    "an id of the Hub, baseline:NAME (another method's), pixels:16 (raw patches), untrained:RECIPE, or FILE.py:NAME."
)
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
WeightsOption = Annotated[str, typer.Option(help="Of a run: teacher or student.")]
OWN_SIZE = "by default the size that a run was trained at, and 224 for a model that has none"
PICTURE_SIZE = "by default that of a run's training, enlarged to up to 24 patches a side; 224 for a model that has none"
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in --out.")]


@app.command()
def evaluate(
    context: typer.Context,
    model: Model,
    benchmark: Annotated[str, typer.Argument(help="DATASET/PROTOCOL, such as demo/knn, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the benchmark.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results, probe and pictures.")] = None,
    weights: WeightsOption = "teacher",
    overwrite: Overwrite = False,
    device: Device = None,
    trust: TrustOption = None,  # noqa: ARG001 - read by its callback
) -> None:
    """Score a frozen encoder by one of the paper's protocols, and keep the fitted probe.

    Protocols of classification are knn, linear and attentive; of segmentation, knn-segmentation and
    logistic-segmentation.

    `capi datasets` lists the data sets; all but demo need data=PATH.

    image_size= is by default the size that a run was trained at, and 224 for a model that has none.
    """
    check_weights(weights, [model])
    if out is None:
        refuse_idle(context, ("overwrite",), "replaces what is in --out: name the folder with --out")
    done = api.evaluate(
        model,
        benchmark,
        overrides or [],
        out=out,
        weights=weights,  # type: ignore[arg-type]
        device=device,
        overwrite=overwrite,
        console=messages(),
    )
    if not is_first():
        return
    print_record(done.record)
    if done.folder is not None:
        echo(f"{done.folder} has results.json and results.md.")
    if done.probe is not None:
        words = ["capi", "predict", model, str(done.probe), "IMAGES", "--out", "FOLDER"]
        words += ["--weights", weights] if weights != "teacher" else []
        echo(f"{done.probe} labels other images: {shlex.join(words)}")


@app.command()
def predict(
    model: Model,
    probe: Annotated[Path, typer.Argument(help="The probe.safetensors of an evaluation with the same model.")],
    images: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    out: Annotated[Path, typer.Option(help="Folder for labels.csv, or for masks and overlays.")],
    weights: WeightsOption = "teacher",
    overwrite: Overwrite = False,
    device: Device = None,
    trust: TrustOption = None,  # noqa: ARG001 - read by its callback
) -> None:
    """Label images with a fitted probe: classes with confidences, or a label for every pixel."""
    check_weights(weights, [model])
    done = api.predict(
        model,
        probe,
        images,
        out=out,
        weights=weights,  # type: ignore[arg-type]
        device=device,
        overwrite=overwrite,
        console=messages(),
    )
    echo(f"labeled {counted(done.images, 'image')}: {done.folder}")
    if done.failed:
        echo(f"{counted(len(done.failed), 'image')} could not be read: {done.folder / 'failed.csv'} says why")
    if not done.images:
        raise typer.Exit(1)


class _SeveralWords(TyperCommand):
    """Lets `--on` and `--models` take all words up to the next option or override."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        listing = ""
        for word in args:
            if word in ("--on", "--models"):
                listing = word
            elif word.startswith("--") or not _is_model(word):
                listing = ""
                spread.append(word)
            else:
                spread += [listing, word] if listing else [word]
        return super().parse_args(ctx, spread)


def _is_model(word: str) -> bool:
    """A model or a benchmark, and no override; the place of a baseline's weights comes after its name."""
    return "=" not in word or word.startswith("baseline:")


@app.command(cls=_SeveralWords)
def compare(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="MODEL|KEY=VALUE", help=MODEL_HELP)] = None,
    on: Annotated[
        list[str] | None, typer.Option(metavar="BENCHMARK...", help="DATASET/PROTOCOL, or YAML files.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables, the page and the cells.")] = None,
    table: Annotated[
        str | None,
        typer.Option(
            help='A table of the paper: main, dense, high-res, global, pooling, standardization; or "Table 3"; or a '
            "public board: imagenette, cifar10."
        ),
    ] = None,
    models: Annotated[
        list[str] | None, typer.Option(metavar="MODEL...", help="With --table: its rows to compute; others are added.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="With --table: the folder that holds the data sets.")] = None,
    paper: Annotated[bool, typer.Option(help="With --table: show the printed number beside ours.")] = True,
    weights: WeightsOption = "teacher",
    device: Device = None,
    trust: TrustOption = None,  # noqa: ARG001 - read by its callback
) -> None:
    """Compare models over benchmarks, or compute a table of the paper. Finished cells are kept.

    Overrides (key=value) go to every benchmark that knows the key. Each model sees images at its own size unless
    image_size= names one. With --table, the size is the paper's, and weights and data that are not on this
    machine are named in their cells, and the other cells are computed.
    """
    names = [word for word in words or [] if _is_model(word)] + list(models or [])
    overrides = [word for word in words or [] if not _is_model(word)]
    if out is None or (table is None and not (on and words)):
        raise CapiError("compare takes MODEL... --on BENCHMARK... --out FOLDER, or --table NAME --out FOLDER")
    if table is None and not names:
        raise CapiError("compare needs at least one model before --on")
    if table is not None and on:
        raise CapiError("--table has its own benchmarks: leave out --on")
    if table is None and (data_root is not None or models):
        raise CapiError("--data-root and --models belong to --table: give data=FOLDER, and models before --on")
    if table is None:
        refuse_idle(context, ("paper",), "belongs to --table, which has the paper's numbers: leave it out")
    check_weights(weights, names)
    done = _compared(names, on or [], overrides, table, data_root, paper, out=out, weights=weights, device=device)
    if is_first():
        print_comparison(done)
        echo(f"{out / 'comparison.html'} shows it.")
    elif done.failed:
        fail_silently(1)
    if done.failed:
        raise typer.Exit(1)


def _compared(
    names: list[str],
    on: list[str],
    overrides: list[str],
    table: str | None,
    data_root: Path | None,
    paper: bool,
    *,
    out: Path,
    weights: str,
    device: str | None,
) -> "Comparison":
    common: dict[str, Any] = {
        "out": out,
        "weights": weights,
        "device": device,
        "console": messages(),
    }
    with _resumable("Stopped. Finished cells are saved: the same command resumes."):
        if table is None:
            return api.compare(names, on, overrides, **common)
        return api.compare_table(table, names, overrides, data_root=data_root, paper=paper, **common)


@app.command()
def extract(
    context: typer.Context,
    model: Model,
    data: Annotated[
        str,
        typer.Argument(help="A folder of images or of class folders, a zip, a CSV with file and label, or demo."),
    ],
    out: Annotated[Path, typer.Option(help="File to write: .safetensors or .parquet; with --tile, a folder.")],
    kind: Annotated[
        list[str] | None, typer.Option(help="patch, mean_patch, pooled or register; may repeat; by default mean_patch.")
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(help=f"Side of the images in pixels, or HEIGHTxWIDTH; {OWN_SIZE}.")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Squeeze the whole image instead of its middle.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    split: Annotated[str | None, typer.Option(help="Part of the data: of a CSV, of demo, or a subfolder.")] = None,
    label: Annotated[str, typer.Option(help="A CSV's column with the label.")] = "label",
    batch_size: Annotated[
        int | None,
        typer.Option(help="Images at a time, by default 32; or tiles, by default 8.", callback=between(1, 2**16)),
    ] = None,
    tile: Annotated[
        int | None,
        typer.Option(
            help="Of large images: a map of each at full resolution, from tiles of this side in pixels.",
            callback=between(1, 2**14),
        ),
    ] = None,
    overlap: Annotated[
        int | None,
        typer.Option(
            help="Of neighboring tiles, in pixels; by default an eighth of --tile.", callback=between(0, 2**14)
        ),
    ] = None,
    weights: WeightsOption = "teacher",
    overwrite: Overwrite = False,
    device: Device = None,
    trust: TrustOption = None,  # noqa: ARG001 - read by its callback
) -> None:
    """Write the features of many images to a file, with names and labels. The same command resumes where it stopped.

    With --tile, DATA is a large image or a folder of some, and --out a folder: a map of patch features and a PCA
    picture for each. A patch comes from the tile in which it lies farther from the edge.
    """
    check_weights(weights, [model])
    one_of("--dtype", dtype, ("float32", "float16"))
    if tile is not None:
        refuse_idle(
            context, ("kind", "image_size", "whole", "split", "label"), "has no effect with --tile: leave it out"
        )
        with _resumable("Stopped. Complete rows of tiles are saved: the same command resumes."):
            maps = api.extract_tiles(
                model,
                data,
                out=out,
                tile=tile,
                overlap=overlap,
                dtype=dtype,
                batch_size=batch_size or 8,
                weights=weights,  # type: ignore[arg-type]
                device=device,
                overwrite=overwrite,
                console=messages(),
            )
        for each in maps:
            there = " (it was there already)" if each.resumed else ""
            echo(f"wrote {each.path}: {each.grid[0]} x {each.grid[1]} patches{there}; {each.picture.name} shows it")
        return
    refuse_idle(context, ("overlap",), "is that of tiles: give --tile too, or leave it out")
    kinds = kind or ["mean_patch"]
    for feature in kinds:
        one_of("--kind", feature, ("patch", "mean_patch", "pooled", "register"))
    if not api.is_csv(data):
        refuse_idle(context, ("label",), f"is the column of a CSV, which {data} is not: leave it out")
    size = None if image_size is None else _size(image_size)
    with _resumable("Stopped. What was extracted is saved: the same command resumes."):
        done = api.extract(
            model,
            data,
            out=out,
            kinds=kinds,
            image_size=size,
            whole=whole,
            dtype=dtype,
            split=split,
            label=label,
            batch_size=batch_size or 32,
            weights=weights,  # type: ignore[arg-type]
            device=device,
            overwrite=overwrite,
            console=messages(),
        )
    if is_first():
        echo(f"wrote {done.path}: {counted(done.images, 'image')}, {', '.join(kinds)}")


@app.command()
def nearest(
    file: Annotated[Path, typer.Argument(help="A file of `capi extract`.")],
    image: Annotated[Path, typer.Argument(help="The image to find similar ones of.")],
    out: Annotated[
        Path | None, typer.Option(help="Picture to write, .png or .jpg; by default nearest.png, nearest_2.png, ...")
    ] = None,
    count: Annotated[int, typer.Option(help="How many to find.", callback=between(1, 1000))] = 10,
    at: Annotated[str | None, typer.Option(help="x,y in pixels: the patch there, if the file has patches.")] = None,
    kind: Annotated[str | None, typer.Option(help="Which features of the file: mean_patch or pooled.")] = None,
    model: Annotated[str | None, typer.Option(help="By default the model that made the file.")] = None,
    images: Annotated[Path | None, typer.Option(help="The folder of the file's images, if it is not found.")] = None,
    overwrite: Overwrite = False,
    device: Device = None,
    trust: TrustOption = None,  # noqa: ARG001 - read by its callback
) -> None:
    """Find the most similar images, or patches, and show them on a sheet."""
    if out is None:
        names = (Path(f"nearest{'' if number == 1 else f'_{number}'}.png") for number in count_up(1))
        out = next(name for name in names if overwrite or not name.exists())
    matches = api.nearest(
        file,
        image,
        model=model,
        count=count,
        at=_point(at),
        kind=kind,
        out=out,
        images=images,
        device=device,
        overwrite=overwrite,
    )
    table = Table("rank", "similarity", box=None, pad_edge=False)
    for name in ("image", "patch") if at else ("image",):
        table.add_column(name, overflow="fold")
    for rank, match in enumerate(matches, 1):
        place = () if match.patch is None else (f"row {match.patch[0]}, column {match.patch[1]}",)
        table.add_row(str(rank), f"{match.similarity:.3f}", match.name, *place)
    Terminal().print(table)
    if matches.left_out is not None:
        itself = "The image itself" if matches.left_out.patch is None else "The patch itself"
        echo(f"{itself}, which {file} holds too, is left out.")
    echo(f"{out} shows them.")


@app.command()
def visualize(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL... [IMAGE]...", help=f"{MODEL_HELP} Then images or folders; none: photos of the demo."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the pictures and their page.")],
    size: Annotated[
        list[int] | None, typer.Option(help=f"Side in pixels; may repeat; {PICTURE_SIZE}.", callback=between(1, 2**14))
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="pca, components, clusters, dictionary, collapse, prototypes; may repeat; by default the first three."
        ),
    ] = None,
    joint: Annotated[bool, typer.Option("--joint", help="Fit components to all images together.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Show whole images instead of their middle.")] = False,
    weights: WeightsOption = "teacher",
    overwrite: Overwrite = False,
    device: Device = None,
    trust: TrustOption = None,  # noqa: ARG001 - read by its callback
) -> None:
    """Draw what encoders see in images: PCA, components, clusters; models and sizes side by side."""
    models = [word for word in words if not _is_image(word)]
    if not models:
        raise CapiError("visualize needs at least one model before the images")
    check_weights(weights, models)
    done = api.draw(
        models,
        [word for word in words if _is_image(word)],
        out=out,
        sizes=size or [],
        kinds=kind or api.DEFAULT_KINDS,
        joint=joint,
        whole=whole,
        weights=weights,  # type: ignore[arg-type]
        device=device,
        overwrite=overwrite,
        console=messages(),
    )
    echo(f"{done.page} shows {counted(len(done.files), 'picture')}.")
    if done.failed:
        echo(f"{len(done.failed)} could not be drawn: {out / 'failed.csv'} says why")


def _is_image(word: str) -> bool:
    """An image, or a folder that holds neither a run nor a model of transformers."""
    models = [Path(word) / name for name in ("run.json", "model.safetensors")]
    return word.lower().endswith(api.ENDINGS) or (Path(word).is_dir() and not any(model.exists() for model in models))


@contextmanager
def _resumable(message: str) -> Iterator[None]:
    """Who interrupts reads how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        if is_first():
            echo(message)
        raise typer.Exit(INTERRUPTED) from None


def _size(text: str) -> int | tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and len(side) < 6 and 0 < int(side) <= 2**14 for side in sides):
        raise CapiError(
            f'--image-size "{text}" is no size: expected pixels such as 224, or 224x448 (height x width), up to {2**14}'
        )
    return int(text) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _point(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        across, down = (float(part) for part in text.split(","))
        if not (math.isfinite(across) and math.isfinite(down)):
            raise ValueError(text)
    except ValueError:
        raise CapiError(f'--at "{text}" is no point: expected x,y in pixels, such as 120,80') from None
    return across, down
