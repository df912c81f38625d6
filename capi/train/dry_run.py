"""What a run would cost: real iterations of a config, on noise or on the user's images. Nothing is written."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from capi.config.files import Overrides, Recipe, as_config, override_texts
from capi.config.schema import Config
from capi.config.trust import Trust, trusting
from capi.data.loader import LoadedBatch
from capi.data.locations import DataLocation, open_images
from capi.data.sources import masks_warning
from capi.data.survey import DataSummary, statistics_warning, summarize
from capi.errors import CapiError, counted
from capi.method.masking import PatchGrid
from capi.method.targets import LossLabel
from capi.runtime.devices import choose_device, is_accelerator
from capi.runtime.summary import Summary
from capi.train import build
from capi.train.build import build_learner, choose_precision, mask_sampler
from capi.train.cost.memory import Saving
from capi.train.cost.plan import networks
from capi.train.cost.step import StepCost, measure_step, memory_of, random_batch
from capi.train.initial_weights import initialize
from capi.types import MaskedBatch
from capi.zoo.build import loss_label, statistics, target_class


@dataclass(frozen=True, repr=False)
class RunCheck(Summary):
    """What a run would cost, and what its images are like; without images there is only the first."""

    cost: StepCost
    data: DataSummary | None
    images_per_second_read: float | None
    steps: int
    """Of the whole run, of `optimization.epochs` too."""
    device: str
    loss: LossLabel
    warnings: tuple[str, ...] = ()
    """Where the images are far from what the config normalizes them with, or fewer than a batch has."""

    def summary(self) -> tuple[str, dict[str, str]]:
        cost, read = self.cost, self.images_per_second_read
        rows = {
            "trained": f"{cost.trained_parameters / 1e6:.1f} M parameters, "
            f"{cost.encoder_parameters / 1e6:.1f} M of them in the encoder",
            "iteration": f"{cost.seconds:.3f} s for {counted(cost.batch_size, 'image')}, {cost.images_per_second:.1f} "
            f"images/s" + ("" if read is None else f"; {read:.0f} images/s are read by one process"),
            "memory": f"{cost.peak_bytes / 2**30:.2f} GiB at its peak",
            "whole run": f"{cost.seconds * self.steps / 3600:.2f} h for {counted(self.steps, 'iteration')}, without "
            "reading data",
        }
        if self.data is not None:
            rows["images"] = f"{self.data.total}, {len(self.data.broken)} of {self.data.looked_at} cannot be read"
        return "What a run would cost: nothing was written", rows | (
            {"warnings": "; ".join(self.warnings)} if self.warnings else {}
        )


def check(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    data: DataLocation | None = None,
    device: torch.device | str | None = None,
    rounds: int = 3,
    progress: Callable[[], None] = lambda: None,
    trust: Trust = (),
    **sections: Any,
) -> RunCheck:
    """Build a recipe or config, run real iterations, and say what they cost. Nothing is written.

    With `data` the images are the user's and are looked at; without, they are noise. Overrides and
    `trust` are those of `pretrain`.
    """
    overrides = override_texts(overrides, sections)
    with trusting(trust, overrides):
        return _checked(as_config(recipe, overrides), data, choose_device(device), rounds, progress)


def _checked(
    config: Config, data: DataLocation | None, device: torch.device, rounds: int, progress: Callable[[], None]
) -> RunCheck:
    summary, read_rate, masks = None, None, None
    try:
        if data is None:
            _refuse_too_large(config, device)
            batches = [_noise(config, device) for _ in range(config.optimization.micro_batches)]
        else:
            config, summary, read_rate, loaded, masks = _look_at(config, data, device)
            batches = [build.device_mover(config, device)(part) for part in loaded]
        config, frozen_encoder = build.resolve_target(config, device=device)
        learner = build_learner(config, device, frozen_encoder)
        # What the run would start from must be there and fit.
        initialize(learner, config)
        cost = measure_step(learner, batches, PatchGrid(*config.grid).size, rounds, progress)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CapiError(_too_large(config)) from error
    except RuntimeError as error:
        # What torch raises when the memory of a CPU runs out has no class of its own.
        if "alloc" not in str(error):
            raise
        raise CapiError(_too_large(config)) from error
    if not math.isfinite(cost.student_loss):
        raise CapiError(f"the loss is {cost.student_loss}: a temperature, rate or number of iterations is out of range")
    warnings: list[str | None] = []
    if summary:
        warnings.append(statistics_warning(summary.statistics, statistics(config)))
        warnings += [build.few_warning(summary.total) or build.batch_warning(config, summary.total), masks]
    steps, loss = config.optimization.known_steps, loss_label(config)
    return RunCheck(cost, summary, read_rate, steps, str(device), loss, tuple(filter(None, warnings)))


def _noise(config: Config, device: torch.device) -> MaskedBatch:
    return random_batch(
        masks=mask_sampler(config),
        grid=PatchGrid(*config.grid),
        image_shape=(config.model.channels, *config.data.height_and_width),
        batch_size=config.optimization.batch_size // config.optimization.micro_batches,
        seed=config.seed,
        device=device,
    )


def _look_at(
    config: Config, data: DataLocation, device: torch.device
) -> tuple[Config, DataSummary, float, list[LoadedBatch], str | None]:
    """A sample of the images, the first batch, timed, and a warning where some of them look like masks."""
    source = open_images(data)
    config = build.resolve_steps(build.resolve_statistics(config, source), len(source))
    _refuse_too_large(config, device)
    summary = summarize(build.build_reader(config, source))
    batches = build.training_batches(config, source, workers=0)
    start = time.perf_counter()
    loaded = [batches[number] for number in range(config.optimization.micro_batches)]
    for part in loaded:
        if part.failure:
            raise CapiError(part.failure)
    rate = config.optimization.batch_size / (time.perf_counter() - start)
    return config, summary, rate, loaded, masks_warning(source)


def _refuse_too_large(config: Config, device: torch.device) -> None:
    """By the plan of its memory, before any is taken. What a frozen encoder takes is not planned."""
    if target_class(config).wants_encoder:
        return
    saving = Saving(
        mixed_precision=choose_precision(config.run.precision, device) == torch.bfloat16,
        checkpointing=config.run.activation_checkpointing,
        micro_batches=config.optimization.micro_batches,
    )
    planned = replace(networks(config), accelerator=is_accelerator(device))
    if planned.memory(config.optimization.batch_size, saving).peak > memory_of(device):
        raise CapiError(_too_large(config))


def _too_large(config: Config) -> str:
    return (
        f"a batch of {counted(config.optimization.batch_size, 'image')} does not fit the memory of this machine: raise "
        "optimization.micro_batches, or lower optimization.batch_size or the model"
    )
