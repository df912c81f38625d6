"""Frozen encoders: scored, compared, used and pictured."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from capi.api import comparison, evaluation, tables
from capi.api.arguments import Names, device_of, listed, progress_on
from capi.api.evaluation import Evaluated
from capi.config.benchmarks import BenchmarkConfig
from capi.data.frame import image_size_of
from capi.data.image_lists import list_images
from capi.data.sources import ImageSource, find_images
from capi.errors import CapiError
from capi.evals import extraction, similar
from capi.evals.build import choose_workers
from capi.evals.comparison_cells import Cell, Comparison
from capi.evals.extraction import Extracted
from capi.evals.feature_files import read_features
from capi.evals.features import Encoding
from capi.evals.prediction import Prediction
from capi.evals.probe_files import load_probe
from capi.evals.results import make_folder
from capi.evals.similar import Match
from capi.evals.teamwork import on_a_machine, prepared
from capi.report.draw import DEFAULT_KINDS, Pictured, load_prototypes, picture
from capi.report.explorer import open
from capi.report.pictures import matches
from capi.report.pictures.sheets import save_picture
from capi.report.predictions import Predicted, write_predictions
from capi.runtime.processes import joined, own_device
from capi.types import VisionEncoder
from capi.zoo.encoders import open_encoder, open_noted_encoder
from capi.zoo.weights import Weights

_LOG = logging.getLogger("capi")

# Features go from process to process over the CPU: an evaluation may do other things for hours in between.
MEETING = torch.device("cpu")
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


def evaluate(
    model: str | Path | VisionEncoder,
    benchmark: str | Path | BenchmarkConfig,
    overrides: Iterable[str] = (),
    *,
    out: str | Path | None = None,
    weights: Weights = "teacher",
    device: torch.device | str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> Evaluated:
    """Score a frozen encoder by a benchmark, `DATASET/PROTOCOL` or a YAML file.

    `model` is a path, another name that `capi evaluate` knows, or any `VisionEncoder`. With `out`, that folder gets
    results.json, results.md and the fitted probe. Under torchrun all processes call this, and each encodes a part.
    """
    with joined(MEETING) as processes, progress_on(console) as progress:
        with prepared(processes):
            chosen = device_of(device)
        return evaluation.evaluate(
            model,
            benchmark,
            overrides,
            out=out,
            weights=weights,
            device=chosen,
            overwrite=overwrite,
            progress=progress,
            processes=processes,
        )


def predict(
    model: str | Path | VisionEncoder,
    probe: str | Path,
    images: Names,
    *,
    out: str | Path,
    weights: Weights = "teacher",
    device: torch.device | str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> Predicted:
    """Label images with a probe that an evaluation fitted: a CSV of classes, or masks and overlays."""
    chosen = device_of(device)
    fitted = load_probe(Path(probe))
    encoder = open_encoder(model, weights=weights, device=chosen)
    source = find_images([Path(image) for image in listed(images)])
    with progress_on(console) as progress:
        encoding = Encoding(device=chosen, workers=choose_workers(None, chosen, len(source)), progress=progress)
        return write_predictions(Prediction(encoder, fitted, source, encoding), Path(out), overwrite=overwrite)


def compare(
    models: Names,
    benchmarks: Names,
    overrides: Iterable[str] = (),
    *,
    out: str | Path,
    weights: Weights = "teacher",
    device: torch.device | str | None = None,
    console: Console | None = None,
) -> Comparison:
    """Every model by every benchmark: tables and a page in `out`; cells that are done are kept."""
    with joined(MEETING) as processes, progress_on(console) as progress:
        with prepared(processes):
            chosen = device_of(device)

        def announce(cell: Cell) -> None:
            if cell.status == "running":
                progress.begin(f"{cell.model} on {cell.benchmark}: ")

        return comparison.compare(
            [str(model) for model in listed(models)],
            [str(benchmark) for benchmark in listed(benchmarks)],
            overrides,
            out=Path(out),
            weights=weights,
            device=chosen,
            progress=progress,
            on_cell=announce,
            processes=processes,
        )


def compare_table(
    table: str,
    models: Names = (),
    overrides: Iterable[str] = (),
    *,
    out: str | Path,
    data_root: str | Path | None = None,
    paper: bool = True,
    weights: Weights = "teacher",
    device: torch.device | str | None = None,
    console: Console | None = None,
) -> Comparison:
    """A result table of the paper, rows and columns as printed, ours beside the paper's; what is missing is said."""
    with joined(MEETING) as processes, progress_on(console) as progress:
        with prepared(processes):
            chosen = device_of(device)

        def announce(cell: Cell) -> None:
            if cell.status == "running":
                progress.begin(f"{cell.model} on {cell.benchmark}: ")

        return tables.compare_table(
            table,
            [str(model) for model in listed(models)],
            overrides,
            out=Path(out),
            data_root=data_root,
            paper=paper,
            weights=weights,
            device=chosen,
            progress=progress,
            on_cell=announce,
            processes=processes,
        )


def extract(
    model: str | Path | VisionEncoder,
    data: str | Path,
    *,
    out: str | Path,
    kinds: str | Sequence[str] = ("mean_patch",),
    image_size: int | tuple[int, int] | None = None,
    whole: bool = False,
    dtype: str = "float32",
    batch_size: int = 32,
    split: str | None = None,
    label: str = "label",
    weights: Weights = "teacher",
    device: torch.device | str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> Extracted:
    """Features of every image of a folder, a CSV or `demo`, with names and labels, as safetensors or parquet.

    `kinds` are among patch, mean_patch, pooled and register; `image_size` is by default the encoder's own. An
    extraction that was interrupted goes on.
    """
    asked = (image_size, image_size) if isinstance(image_size, int) else image_size
    named = {"model": str(model), "weights": weights} if isinstance(model, str | Path) else {}
    with joined(MEETING) as processes, progress_on(console) as progress:
        with prepared(processes):
            chosen = own_device(device_of(device))
            encoder = open_encoder(model, weights=weights, device=chosen)
            listed = list_images(str(data), split, label)
        size = image_size_of(encoder) if asked is None else asked
        images = len(listed.images) // processes.size
        workers = choose_workers(None, chosen, images, on_a_machine(processes))
        return extraction.extract(
            encoder,
            listed.images,
            Path(out),
            encoding=Encoding(size=size, batch_size=batch_size, workers=workers, device=chosen, progress=progress),
            labels=listed.labels,
            kinds=[kinds] if isinstance(kinds, str) else kinds,
            whole=whole,
            about={**named, "data": str(data), "split": split},
            dtype=dtype,
            overwrite=overwrite,
            processes=processes,
        )


def nearest(
    file: str | Path,
    image: str | Path,
    *,
    model: str | Path | VisionEncoder | None = None,
    count: int = 10,
    at: tuple[float, float] | None = None,
    kind: str | None = None,
    out: str | Path | None = None,
    images: str | Path | None = None,
    device: torch.device | str | None = None,
    overwrite: bool = False,
) -> list[Match]:
    """The images of a file of `extract` that are most similar to an image; with a point `at`, the patches.

    `model` is by default the one the file was made with; one that is Python, or that is not on this machine and not a
    published model either, must be given, since a file may come from anyone. With `out`, a contact sheet is written
    there. `images` is the folder of the file's images; it must be given where the file has only its name, since they
    were extracted by an absolute path.
    """
    chosen = device_of(device)
    picture = None if out is None else _picture(Path(out), overwrite)
    features = read_features(Path(file))
    about = features.facts.about
    weights: Weights = about.get("weights", "teacher")
    if model is not None:
        encoder = open_encoder(model, weights=weights, device=chosen)
    elif "model" in about:
        encoder = open_noted_encoder(about["model"], file, weights=weights, device=chosen)
    else:
        raise CapiError(f"{file} does not say which model made it: name the model")
    given = None if images is None else Path(images)
    found = similar.find_similar(
        features, encoder, Path(image), encoding=Encoding(device=chosen), count=count, at=at, kind=kind, root=given
    )
    if picture is not None:
        named = features.facts.root
        shown: ImageSource | Path | None = Path(named) if given is None and named is not None else given
        if about.get("data") == "demo" and given is None:
            shown = list_images("demo", about.get("split")).images
        elif isinstance(shown, Path) and not shown.is_dir():
            _LOG.warning("there is no folder %s with the images of %s: give it with --images", shown, file)
        sheet = matches.similarity_sheet(Path(image), found, shown, framing=features.facts.framing, at=at)
        make_folder(picture.parent)
        save_picture(sheet, picture)
    return found


def draw(
    models: Sequence[str | Path],
    images: Sequence[str | Path] = (),
    *,
    out: str | Path,
    sizes: Sequence[int] = (),
    kinds: Sequence[str] = DEFAULT_KINDS,
    joint: bool = False,
    whole: bool = False,
    weights: Weights = "teacher",
    device: torch.device | str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> Pictured:
    """Pictures of what encoders see in images: PCA, single components, clusters, a dictionary; PNGs and a page.

    Without images, six photos of the demo are shown, which need the extra `demo`; without sizes, each encoder sees
    images at its own.
    """
    chosen = device_of(device)
    models, images = ([each] if isinstance(each, str | Path) else each for each in (models, images))
    named = {str(model): open_encoder(model, weights=weights, device=chosen) for model in models}
    folders = {str(model): Path(model) for model in models if Path(model).is_dir()}
    prototypes = {name: load_prototypes(run) for name, run in folders.items()} if "prototypes" in kinds else None
    with progress_on(console) as progress:
        return picture(
            named,
            [Path(image) for image in images],
            Path(out),
            sizes=sizes,
            kinds=[kinds] if isinstance(kinds, str) else kinds,
            joint=joint,
            whole=whole,
            encoding=Encoding(device=chosen, batch_size=8, progress=progress),
            prototypes=prototypes,
            overwrite=overwrite,
        )


def explore(
    model: str | Path | VisionEncoder,
    images: Names = (),
    *,
    size: int | None = None,
    weights: Weights = "teacher",
    device: torch.device | str | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    open_browser: bool = False,
    announce: Callable[[str], None] = print,
) -> None:
    """A page in the browser to look around in what an encoder sees, until Ctrl-C. Needs the extra `explore`.

    `size` is the short side of images, by default that of the encoder's own size.
    """
    encoder = open_encoder(model, weights=weights, device=device_of(device))
    open.explore(
        model if isinstance(model, str | Path) else type(model).__name__,
        encoder,
        [Path(image) for image in listed(images)],
        size=size,
        host=host,
        port=port,
        open_browser=open_browser,
        announce=announce,
    )


def _picture(path: Path, overwrite: bool) -> Path:
    """A name that a picture may have; any other is told before the work, as is a file that would be replaced."""
    if path.suffix.lower() not in PICTURE_ENDINGS or path.is_dir():
        raise CapiError(f"{path} cannot be a picture: give a file that ends in {', '.join(PICTURE_ENDINGS)}")
    if path.exists() and not overwrite:
        raise CapiError(f"{path} is there already: choose another --out, or replace it with --overwrite")
    return path
