"""Commands that carry models in and out: models, export, push."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from capi import api
from capi.cli.app import TrustOption, app, check_weights, echo, messages, one_of
from capi.cli.evaluation import OWN_SIZE, Overwrite, WeightsOption
from capi.cli.inspection import Carbon, Watts
from capi.cli.terminal import Terminal
from capi.cli.usage import between
from capi.errors import CapiError

if TYPE_CHECKING:
    from capi.api import OnnxExported

EXPORT_FORMATS = ("safetensors", "released", "transformers", "onnx", "original")
PRECISIONS = ("float32", "float16", "int8")
# What a file or folder is called in a run where no name is given.
_USUAL = {
    "safetensors": "encoder.safetensors",
    "released": "encoder.pth",
    "transformers": "transformers",
    "onnx": "encoder.onnx",
    "original": "original",
}


@app.command()
def models(
    everything: Annotated[
        bool, typer.Option("--all", help="All baselines too, with addresses, licences and how each was verified.")
    ] = False,
) -> None:
    """List the models that can be loaded by name: the published ones, and the baselines of other methods."""
    console, published = Terminal(), api.list_models()
    table = _narrow_table("name", "model", "trained on", "reported")
    for model in published:
        size = f"{model.architecture}/{model.patch_size}, {model.parameters / 1e6:.0f} M"
        table.add_row(model.name, size, model.data, " / ".join(map(str, model.scores.values())))
    console.print(table)
    if not everything:
        names = ", ".join(api.PAPER_BASELINES)
        console.print(
            f"\nReported in percent: {' / '.join(published[0].scores)}. `capi.load(NAME)` downloads a file when it is "
            f"first asked for.\n\nOther methods of the paper, as baseline:NAME: {names}.\n\n`capi models --all` lists "
            f"{len(api.list_baselines())} of them, with addresses, licences and how each was verified."
        )
        return
    _print_places(console, {model.name: f"{model.address}; licence: {model.licence}" for model in published})
    console.print(f"\nReported at {api.REFERENCE_REPOSITORY}, in percent: {' / '.join(published[0].scores)}.")
    for verified in dict.fromkeys(model.verified for model in published):
        about = ", ".join(model.name for model in published if model.verified == verified)
        console.print(f"\nVerified, {about}: {verified}.")
    console.print("\n`capi.load(NAME)` downloads a file when it is first asked for.")
    _print_baselines(console)


def _narrow_table(*columns: str) -> Table:
    """A table for any terminal: long texts are broken into lines, names, which are typed, stay whole."""
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0, overflow="fold")
    return table


def _print_places(console: Console, places: dict[str, str]) -> None:
    """Addresses and licences are longer than a column can be: they have a table of their own."""
    table = _narrow_table("weights of", "lie in")
    for name, place in places.items():
        table.add_row(name, place)
    console.print()
    console.print(table)


def _print_baselines(console: Console) -> None:
    """Other methods' encoders: whose they are, under which licence, and how far each was verified."""
    baselines = api.list_baselines()
    marks = {text: f"[{number}]" for number, text in enumerate(dict.fromkeys(each.verified for each in baselines), 1)}
    table = _narrow_table("baseline", "model", "trained on", "")
    for each in baselines:
        star = "*" if each.name in api.PAPER_BASELINES else ""
        size = f"{each.title} {each.size}, {each.parameters / 1e6:.0f} M"
        row = (f"{each.name}{star}", size, each.data, marks[each.verified])
        table.add_row(*row)
    console.print("\nOther methods, loaded as `baseline:NAME` or `baseline:NAME=PATH` (* in the paper):\n")
    console.print(table)
    for text, mark in marks.items():
        console.print(f"{mark} {text}.")
    places = {}
    for each in baselines:
        hub = f"; {each.hub_id} on the Hub" if each.hub_id else ""
        places[each.name] = f"{each.file} of {each.source}{hub}; licence: {each.licence}"
    _print_places(console, places)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A run folder, a checkpoint, a folder of transformers, or a name.")],
    out: Annotated[Path | None, typer.Option(help="File or folder to write; by default in the run.")] = None,
    format: Annotated[
        str, typer.Option(help="safetensors, released, transformers, onnx, or original: that of the adapted weights.")
    ] = "safetensors",
    weights: WeightsOption = "teacher",
    image_size: Annotated[
        int | None,
        typer.Option(help=f"transformers: side that images are resized to; {OWN_SIZE}.", callback=between(1, 2**14)),
    ] = None,
    precision: Annotated[str, typer.Option(help="onnx: float32, float16 or int8.")] = "float32",
    opset: Annotated[
        int | None, typer.Option(callback=between(1, 100), help="onnx: version of the operators; by default 18.")
    ] = None,
    pooled: Annotated[bool, typer.Option(help="onnx: whether the file gives pooled features.")] = True,
    overwrite: Overwrite = False,
    trust: TrustOption = None,  # noqa: ARG001 - read by its callback
) -> None:
    """Write an encoder in a format that others read."""
    one_of("--format", format, EXPORT_FORMATS)
    check_weights(weights, [model])
    one_of("--precision", precision, PRECISIONS)
    if out is None and not Path(model).is_dir():
        reason = "is no run folder" if Path(model).exists() else "is no folder of this machine"
        raise CapiError(f"{model} {reason} to write into: name a run, or a file or folder to write with --out")
    options = api.ExportOptions(image_size=image_size, precision=precision, opset=opset, pooled=pooled)  # type: ignore[arg-type]
    waiting = "writing; ONNX takes some seconds for each block" if format == "onnx" else "writing"
    with messages().status(waiting):
        done = api.write_export(
            model,
            api.Output(out or Path(model) / _USUAL[format], overwrite),
            format=format,  # type: ignore[arg-type]
            weights=weights,  # type: ignore[arg-type]
            options=options,
        )
    echo(f"wrote {done.path}")
    if done.onnx is not None:
        Terminal().print(_measured(done.onnx))


def _measured(done: "OnnxExported") -> Table:
    """What was found when the file was checked."""
    table = Table(title="Against PyTorch in float32", box=None, show_header=False, title_justify="left", pad_edge=False)
    if done.differences is None:
        table.add_row("not checked", "onnxruntime is not installed: pip install 'capi[onnx]'")
    for name, difference in (done.differences or {}).items():
        table.add_row(
            name, f"largest difference {difference.relative:.1e} of the largest value, cosine {difference.cosine:.6f}"
        )
    for name, seconds in (done.seconds or {}).items():
        table.add_row(f"time of {name}", f"{1000 * seconds:.1f} ms for one image")
    table.add_row("size", f"{done.size / 2**20:.1f} MiB")
    return table


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hugging Face Hub.")],
    licence: Annotated[str | None, typer.Option(help="Licence of the weights, such as apache-2.0.")] = None,
    data_description: Annotated[
        Path | None, typer.Option(help="Text file that says what the model was trained on.")
    ] = None,
    results: Annotated[list[Path] | None, typer.Option(help="Folder of `capi evaluate`; may be repeated.")] = None,
    photos: Annotated[bool, typer.Option("--photos", help="Show training photos beside their features.")] = False,
    space: Annotated[
        bool, typer.Option("--space", help="Add a Space that runs the explorer with the model (RUN/space).")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the folder, and send nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write; by default RUN/hub.")] = None,
    weights: WeightsOption = "teacher",
    watts: Watts = None,
    carbon: Carbon = None,
    overwrite: Overwrite = False,
    trust: TrustOption = None,  # noqa: ARG001 - read by its callback
) -> None:
    """Share a run on the Hugging Face Hub: weights, config and a model card."""
    one_of("--weights", weights, ("teacher", "student"))
    messages()
    done = api.push(
        run,
        name,
        licence=licence,
        data_description="" if data_description is None else api.read_text(data_description),
        results=results or [],
        photos=photos,
        space=space,
        private=private,
        dry_run=dry_run,
        out=out,
        weights=weights,  # type: ignore[arg-type]
        watts=watts,
        carbon=carbon,
        overwrite=overwrite,
    )
    for line in done.lines:
        echo(line)
