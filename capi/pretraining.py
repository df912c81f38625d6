"""A whole pretraining run: guard the folder, build, resume, train, and leave pictures behind."""

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from capi import benchmark, build
from capi.config.loading import differences, dump_config, parse_config, parse_yaml
from capi.config.schema import Config
from capi.data.broken import BrokenImages
from capi.data.opening import Data, describe_data, open_images
from capi.data.sources import ImageSource
from capi.errors import CapiError
from capi.initialising import Initialised, initialise
from capi.method.alarms import RunFacts, Watchman
from capi.train.checkpoint import Checkpoints, Position
from capi.train.loop import Evaluation, Loop
from capi.train.metrics import FILE, LOGGERS, JsonLines, Logger, close, cut_after, read_metrics, require_loggers
from capi.train.progress import RunProgress
from capi.train.run_folder import CONFIG, RunFolder
from capi.train.step import Learner
from capi.types import VisionEncoder

_LOG = logging.getLogger("capi")
# What may change when a run is resumed, since it does not change what is computed.
_FREE_KEYS = (
    "checkpoint",
    "evaluations",
    "run.log_steps",
    "run.loggers",
    "run.report",
    "run.snapshots",
    "run.non_finite",
    "run.non_finite_limit",
    "data.workers",
    "data.cache_mib",
    "data.broken_limit",
)


@dataclass(frozen=True)
class PretrainedRun:
    """What a call of `pretrain` leaves: the folder, the step it reached, whether that is the last one, a report."""

    path: Path
    step: int
    finished: bool
    report: Path | None = None


def pretrain(
    config: Config,
    *,
    data: Data,
    out: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    device: torch.device,
    loggers: Sequence[Logger] = (),
    evaluations: Sequence[Evaluation] = (),
    pictures: Callable[[Config, ImageSource, RunFolder], Sequence[Evaluation]] = lambda *_: (),
    open_encoder: Callable[[str], VisionEncoder] | None = None,
    console: Console | None = None,
) -> PretrainedRun:
    """Train to the end or to a signal. Bad input is told before anything is written.

    `pictures` makes the evaluations that draw into the run's folder, once it is known what the run is. `open_encoder`
    opens the encoder that makes the targets of kind `frozen`, and the one that `init` starts from.
    """
    folder, source = RunFolder(Path(out)), open_images(data, console)
    going_on = resume and folder.exists
    config = build.resolve_statistics(_with_known_statistics(config, folder) if going_on else config, source)
    build.mask_sampler(config)
    config, frozen_encoder = build.resolve_target(config, open_encoder)
    facts = describe_data(data, source)
    if going_on:
        _refuse_other_run(folder, config, facts)
    elif overwrite and folder.exists:
        # Refuses a run of a newer version.
        folder.record()
    else:
        folder.refuse_unless_free()
    learner = build.build_learner(config, device, frozen_encoder)
    # A run that was stopped before its first checkpoint starts over, and so from the same weights.
    begun = going_on and Checkpoints(folder.checkpoints).steps()
    initialised = None if begun else initialise(learner, config, open_encoder)
    if initialised and going_on:
        _refuse_other_weights(folder, initialised)
    configured = benchmark.build_evaluations(config, device)
    _try_first_batch(config, source)
    require_loggers(config.run.loggers or [])
    if not going_on:
        if folder.exists:
            with folder.locked():
                folder.clear()
        origin = {"init": initialised.record} if initialised else {}
        folder.create(dump_config(config), {"seed": config.seed, "data": facts, **origin})
    _tell(initialised, console)
    with folder.locked():
        everything = [*configured, *evaluations, *pictures(config, source, folder)]
        return _Run(config, folder, source, learner, device).train(loggers, everything, console)


def run_config(folder: RunFolder) -> Config:
    """The config that a run was started with."""
    folder.record()
    source = str(folder.path / CONFIG)
    return parse_config(parse_yaml(folder.config_text(), source), source=source)


def run_facts(config: Config) -> RunFacts:
    """What the healthy ranges of a run depend on."""
    return RunFacts(config.clustering.prototypes, config.model.width, config.optimization.steps)


@dataclass
class _Run:
    """A run whose folder is ready."""

    config: Config
    folder: RunFolder
    source: ImageSource
    learner: Learner
    device: torch.device

    def train(
        self, loggers: Sequence[Logger], evaluations: Sequence[Evaluation], console: Console | None
    ) -> PretrainedRun:
        kept = self.config.checkpoint
        checkpoints = Checkpoints(self.folder.checkpoints, keep=kept.keep, milestone_steps=kept.milestone_steps)
        checkpoints.remove_partial()
        position = checkpoints.load(self.learner) if checkpoints.steps() else Position()
        self.folder.note_start(position.step, str(self.device))
        if position.step == self.config.optimization.steps:
            # Drawn again, since the kill may have come between the last checkpoint and the picture.
            self._draw_curves()
            return PretrainedRun(self.folder.path, position.step, finished=True)
        # Without a checkpoint the run starts over, the evaluation before the first step included.
        cut_after(self.folder.path / FILE, position.step if checkpoints.steps() else -1)
        if self.config.run.compile:
            build.compile_networks(self.learner)
        everywhere: list[Logger] = [JsonLines(self.folder.path / FILE), *self._chosen_loggers(position.step), *loggers]
        total, name = self.config.optimization.steps, self.folder.path.name
        try:
            with RunProgress(console or Console(quiet=True), total, position.step, name) as progress:
                finished = self._loop(position, checkpoints, everywhere, evaluations, progress).run()
        finally:
            for logger in everywhere:
                close(logger)
        self._draw_curves()
        return PretrainedRun(self.folder.path, position.step, finished)

    def _loop(
        self,
        position: Position,
        checkpoints: Checkpoints,
        loggers: Sequence[Logger],
        evaluations: Sequence[Evaluation],
        progress: RunProgress,
    ) -> Loop:
        config = self.config
        workers = build.choose_workers(config, self.device, os.cpu_count() or 1)
        batches = build.training_batches(config, self.source, workers)
        return Loop(
            learner=self.learner,
            settings=build.loop_settings(config),
            position=position,
            batches=build.batch_loader(batches, workers, self.device),
            to_device=build.device_mover(config, self.device),
            checkpoints=checkpoints,
            broken=BrokenImages(len(self.source), config.data.broken_limit, position.broken),
            replay_folder=self.folder.path / "replay",
            loggers=loggers,
            evaluations=evaluations,
            progress=progress,
            watchman=self._watchman(),
        )

    def _watchman(self) -> Watchman:
        """Knows what earlier starts of the run wrote."""
        watchman = Watchman(run_facts(self.config))
        for record in read_metrics(self.folder.path / FILE):
            watchman.see(record)
        return watchman

    def _chosen_loggers(self, start: int) -> list[Logger]:
        names = self.config.run.loggers
        if names is None:
            names = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
        described: dict[str, Any] = self.config.model_dump(mode="json")
        return [LOGGERS[name](self.folder.path, start, described) for name in names]

    def _draw_curves(self) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            _LOG.info("curves are drawn where matplotlib is installed: pip install 'capi[pictures]'")
            return
        from capi.visualize.curves import draw_curves

        self.folder.pictures.mkdir(exist_ok=True)
        draw_curves(read_metrics(self.folder.path / FILE), self.folder.pictures / "curves.png")


def _with_known_statistics(config: Config, folder: RunFolder) -> Config:
    """Where the mean and deviation are `auto`, those that the run found when it was started."""
    known = run_config(folder).data
    found = {name: getattr(known, name) for name in ("mean", "std") if getattr(config.data, name) == "auto"}
    return config.model_copy(update={"data": config.data.model_copy(update=found)})


def _try_first_batch(config: Config, source: ImageSource) -> None:
    """Images that cannot be read at all are told before anything is written."""
    failure = build.training_batches(config, source, workers=0)[0].failure
    if failure:
        raise CapiError(failure)


def _refuse_other_run(folder: RunFolder, config: Config, facts: dict[str, Any]) -> None:
    """A run goes on with what it was started with, or not at all."""
    changed = differences(run_config(folder), config, _FREE_KEYS)
    if changed:
        raise CapiError(
            f"{folder.path} was started with another config ({'; '.join(changed)}): resume with the same one, or give "
            "--out another folder"
        )
    before = folder.record()["data"]
    if before["fingerprint"] != facts["fingerprint"]:
        raise CapiError(
            f"{folder.path} was started with {before['images']} images of {before['path']}, and {facts['path']} now "
            f"gives {facts['images']} images or other names: a run goes on with the same images, so restore them, or "
            "start another run"
        )


def _refuse_other_weights(folder: RunFolder, initialised: Initialised) -> None:
    """What `init` names may have changed since a run was started."""
    before = folder.record().get("init", {}).get("sha256")
    if before != initialised.sha256:
        raise CapiError(
            f"{folder.path} was started from other weights than {initialised.source} holds now, and has no checkpoint "
            "yet: restore them, or start anew with --overwrite"
        )


def _tell(initialised: Initialised | None, console: Console | None) -> None:
    """What a run starts from, before its progress: on the console, or in the log where there is none."""
    for line in initialised.lines if initialised else ():
        if console is None:
            _LOG.info(line)
        else:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
