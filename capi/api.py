"""What a user calls."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from capi import build, pretraining
from capi.build import build_learner, mask_sampler
from capi.config.loading import load_config
from capi.config.schema import Config
from capi.data.loader import LoadedBatch
from capi.data.statistics import DataSummary, summarize
from capi.errors import CapiError
from capi.method.masking import Grid
from capi.models.features import CapiEncoder
from capi.models.pretrained import load_released
from capi.pretraining import PretrainedRun
from capi.train.check import StepCost, measure_step, memory_of, random_batch
from capi.train.loop import Evaluation
from capi.train.metrics import Logger
from capi.types import MaskedBatch
from capi.weights import ExportFormat, Weights, export_run, load_exported, load_run

__all__ = ["build_learner", "check", "choose_device", "export", "load", "mask_sampler", "pretrain"]

Recipe = str | Path | Config


def load(path: str | Path, *, weights: Weights = "teacher") -> CapiEncoder:
    """The frozen encoder of a run folder, of a file of `capi export`, or of a checkpoint in the released layout.

    Of a run `weights` chooses the teacher (the moving average) or the student; files hold one of them. Calling the
    encoder on normalised images gives `Features(pooled, registers, feature_map)`; with `pooled=False` the pooled
    vector is neither computed nor given. A key that is missing, unknown or misshapen is an error that names it.
    """
    place = Path(path)
    if place.is_dir():
        return load_run(place, weights)
    return load_exported(place) or load_released(place)


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
    return pretraining.pretrain(
        as_config(recipe, overrides),
        data=data,
        out=out,
        resume=resume,
        overwrite=overwrite,
        device=choose_device(None if device is None else str(device)),
        loggers=loggers,
        evaluations=evaluations,
        console=console,
    )


def export(
    run: str | Path, out: str | Path, *, format: ExportFormat = "safetensors", weights: Weights = "teacher"
) -> Path:
    """Write the encoder of a run as one file: safetensors with its config inside, or the released layout."""
    return export_run(Path(run), Path(out), format, weights)


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
        cost = measure_step(build_learner(config, chosen), batches, Grid(*config.grid).size, rounds, progress)
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
