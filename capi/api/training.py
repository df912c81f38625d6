"""Runs: planned, checked, trained, looked after, and their images."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from capi.api.arguments import Names, device_of, listed, progress_on
from capi.config.loading import load_config
from capi.config.schema import Config
from capi.config.trust import Trust, trusted_code
from capi.data.decoding import Decoder
from capi.data.image_lists import labelled_images
from capi.data.opening import Data, open_images
from capi.data.packing import Packed, PackingSettings, pack
from capi.data.survey import Survey, survey
from capi.errors import CapiError, expect
from capi.report import runs
from capi.report.doctor import Diagnosis, diagnose
from capi.report.watch import serve
from capi.train import dry_run
from capi.train import run as pretraining
from capi.train.cost.hardware import find_gpu
from capi.train.cost.plan import Assumptions, RunPlan, plan_run
from capi.train.cost.suggest import Suggestion, look_at
from capi.train.cost.suggest import suggest as suggest_run
from capi.train.dry_run import RunCheck
from capi.train.loop import Evaluation
from capi.train.metrics import Logger
from capi.train.run import PretrainedRun
from capi.zoo.encoders import open_configured_encoder

Recipe = str | Path | Config


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
    trust: Trust = (),
    console: Console | None = None,
) -> PretrainedRun:
    """Pretrain on unlabelled images.

    `data` is a folder, shards, tables, a name of the Hub (docs/data.md), several of these with weights, or `demo` for
    the built-in photos; `out` becomes the folder of the run. `resume` goes on with
    the run that is there, if there is one; `overwrite` replaces it. A logger is called with every record of metrics.
    `trust` names the Python files that the recipe may import encoders from; those that `overrides` name need no trust.
    With a `console` there is a progress bar. At the end a report is written, report.html in the run's folder.
    """
    expect("out", out, (str, Path), "the folder of the run")
    overrides = [overrides] if isinstance(overrides, str) else list(overrides)
    config, trusted, chosen = as_config(recipe, overrides), trusted_code(trust, overrides), device_of(device)
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
        open_encoder=partial(open_configured_encoder, trusted=trusted, device=chosen),
        console=console,
    )
    if done.is_main:
        runs.draw_curves(done.path)
    if not config.run.report or not done.is_main:
        return done
    return replace(done, report=runs.conclude(done.path, data, finished=done.finished, device=chosen))


def check(
    config: Config,
    *,
    data: Data | None = None,
    device: torch.device | str | None = None,
    rounds: int = 3,
    progress: Callable[[], None] = lambda: None,
    trust: Trust = (),
) -> RunCheck:
    """Build a config, run real iterations, and say what they cost. Nothing is written.

    With `data` the images are the user's and are looked at; without, they are noise. `trust`: see `pretrain`.
    """
    chosen = device_of(device)
    opened = partial(open_configured_encoder, trusted=trusted_code(trust), device=chosen)
    return dry_run.check(config, data=data, device=chosen, rounds=rounds, progress=progress, open_encoder=opened)


def as_config(recipe: Recipe, overrides: Iterable[str] = ()) -> Config:
    """A config as it is, or that of a recipe with overrides."""
    if not isinstance(recipe, Config):
        return load_config(recipe, overrides)
    if list(overrides):
        raise CapiError("overrides go with a recipe; a Config is already complete")
    return recipe


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
    place, chosen = None if out is None else Path(out), device_of(device)
    with progress_on(console) as progress:
        return runs.report(Path(run), place, watts=watts, carbon=carbon, device=chosen, progress=progress)


def watch(
    folders: Names,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    watts: float | None = None,
    carbon: float | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the reports of runs while they go on, several compared, until Ctrl-C. `watts`, `carbon`: see `report`."""
    places = [Path(folder) for folder in listed(folders)]
    serve(places, host=host, port=port, watts=watts, carbon=carbon, announce=announce)
