"""What a user calls."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from capi import checking, exporting, pretraining
from capi.baseline_weights import is_baseline, open_baseline
from capi.baselines.vit import PlainViT
from capi.benchmark import choose_workers
from capi.build import build_learner, mask_sampler
from capi.checking import RunCheck
from capi.config.benchmarks import BenchmarkConfig
from capi.config.loading import load_config
from capi.config.schema import Config
from capi.data.decoding import Decoder
from capi.data.opening import Data, open_images
from capi.data.packing import Packed, PackingSettings, pack
from capi.data.sources import ImageSource
from capi.data.survey import Survey, survey
from capi.distributed.processes import joined, own_device
from capi.encoders import load_weights, open_encoder
from capi.errors import CapiError
from capi.evals.feature_files import read_features
from capi.evals.features import Encoding
from capi.evals.probe_files import load_probe
from capi.evaluation import comparison, evaluating, extraction, prediction, similar, tables
from capi.evaluation.comparison_cells import Cell, Comparison
from capi.evaluation.evaluating import Evaluated
from capi.evaluation.extraction import Extracted
from capi.evaluation.image_lists import labelled_images, list_images
from capi.evaluation.picturing import DEFAULT_KINDS, Pictured, load_prototypes, picture
from capi.evaluation.prediction import Predicted
from capi.evaluation.progress import EvaluationProgress
from capi.evaluation.results import make_folder
from capi.evaluation.similar import Match
from capi.evaluation.teamwork import on_a_machine, prepared
from capi.exporting import ExportFormat, ExportOptions
from capi.models.features import CapiEncoder
from capi.onnx_export.tracing import Precision
from capi.planning.hardware import find_gpu
from capi.planning.running import Assumptions, RunPlan, plan_run
from capi.planning.suggesting import Suggestion, look_at
from capi.planning.suggesting import suggest as suggest_run
from capi.pretraining import PretrainedRun
from capi.seeing import explored, runs
from capi.seeing.doctor import Diagnosis, diagnose
from capi.seeing.watching import serve
from capi.sharing import pushing
from capi.sharing.pushing import Pushed
from capi.train.loop import Evaluation
from capi.train.metrics import Logger
from capi.transforming import transform
from capi.types import VisionEncoder
from capi.weights import Weights

__all__ = [
    "build_learner",
    "check",
    "check_data",
    "choose_device",
    "compare",
    "compare_table",
    "doctor",
    "draw",
    "evaluate",
    "explore",
    "export",
    "extract",
    "load",
    "mask_sampler",
    "nearest",
    "pack_shards",
    "plan",
    "predict",
    "pretrain",
    "push",
    "report",
    "suggest",
    "transform",
    "watch",
]

Recipe = str | Path | Config
Names = str | Path | Sequence[str | Path]
# Features go from process to process over the CPU: an evaluation may do other things for hours in between.
MEETING = torch.device("cpu")
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


def load(model: str | Path, *, weights: Weights = "teacher") -> CapiEncoder | PlainViT:
    """The frozen encoder of a run folder, of what `capi export` writes (but ONNX), of a checkpoint in the released
    layout, of a published model by its name (`capi models` lists them), or of a Hub id (`owner/name`); or of another
    method, as `baseline:NAME`.

    Of a run `weights` chooses the teacher (the moving average) or the student; files hold one of them. Calling the
    encoder on normalised images gives `Features(pooled, registers, feature_map)`; with `pooled=False` the pooled
    vector is neither computed nor given. A key that is missing, unknown or misshapen is an error that names it.
    """
    return open_baseline(str(model)) if is_baseline(str(model)) else load_weights(model, weights)


def choose_device(name: str | None = None) -> torch.device:
    """The device of that name, or the best one there is: cuda, mps, cpu."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = own_device(torch.device(name))
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise CapiError(f'the device "{name}" is not there: use cpu, or another device that torch finds') from error
    return device


def pretrain(
    recipe: Recipe,
    overrides: Iterable[str] = (),
    *,
    data: Data,
    out: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    device: torch.device | str | None = None,
    loggers: Sequence[Logger] = (),
    evaluations: Sequence[Evaluation] = (),
    console: Console | None = None,
) -> PretrainedRun:
    """Pretrain on unlabelled images.

    `data` is a folder, shards, tables, a name of the Hub (docs/data.md), several of these with weights, or `demo` for
    the built-in photos; `out` becomes the folder of the run. `resume` goes on with
    the run that is there, if there is one; `overwrite` replaces it. A logger is called with every record of metrics.
    With a `console` there is a progress bar. At the end a report is written, report.html in the run's folder.
    """
    config, chosen = as_config(recipe, overrides), _device(device)
    done = pretraining.pretrain(
        config,
        data=data,
        out=out,
        resume=resume,
        overwrite=overwrite,
        device=chosen,
        loggers=loggers,
        evaluations=evaluations,
        pictures=runs.pictures_over_time,
        open_encoder=partial(open_encoder, device=chosen),
        console=console,
    )
    if not config.run.report or not done.is_main:
        return done
    return replace(done, report=runs.conclude(done.path, finished=done.finished, device=chosen))


def plan(
    recipe: Recipe,
    overrides: Iterable[str] = (),
    *,
    gpu: str = "this",
    gpus: int = 1,
    assumptions: Assumptions | None = None,
) -> RunPlan:
    """What a run would need on so many GPUs, without running anything: memory part by part, what fits, hours, energy.

    `gpu` is a name that `capi plan --gpu list` gives, or `this` for the machine at hand. `assumptions` holds what no
    plan can know: the share of the peak that is reached, and what power costs.
    """
    return plan_run(as_config(recipe, overrides), find_gpu(gpu), gpus, assumptions=assumptions)


def suggest(data: str | Path, *, gpu: str = "this", gpus: int = 1, hours: float = 24.0) -> Suggestion:
    """A recipe with batch, prototypes and length for these images on this hardware, each with its reason."""
    return suggest_run(look_at(open_images(data)), find_gpu(gpu), gpus, hours=hours)


def export(
    model: str | Path,
    out: str | Path,
    *,
    format: ExportFormat = "safetensors",
    weights: Weights = "teacher",
    image_size: int | None = None,
    precision: Precision = "float32",
    opset: int | None = None,
    pooled: bool = True,
    overwrite: bool = False,
) -> Path:
    """Write the encoder of anything that `load` takes: as safetensors, in the released layout, for the transformers
    library (with `image_size`), or as ONNX (with `precision`, `opset` and `pooled`). Says where it is.
    """
    options = ExportOptions(image_size=image_size, precision=precision, opset=opset, pooled=pooled)
    done = exporting.export(model, Path(out), format=format, weights=weights, options=options, overwrite=overwrite)
    return done.path


def push(
    run: str | Path,
    name: str,
    *,
    licence: str | None = None,
    data_description: str = "",
    results: Sequence[str | Path] = (),
    photos: bool = False,
    private: bool = False,
    token: str | None = None,
    dry_run: bool = False,
    out: str | Path | None = None,
    weights: Weights = "teacher",
    watts: float | None = None,
    carbon: float | None = None,
    overwrite: bool = False,
) -> Pushed:
    """Share a run on the Hugging Face Hub as `owner/name`: weights, config and a model card.

    `dry_run` writes the folder and sends nothing. `results` are folders of `evaluate`, beside those within the run.
    """
    return pushing.push(
        Path(run),
        name,
        licence=licence,
        private=private,
        token=token,
        dry_run=dry_run,
        out=None if out is None else Path(out),
        weights=weights,
        data_description=data_description,
        results=[Path(folder) for folder in results],
        photos=photos,
        watts=watts,
        carbon=carbon,
        overwrite=overwrite,
    )


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
    with joined(MEETING) as processes, _progress(console) as progress:
        with prepared(processes):
            chosen = _device(device)
        return evaluating.evaluate(
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
    chosen = _device(device)
    fitted = load_probe(Path(probe))
    encoder = open_encoder(model, weights=weights, device=chosen)
    places = [Path(image) for image in _listed(images)]
    with _progress(console) as progress:
        workers = choose_workers(None, chosen, len(prediction.find_images(places)))
        encoding = Encoding(device=chosen, workers=workers, progress=progress)
        return prediction.predict(encoder, fitted, places, Path(out), encoding, overwrite=overwrite)


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
    with joined(MEETING) as processes, _progress(console) as progress:
        with prepared(processes):
            chosen = _device(device)

        def announce(cell: Cell) -> None:
            if cell.status == "running":
                progress.begin(f"{cell.model} on {cell.benchmark}: ")

        return comparison.compare(
            [str(model) for model in _listed(models)],
            [str(benchmark) for benchmark in _listed(benchmarks)],
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
    with joined(MEETING) as processes, _progress(console) as progress:
        with prepared(processes):
            chosen = _device(device)

        def announce(cell: Cell) -> None:
            if cell.status == "running":
                progress.begin(f"{cell.model} on {cell.benchmark}: ")

        return tables.compare_table(
            table,
            [str(model) for model in _listed(models)],
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
    image_size: int | tuple[int, int] = 224,
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

    `kinds` are among patch, mean_patch, pooled and register. An extraction that was interrupted goes on.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    named = {"model": str(model), "weights": weights} if isinstance(model, str | Path) else {}
    with joined(MEETING) as processes, _progress(console) as progress:
        with prepared(processes):
            chosen = own_device(_device(device))
            encoder = open_encoder(model, weights=weights, device=chosen)
            listed = list_images(str(data), split, label)
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
    device: torch.device | str | None = None,
    overwrite: bool = False,
) -> list[Match]:
    """The images of a file of `extract` that are most similar to an image; with a point `at`, the patches.

    `model` is by default the one the file was made with. With `out`, a contact sheet is written there.
    """
    chosen = _device(device)
    picture = None if out is None else _picture(Path(out), overwrite)
    features = read_features(Path(file))
    about = features.facts.about
    if model is None and "model" not in about:
        raise CapiError(f"{file} does not say which model made it: name the model")
    name = about["model"] if model is None else model
    weights: Weights = about.get("weights", "teacher")
    encoder = open_encoder(name, weights=weights, device=chosen)
    found = similar.find_similar(
        features, encoder, Path(image), encoding=Encoding(device=chosen), count=count, at=at, kind=kind
    )
    if picture is not None:
        root = features.facts.root
        images: ImageSource | Path | None = None if root is None else Path(root)
        if about.get("data") == "demo":
            images = list_images("demo", about.get("split")).images
        sheet = similar.similarity_sheet(Path(image), found, images, framing=features.facts.framing, at=at)
        make_folder(picture.parent)
        sheet.save(picture)
    return found


def _listed(names: Names) -> Sequence[str | Path]:
    """A single name is a list of one, not of its letters."""
    return [names] if isinstance(names, str | Path) else names


def _picture(path: Path, overwrite: bool) -> Path:
    """A name that a picture may have; any other is told before the work, as is a file that would be replaced."""
    if path.suffix.lower() not in PICTURE_ENDINGS or path.is_dir():
        raise CapiError(f"{path} cannot be a picture: give a file that ends in {', '.join(PICTURE_ENDINGS)}")
    if path.exists() and not overwrite:
        raise CapiError(f"{path} is there already: choose another --out, or replace it with --overwrite")
    return path


def draw(
    models: Sequence[str | Path],
    images: Sequence[str | Path] = (),
    *,
    out: str | Path,
    sizes: Sequence[int] = (224,),
    kinds: Sequence[str] = DEFAULT_KINDS,
    joint: bool = False,
    whole: bool = False,
    weights: Weights = "teacher",
    device: torch.device | str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> Pictured:
    """Pictures of what encoders see in images: PCA, single components, clusters, a dictionary; PNGs and a page.

    Without images, two photos that scikit-learn brings along are shown.
    """
    chosen = _device(device)
    models, images = ([each] if isinstance(each, str | Path) else each for each in (models, images))
    named = {str(model): open_encoder(model, weights=weights, device=chosen) for model in models}
    folders = {str(model): Path(model) for model in models if Path(model).is_dir()}
    prototypes = {name: load_prototypes(run) for name, run in folders.items()} if "prototypes" in kinds else None
    with _progress(console) as progress:
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


def doctor(run: str | Path) -> Diagnosis:
    """What is well with a run and what is not, against general rules and, for the demo, reference runs."""
    return diagnose(Path(run))


def report(
    run: str | Path,
    out: str | Path | None = None,
    *,
    watts: float | None = None,
    carbon: float | None = None,
    device: torch.device | str | None = None,
    console: Console | None = None,
) -> Path:
    """One HTML file about a run that opens anywhere, by default report.html in its folder.

    `watts` of the device and `carbon` in kg of CO2 equivalent a kWh replace what the report would assume.
    """
    place, chosen = None if out is None else Path(out), _device(device)
    with _progress(console) as progress:
        return runs.report(Path(run), place, watts=watts, carbon=carbon, device=chosen, progress=progress)


def watch(
    folders: Names, *, host: str = "127.0.0.1", port: int | None = None, announce: Callable[[str], None] = print
) -> None:
    """Serve the reports of runs while they go on, several compared, until Ctrl-C."""
    serve([Path(folder) for folder in _listed(folders)], host=host, port=port, announce=announce)


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
    """A page in the browser to look around in what an encoder sees, until Ctrl-C. Needs the extra `explore`."""
    encoder = open_encoder(model, weights=weights, device=_device(device))
    explored.explore(
        model if isinstance(model, str | Path) else type(model).__name__,
        encoder,
        [Path(image) for image in _listed(images)],
        size=size,
        host=host,
        port=port,
        open_browser=open_browser,
        announce=announce,
    )


def _device(device: torch.device | str | None) -> torch.device:
    return choose_device(None if device is None else str(device))


def _progress(console: Console | None) -> EvaluationProgress:
    return EvaluationProgress(console or Console(quiet=True))


def as_config(recipe: Recipe, overrides: Iterable[str] = ()) -> Config:
    """A config as it is, or that of a recipe with overrides."""
    if not isinstance(recipe, Config):
        return load_config(recipe, overrides)
    if list(overrides):
        raise CapiError("overrides go with a recipe; a Config is already complete")
    return recipe


def check(
    config: Config,
    *,
    data: Data | None = None,
    device: torch.device | str | None = None,
    rounds: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> RunCheck:
    """Build a config, run real iterations, and say what they cost. Nothing is written.

    With `data` the images are the user's and are looked at; without, they are noise.
    """
    chosen = _device(device)
    opened = partial(open_encoder, device=chosen)
    return checking.check(config, data=data, device=chosen, rounds=rounds, progress=progress, open_encoder=opened)


def pack_shards(
    data: Data,
    out: str | Path,
    *,
    shard_megabytes: float | None = None,
    per_shard: int | None = None,
    shuffle: int | None = 0,
    workers: int | None = None,
    console: Console | None = None,
) -> Packed:
    """Pack images, of a folder or of anything that `pretrain` takes, into tar shards with an index.

    A shard has about `shard_megabytes` (256 by default) or `per_shard` images, in an order shuffled by the seed
    `shuffle` or, with None, as they lie. The same call goes on where an earlier one was ended.
    """
    images, labels = labelled_images(data, console)
    settings = PackingSettings(shard_megabytes, per_shard, shuffle)
    return pack(images, Path(out), settings, labels=labels, workers=workers, console=console)


def check_data(
    data: Data,
    *,
    limit: int | None = None,
    channels: int = 3,
    workers: int | None = None,
    console: Console | None = None,
) -> Survey:
    """Read all images once, or `limit` of them spread evenly, and say what they are like and which are broken."""
    source = open_images(data, console)
    processes = os.cpu_count() or 1 if workers is None else workers
    return survey(source, Decoder(channels, reduced=True), workers=processes, limit=limit, console=console)
