"""What a user calls."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from capi import build, pretraining
from capi.benchmark import choose_workers
from capi.build import build_learner, mask_sampler
from capi.config.benchmarks import BenchmarkConfig
from capi.config.loading import load_config
from capi.config.schema import Config
from capi.data.loader import LoadedBatch
from capi.data.sources import ImageSource
from capi.data.statistics import DataSummary, summarize
from capi.encoders import load_weights, open_encoder
from capi.errors import CapiError
from capi.evals.feature_files import read_features
from capi.evals.features import Encoding
from capi.evals.probe_files import load_probe
from capi.evaluation import comparison, evaluating, extraction, prediction, similar
from capi.evaluation.comparison_cells import Cell, Comparison
from capi.evaluation.evaluating import Evaluated
from capi.evaluation.extraction import Extracted
from capi.evaluation.image_lists import list_images
from capi.evaluation.picturing import DEFAULT_KINDS, Pictured, load_prototypes, picture
from capi.evaluation.prediction import Predicted
from capi.evaluation.progress import EvaluationProgress
from capi.evaluation.results import make_folder
from capi.evaluation.similar import Match
from capi.method.masking import Grid
from capi.models.features import CapiEncoder
from capi.pretraining import PretrainedRun
from capi.train.check import StepCost, measure_step, memory_of, random_batch
from capi.train.loop import Evaluation
from capi.train.metrics import Logger
from capi.types import MaskedBatch, VisionEncoder
from capi.weights import ExportFormat, Weights, export_run

__all__ = [
    "build_learner",
    "check",
    "choose_device",
    "compare",
    "evaluate",
    "export",
    "extract",
    "load",
    "mask_sampler",
    "nearest",
    "predict",
    "pretrain",
    "visualize",
]

Recipe = str | Path | Config
Names = str | Path | Sequence[str | Path]
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")


def load(path: str | Path, *, weights: Weights = "teacher") -> CapiEncoder:
    """The frozen encoder of a run folder, of a file of `capi export`, or of a checkpoint in the released layout.

    Of a run `weights` chooses the teacher (the moving average) or the student; files hold one of them. Calling the
    encoder on normalised images gives `Features(pooled, registers, feature_map)`; with `pooled=False` the pooled
    vector is neither computed nor given. A key that is missing, unknown or misshapen is an error that names it.
    """
    return load_weights(Path(path), weights)


def choose_device(name: str | None = None) -> torch.device:
    """The device of that name, or the best one there is: cuda, mps, cpu."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise CapiError(f'the device "{name}" is not there: use cpu, or another device that torch finds') from error
    return device


def pretrain(
    recipe: Recipe,
    overrides: Iterable[str] = (),
    *,
    data: str | Path,
    out: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    device: torch.device | str | None = None,
    loggers: Sequence[Logger] = (),
    evaluations: Sequence[Evaluation] = (),
    console: Console | None = None,
) -> PretrainedRun:
    """Pretrain on a folder of unlabelled images.

    `data` is the folder, or `demo` for the built-in photos; `out` becomes the folder of the run. `resume` goes on with
    the run that is there, if there is one; `overwrite` replaces it. A logger is called with every record of metrics.
    With a `console` there is a progress bar.
    """
    chosen = choose_device(None if device is None else str(device))
    return pretraining.pretrain(
        as_config(recipe, overrides),
        data=data,
        out=out,
        resume=resume,
        overwrite=overwrite,
        device=chosen,
        loggers=loggers,
        evaluations=evaluations,
        open_encoder=partial(open_encoder, device=chosen),
        console=console,
    )


def export(
    run: str | Path, out: str | Path, *, format: ExportFormat = "safetensors", weights: Weights = "teacher"
) -> Path:
    """Write the encoder of a run as one file: safetensors with its config inside, or the released layout."""
    return export_run(Path(run), Path(out), format, weights)


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
    results.json, results.md and the fitted probe.
    """
    with _progress(console) as progress:
        return evaluating.evaluate(
            model,
            benchmark,
            overrides,
            out=out,
            weights=weights,
            device=_device(device),
            overwrite=overwrite,
            progress=progress,
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
    with _progress(console) as progress:

        def announce(cell: Cell) -> None:
            if cell.status == "running":
                progress.begin(f"{cell.model} on {cell.benchmark}: ")

        return comparison.compare(
            [str(model) for model in _listed(models)],
            [str(benchmark) for benchmark in _listed(benchmarks)],
            overrides,
            out=Path(out),
            weights=weights,
            device=_device(device),
            progress=progress,
            on_cell=announce,
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
    chosen = _device(device)
    encoder = open_encoder(model, weights=weights, device=chosen)
    listed = list_images(str(data), split, label)
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    named = {"model": str(model), "weights": weights} if isinstance(model, str | Path) else {}
    with _progress(console) as progress:
        workers = choose_workers(None, chosen, len(listed.images))
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
) -> list[Match]:
    """The images of a file of `extract` that are most similar to an image; with a point `at`, the patches.

    `model` is by default the one the file was made with. With `out`, a contact sheet is written there.
    """
    chosen = _device(device)
    picture = None if out is None else _picture(Path(out))
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


def _picture(path: Path) -> Path:
    """A name that a picture may have; any other is told before the work."""
    if path.suffix.lower() not in PICTURE_ENDINGS or path.is_dir():
        raise CapiError(f"{path} cannot be a picture: give a file that ends in {', '.join(PICTURE_ENDINGS)}")
    return path


def visualize(
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
    runs = {str(model): Path(model) for model in models if Path(model).is_dir()}
    prototypes = {name: load_prototypes(run) for name, run in runs.items()} if "prototypes" in kinds else None
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


@dataclass(frozen=True)
class RunCheck:
    """What a run would cost, and what its images are like; without images there is only the first."""

    cost: StepCost
    data: DataSummary | None
    images_per_second_read: float | None


def check(
    config: Config,
    *,
    data: str | Path | None = None,
    device: torch.device | str | None = None,
    rounds: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> RunCheck:
    """Build a config, run real iterations, and say what they cost. Nothing is written.

    With `data` the images are the user's and are looked at; without, they are noise.
    """
    chosen = choose_device(None if device is None else str(device))
    visible, _, _ = mask_sampler(config).counts(Grid(*config.grid))
    if least_bytes(config, visible) > memory_of(chosen):
        raise CapiError(_too_large(config))
    summary, read_rate = None, None
    try:
        if data is None:
            batches = [_noise(config, chosen) for _ in range(config.optimization.micro_batches)]
        else:
            config, summary, read_rate, loaded = _look_at(config, data)
            batches = [build.device_mover(config, chosen)(part) for part in loaded]
        config, frozen_encoder = build.resolve_target(config, partial(open_encoder, device=chosen))
        learner = build_learner(config, chosen, frozen_encoder)
        cost = measure_step(learner, batches, Grid(*config.grid).size, rounds, progress)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CapiError(_too_large(config)) from error
    except RuntimeError as error:
        # What torch raises when the memory of a CPU runs out has no class of its own.
        if "alloc" not in str(error):
            raise
        raise CapiError(_too_large(config)) from error
    if not math.isfinite(cost.student_loss):
        raise CapiError(f"the loss is {cost.student_loss}: a temperature, rate or number of iterations is out of range")
    return RunCheck(cost, summary, read_rate)


def _noise(config: Config, device: torch.device) -> MaskedBatch:
    return random_batch(
        masks=mask_sampler(config),
        grid=Grid(*config.grid),
        image_shape=(config.model.channels, *config.data.height_and_width),
        batch_size=config.optimization.batch_size // config.optimization.micro_batches,
        seed=config.seed,
        device=device,
    )


def _look_at(config: Config, data: str | Path) -> tuple[Config, DataSummary, float, list[LoadedBatch]]:
    """A sample of the images, and the first batch, timed."""
    source = pretraining.open_images(data)
    config = build.resolve_statistics(config, source)
    summary = summarize(build.build_reader(config, source))
    batches = build.training_batches(config, source, workers=0)
    start = time.perf_counter()
    loaded = [batches[number] for number in range(config.optimization.micro_batches)]
    for part in loaded:
        if part.failure:
            raise CapiError(part.failure)
    return config, summary, config.optimization.batch_size / (time.perf_counter() - start), loaded


def least_bytes(config: Config, visible: int) -> int:
    """Less than an iteration can do with: images, weights with their optimiser, and what the backward pass keeps."""
    model, batch_size = config.model, config.optimization.batch_size
    height, width = config.data.height_and_width
    images = batch_size * model.channels * height * width
    # Weights, gradients, two moments and the teacher's copy.
    weights = 5 * (12 * model.depth * model.width**2 + 2 * config.clustering.prototypes * model.width)
    # Norms, queries, keys, values, attention, and the MLP's hidden layer before and after its GELU.
    token = model.width * (6 + 2 * model.mlp_ratio)
    at_once = batch_size // config.optimization.micro_batches
    kept = at_once * (1 - model.stochastic_depth) * (visible + model.registers) * token * model.depth
    return int(4 * (images + weights + kept))


def _too_large(config: Config) -> str:
    return (
        f"a batch of {config.optimization.batch_size} images does not fit the memory of this machine: raise "
        "optimization.micro_batches, or lower optimization.batch_size or the model"
    )
