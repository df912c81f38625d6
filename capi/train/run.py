"""A whole pretraining run: guard the folder, build, resume, train, and leave pictures behind."""

import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from capi.config.files import differences, dump_config
from capi.config.schema import Config
from capi.data.locations import DataLocation, describe_data, open_images
from capi.data.reader import BrokenImages
from capi.data.recorded import with_sample
from capi.data.sources import ImageSource, masks_warning
from capi.data.survey import quick_statistics, statistics_warning
from capi.errors import CapiError, counted
from capi.runtime.devices import choose_workers
from capi.runtime.processes import ALONE, Processes, lost_process_is_an_error
from capi.runtime.progress import RunProgress
from capi.runtime.sharding import chosen_shards
from capi.runtime.summary import Summary
from capi.train import build
from capi.train.checkpoint import Checkpoints, Position
from capi.train.compilation import compile_networks, compiler_warning, wants_compiling
from capi.train.cost.hardware import peak_images_per_second
from capi.train.distribute import distribute, whole_view
from capi.train.evaluations import build_evaluations
from capi.train.health import ADVISED, RunFacts, Watchman
from capi.train.initial_weights import Initialized, initialize
from capi.train.loop import Ending, Evaluation, Loop
from capi.train.metrics import LOGGERS, JsonLines, Logger, close, cut_after, require_loggers
from capi.train.step import Learner
from capi.types import Statistics, VisionEncoder
from capi.zoo import build as networks
from capi.zoo.checkpoint_files import StoredTensors
from capi.zoo.run_folder import CONFIG, FILE, RunFolder, read_metrics, run_config

_LOG = logging.getLogger("capi")
# Of its peak: below this share a learning rate is as good as none.
_LEAST_EXTENDED = 0.01
# What may change when a run is resumed, since it does not change what is computed.
_FREE_KEYS = (
    "checkpoint",
    "distributed",
    "evaluations",
    "run.activation_checkpointing",
    "run.compile",
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


@dataclass(frozen=True, repr=False)
class PretrainedRun(Summary):
    """What a call of `pretrain` leaves: the folder, the step it reached, whether that is the last one, a report."""

    path: Path
    step: int
    finished: bool
    report: Path | None = None
    # Whether a scheduler's signal ended it, and whether this process is the one that speaks for all.
    preempted: bool = False
    is_main: bool = True

    def summary(self) -> tuple[str, dict[str, str]]:
        how = "complete" if self.finished else "stopped; resume=True continues it"
        report = {} if self.report is None else {"report": str(self.report)}
        return f"{self.path}: {how}", {"step": str(self.step), "encoder": f"capi.load({str(self.path)!r})", **report}


def pretrain(
    config: Config,
    *,
    data: DataLocation,
    out: str | Path,
    resume: bool = False,
    extend: bool = False,
    overwrite: bool = False,
    device: torch.device,
    loggers: Sequence[Logger] = (),
    evaluations: Sequence[Evaluation] = (),
    pictures: Callable[[Config, ImageSource, RunFolder], Sequence[Evaluation]] = lambda *_: (),
    processes: Processes = ALONE,
    console: Console | None = None,
) -> PretrainedRun:
    """Train to the end or to a signal. Bad input raises before anything is written.

    `pictures` makes the evaluations that draw into the run's folder, once it is known what the run is.
    """
    with ExitStack() as stack:
        with processes.together():
            given = _examine(config, RunFolder(Path(out)), data, resume, extend, overwrite, device, processes, console)
            configured = build_evaluations(given.config, device)
        processes.refuse_differences("config", dump_config(given.config))
        with processes.together():
            precision = build.describe_precision(given.config, device)
        processes.refuse_differences("run.precision or clustering.precision", precision)
        images = f"{counted(len(given.source), 'image')}, fingerprint {given.source.fingerprint}"
        processes.refuse_differences("set of images", images)
        with processes.together():
            learner, initialized = _begin(given, device) if processes.is_main else (None, None)
        processes.from_main(lambda: _make_folder(given, initialized))
        with processes.together():
            given.folder.wait_until_seen()
        if processes.is_main:
            _tell(initialized, console)
            for warning in _warnings(given):
                _warn(warning, console)
        compiled = _compiles(given.config, device, processes, console)
        with processes.together():
            if processes.is_main:
                stack.enter_context(given.folder.locked())
        with lost_process_is_an_error():
            spread = _spread(given, learner, processes, device)
        if compiled:
            compile_networks(spread)
        run = _Run(given, spread, device, processes)
        everything = [*configured, *evaluations, *pictures(given.config, given.source, given.folder)]
        return run.train(loggers, everything, console if processes.is_main else None)


@dataclass(frozen=True)
class _Given:
    """What a run is to be, once everything that could be refused has been looked at."""

    config: Config
    folder: RunFolder
    source: ImageSource
    facts: dict[str, Any]
    resumed: bool
    frozen_encoder: VisionEncoder | None
    extended_from: int | None = None
    """The steps that the run had before it was extended."""


def _examine(
    config: Config,
    folder: RunFolder,
    data: DataLocation,
    resume: bool,
    extend: bool,
    overwrite: bool,
    device: torch.device,
    processes: Processes,
    console: Console | None,
) -> _Given:
    """Bad input raises here, before anything is written."""
    source = open_images(data, console if processes.is_main else None)
    resumed = resume and folder.exists
    config = build.resolve_steps(config, len(source))
    extended_from = None
    if resumed:
        # Where the mean and std are `auto`, those that the run found when it was started.
        started = run_config(folder).data
        own = {name: getattr(started, name) for name in ("mean", "std") if getattr(config.data, name) == "auto"}
        config = config.model_copy(update={"data": config.data.model_copy(update=own)})
        config, extended_from = _extended(config, folder, extend)
    elif extend:
        raise CapiError(
            f"--extend trains a finished run longer, but {folder.path} holds none: give --resume and its --out"
        )
    config = build.resolve_statistics(config, source)
    build.check_components(config)
    build.refuse_idle_adapt(config)
    config, frozen_encoder = build.resolve_target(config, device=device)
    facts = describe_data(data, source)
    if resumed:
        _refuse_other_run(folder, config, facts, extended_from)
        networks.check_code(folder.record(), config, resumed=True)
        if processes.is_main:
            _refuse_other_shapes(folder, config)
    elif folder.exists and (overwrite or _is_untrained(folder)):
        # Refuses a run of a newer version.
        folder.record()
    else:
        folder.refuse_unless_free()
    # Images that cannot be read at all raise before anything is written.
    failure = build.training_batches(config, source, workers=0, processes=processes)[0].failure
    if failure:
        raise CapiError(failure)
    if processes.is_main and not resumed:
        measured = quick_statistics(build.build_reader(config, source))
        facts |= {"statistics": measured._asdict()} if measured else {}
    if processes.size > 1:
        chosen_shards(processes, config.distributed.shards)
    require_loggers(config.run.loggers or [])
    return _Given(config, folder, source, facts, resumed, frozen_encoder, extended_from)


def _extended(config: Config, folder: RunFolder, extend: bool) -> tuple[Config, int | None]:
    """The config with the schedule that the run began with, and the steps that it had if it gets more now.

    Added steps keep the last learning rate and momentum: a rate that rose again would undo what was learnt at low ones,
    and so a run that is extended twice is the run that is extended once as far.
    """
    before, wanted = run_config(folder).optimization, config.optimization
    schedule, extended_from = wanted.schedule_steps or before.schedule_steps, None
    if extend and wanted.steps < before.steps:
        raise CapiError(
            f"--extend adds steps to the {before.steps} of {folder.path}, but optimization.steps is {wanted.steps}: "
            "give more"
        )
    if extend and wanted.steps > before.steps:
        schedule, extended_from = before.schedule_steps or before.steps, before.steps
        last = build.build_schedule(before).learning_rate(schedule - 1, peak=1.0)
        if last < _LEAST_EXTENDED:
            raise CapiError(
                f"{folder.path} ended at {last:.2g} of its peak learning rate, where more steps learn nothing: start "
                f"another run from its weights with init.encoder={folder.path}"
            )
    optimization = wanted.model_copy(update={"schedule_steps": schedule})
    return config.model_copy(update={"optimization": optimization}), extended_from


def _is_untrained(folder: RunFolder) -> bool:
    """Whether a run was stopped before its first step, so that nothing is lost when another takes its folder."""
    trained = max(Checkpoints(folder.checkpoints).steps(), default=0)
    return trained == 0 and all(record.get("step", 0) == 0 for record in read_metrics(folder.path / FILE))


def _begin(given: _Given, device: torch.device) -> tuple[Learner, Initialized | None]:
    """A learner with its first weights, fresh or as `init` asks."""
    learner = build.build_learner(given.config, device, given.frozen_encoder)
    # A run that was stopped before its first checkpoint starts over, and so from the same weights.
    trained = given.resumed and Checkpoints(given.folder.checkpoints).steps()
    initialized = None if trained else initialize(learner, given.config)
    if initialized and given.resumed:
        _refuse_other_weights(given.folder, initialized)
    return learner, initialized


def _make_folder(given: _Given, initialized: Initialized | None) -> None:
    if given.resumed:
        if given.extended_from is not None:
            with given.folder.locked():
                given.folder.note_extension(dump_config(given.config), given.extended_from)
        return
    if given.folder.exists:
        with given.folder.locked():
            given.folder.clear()
    data = with_sample(given.facts, given.source)
    origin = {"init": initialized.record} if initialized else {}
    record = {"seed": given.config.seed, "data": data, **networks.target_record(given.config), **origin}
    given.folder.create(dump_config(given.config), record)


def _spread(given: _Given, learner: Learner | None, processes: Processes, device: torch.device) -> Learner:
    """The learner of this process, which alone has the one it began with."""
    if processes.size == 1:
        assert learner is not None
        return learner
    return distribute(given.config, learner, processes, device, given.frozen_encoder)


def run_facts(config: Config, record: Mapping[str, Any] | None = None, device: object = None) -> RunFacts:
    """What the judgement of a run depends on; `record` is what run.json holds."""
    record = record or {}
    data = record.get("data")
    images = data.get("images") if isinstance(data, Mapping) else None
    recorded = networks.recorded_target(record, config) if networks.TARGET in record else None
    return RunFacts(
        prototypes=config.clustering.prototypes,
        width=config.model.width,
        total_steps=config.optimization.steps,
        # How many values it gives for a patch, which needs its encoder, does not matter here.
        target=recorded or networks.target_class(config).facts(),
        settings=frozenset(setting for setting in ADVISED if _is_set(config, setting, device)),
        batch_size=config.optimization.batch_size,
        images=images if isinstance(images, int) else None,
        broken_limit=config.data.broken_limit,
        is_evaluated=bool(config.evaluations),
    )


def _is_set(config: Config, setting: str, device: object) -> bool:
    """Whether a config has a value, such as masking.roll=true."""
    if setting == "run.precision=float32" and config.run.precision == "auto":
        return device is not None and "cuda" not in str(device)
    key, _, value = setting.partition("=")
    own: Any = config
    for name in key.split("."):
        own = getattr(own, name)
    return str(own).lower() == value


@dataclass
class _Run:
    """A run whose folder is ready. All processes train; the main one alone writes and shows."""

    given: _Given
    learner: Learner
    device: torch.device
    processes: Processes

    @property
    def config(self) -> Config:
        return self.given.config

    @property
    def folder(self) -> RunFolder:
        return self.given.folder

    def train(
        self, loggers: Sequence[Logger], evaluations: Sequence[Evaluation], console: Console | None
    ) -> PretrainedRun:
        checkpoints = self._checkpoints()
        position = self._position(checkpoints)
        if self.processes.is_main:
            self.folder.note_start(position.step, str(self.device), self.processes.size)
        if position.step == self.config.optimization.steps:
            return self._done(position, "finished")
        everywhere = self._loggers(position, loggers) if self.processes.is_main else []
        total, name = self.config.optimization.steps, self.folder.path.name
        try:
            with RunProgress(console or Console(quiet=True), total, position.step, name) as progress:
                ending = self._loop(position, checkpoints, everywhere, evaluations, progress).run()
        finally:
            for logger in everywhere:
                close(logger)
        return self._done(position, ending)

    def _done(self, position: Position, ending: Ending) -> PretrainedRun:
        return PretrainedRun(
            self.folder.path,
            position.step,
            finished=ending == "finished",
            preempted=ending == "preempted",
            is_main=self.processes.is_main,
        )

    def _checkpoints(self) -> Checkpoints:
        settings = self.config.checkpoint
        in_background = settings.asynchronous
        return Checkpoints(
            self.folder.checkpoints,
            keep=settings.keep,
            milestone_steps=settings.milestone_steps,
            processes=self.processes,
            asynchronous=self.device.type != "cpu" if in_background is None else in_background,
        )

    def _position(self, checkpoints: Checkpoints) -> Position:
        """Where the run stands, once its newest checkpoint is loaded."""

        def newest() -> int | None:
            checkpoints.remove_partial()
            return max(checkpoints.steps(), default=None)

        step = self.processes.from_main(newest)
        with self.processes.together():
            return Position() if step is None else checkpoints.load(self.learner, step)

    def _loggers(self, position: Position, others: Sequence[Logger]) -> list[Logger]:
        path = self.folder.path / FILE
        # Without a checkpoint the run starts over, the evaluation before the first step included.
        cut_after(path, position.step or -1)
        return [JsonLines(path), *self._chosen_loggers(position.step), *others]

    def _loop(
        self,
        position: Position,
        checkpoints: Checkpoints,
        loggers: Sequence[Logger],
        evaluations: Sequence[Evaluation],
        progress: RunProgress,
    ) -> Loop:
        config, source, processes = self.config, self.given.source, self.processes
        workers = choose_workers(config.data.workers, self.device, processes=processes.count_on_machine())
        batches = build.training_batches(config, source, workers, processes)
        # Of what `checkpoint.best` names, over what earlier starts of the run wrote.
        records = read_metrics(self.folder.path / FILE) if config.checkpoint.best else []
        scores = [record.get(str(config.checkpoint.best)) for record in records if 0 < record["step"] <= position.step]
        loop = Loop(
            learner=self.learner,
            settings=build.loop_settings(config),
            position=position,
            batches=build.batch_loader(batches, workers, self.device),
            to_device=build.device_mover(config, self.device),
            checkpoints=checkpoints,
            broken=BrokenImages(len(source), config.data.broken_limit, position.broken),
            replay_folder=self.folder.path / "replay",
            loggers=loggers,
            evaluations=evaluations,
            progress=progress,
            best_score=max((score for score in scores if isinstance(score, float)), default=-math.inf),
            watchman=self._watchman() if processes.is_main else None,
            processes=processes,
            peak_images_per_second=peak_images_per_second(config, self.learner, self.device, processes.size),
        )
        if processes.size > 1:
            loop.view = whole_view(config, processes, self.device, self.given.frozen_encoder)
        return loop

    def _watchman(self) -> Watchman:
        """Knows what earlier starts of the run wrote."""
        watchman = Watchman(run_facts(self.config, self.folder.record(), self.device))
        for record in read_metrics(self.folder.path / FILE):
            watchman.see(record)
        return watchman

    def _chosen_loggers(self, start: int) -> list[Logger]:
        names = self.config.run.loggers
        if names is None:
            names = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
        described: dict[str, Any] = self.config.model_dump(mode="json")
        return [LOGGERS[name](self.folder.path, start, described) for name in names]


def _refuse_other_run(folder: RunFolder, config: Config, facts: dict[str, Any], extended_from: int | None) -> None:
    """A run resumes with what it was started with, or not at all."""
    length = ("optimization.steps", "optimization.schedule_steps")
    changed = differences(run_config(folder), config, (*_FREE_KEYS, *(length if extended_from else ())))
    if [line.split()[0] for line in changed] == ["optimization.steps"]:
        before, wanted = run_config(folder).optimization.steps, config.optimization.steps
        longer = f", or --extend to train it to {wanted}" if wanted > before else ""
        raise CapiError(
            f"{folder.path} was started with optimization.steps={before}, not {wanted}: give that to resume it{longer}"
        )
    if changed:
        raise CapiError(
            f"{folder.path} was started with another config ({'; '.join(changed)}): resume with the same one, "
            f"which {folder.path / CONFIG} is as a recipe, or give --out another folder"
        )
    before = folder.record().get("data", {})
    if before.get("fingerprint") != facts["fingerprint"]:
        raise CapiError(
            f"{folder.path} was started with {before.get('images')} images of {before.get('path')}, and "
            f"{facts['path']} now gives {facts['images']} images or other names: a run resumes with the same images, "
            "so restore them, or start another run"
        )


def _refuse_other_shapes(folder: RunFolder, config: Config) -> None:
    """A checkpoint of another model is refused before memory is taken for the one of the config."""
    checkpoints = Checkpoints(folder.checkpoints)
    for step in checkpoints.steps()[-1:]:
        stored = StoredTensors(checkpoints.path(step))
        names = [name.removeprefix("student.") for name in stored.weightless if name.startswith("student.")]
        student = networks.weightless_student(config, names, str(folder.path / CONFIG))
        stored.check({f"student.{name}": value for name, value in student.state_dict().items()})


def _refuse_other_weights(folder: RunFolder, initialized: Initialized) -> None:
    """What `init` names may have changed since a run was started."""
    before = folder.record().get("init", {}).get("sha256")
    if before != initialized.sha256:
        raise CapiError(
            f"{folder.path} was started from other weights than {initialized.source} holds now, and has no checkpoint "
            "yet: restore them, or start again with --overwrite"
        )


def _warnings(given: _Given) -> Iterator[str]:
    """What makes it likely that little is learnt from these images."""
    # Images that are far from what the config normalizes them with look nearly constant to the model.
    measured = given.facts.get("statistics")
    warning = statistics_warning(Statistics(**measured), networks.statistics(given.config)) if measured else None
    if warning:
        yield warning
    if warning := build.few_warning(len(given.source)) or build.batch_warning(given.config, len(given.source)):
        yield warning
    if warning := masks_warning(given.source):
        yield warning


def _compiles(config: Config, device: torch.device, processes: Processes, console: Console | None) -> bool:
    """Whether the networks are compiled: in all processes or in none, as far as can be known before the first step."""
    wanted = wants_compiling(config.run.compile, device)
    warning = compiler_warning(device) if wanted else None
    (fails,) = processes.any(warning is not None)
    if fails:
        everywhere = processes.gather(warning)
        rank, first = next((rank, each) for rank, each in enumerate(everywhere) if each)
        if processes.is_main:
            _warn(f"process {rank}: {first}" if rank else first, console)
    return wanted and not fails


def _warn(warning: str, console: Console | None) -> None:
    if console is None:
        _LOG.warning(warning)
    else:
        console.print(f"Warning: {warning}", markup=False, highlight=False, soft_wrap=True)


def _tell(initialized: Initialized | None, console: Console | None) -> None:
    """What a run starts from, before its progress: on the console, or in the log where there is none."""
    for line in initialized.lines if initialized else ():
        if console is None:
            _LOG.info(line)
        else:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
