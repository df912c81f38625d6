"""The run: iterate, log, evaluate, save, and end well.

The loop is given everything it needs, evaluations and loggers included. Which step it is at decides everything: the
data and its masks, the learning rate, and what torch draws. So a run that was interrupted and resumed is the same run.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import torch
from safetensors.torch import save_file

from capi.data.loader import LoadedBatch
from capi.data.reader import BrokenImages
from capi.errors import CapiError, nearest
from capi.method.health import HealthMonitor
from capi.runtime.atomic import atomic_path
from capi.runtime.devices import moment, peak_bytes
from capi.runtime.processes import LostProcessError, Processes, SharedError, lost_process_is_an_error
from capi.runtime.randomness import step_seed
from capi.runtime.signals import StopRequest
from capi.train.checkpoint import CheckpointError, Checkpoints, Position
from capi.train.health import Watchman, bar_parts
from capi.train.metrics import Logger
from capi.train.step import Learner, StepMetrics, train_step
from capi.types import MaskedBatch

_LOG = logging.getLogger("capi")
NonFinitePolicy = Literal["stop", "skip", "rollback"]
Ending = Literal["finished", "interrupted", "preempted"]
Batches = Callable[[int, int], Iterator[list[LoadedBatch]]]


@runtime_checkable
class Evaluation(Protocol):
    """Something to know about the encoder before the first step, every so many and after the last: scores by name."""

    every_steps: int

    def run(self, learner: Learner, step: int) -> dict[str, float]: ...


@runtime_checkable
class LoopProgress(Protocol):
    """Shows where the run stands."""

    def update(self, step: int, numbers: Sequence[str]) -> None: ...


@dataclass(frozen=True)
class LoopSettings:
    """The numbers of a run."""

    total_steps: int
    batch_size: int
    seed: int = 0
    log_steps: int = 10
    save_steps: int = 1000
    save_minutes: float | None = 30.0
    best: str | None = None
    """The score whose best checkpoint is kept."""
    non_finite: NonFinitePolicy = "stop"
    non_finite_limit: int = 10


@dataclass
class Loop:
    """One run, from the position it is given to its end or an interruption."""

    learner: Learner
    settings: LoopSettings
    position: Position
    batches: Batches
    to_device: Callable[[LoadedBatch], MaskedBatch]
    checkpoints: Checkpoints
    broken: BrokenImages
    replay_folder: Path
    loggers: Sequence[Logger] = ()
    evaluations: Sequence[Evaluation] = ()
    progress: LoopProgress | None = None
    watchman: Watchman | None = None
    processes: Processes = field(default_factory=Processes)
    # The learner as evaluations see it, with whole weights; None in processes that only help to put it together.
    view: Callable[[Learner], Learner | None] = lambda learner: learner
    # What all devices together would do at their peak; None where that is not known.
    peak_images_per_second: float | None = None

    # The best score so far, of earlier starts too, and whether the last evaluation is better.
    best_score: float = -math.inf
    is_best: bool = False

    def run(self) -> Ending:
        """Train to the end, or to a signal that any process received. Either way the state is saved."""
        self.last_saved = time.monotonic()
        self.ending: Ending | None = None
        with StopRequest() as self.stop:
            self.stop.training = True
            if self.position.step == 0:
                self._evaluate()
            # Only skipping continues after a bad batch; otherwise the first one closes the guard.
            guard, settings = self.learner.guard, self.settings
            guard.patience = settings.non_finite_limit if settings.non_finite == "skip" else 0
            guard.reopen(min(self.position.skipped, guard.patience))
            try:
                while self.position.step < self.settings.total_steps and self.ending is None:
                    # Comes back early only to continue elsewhere in the data, after a roll-back.
                    self._iterate()
            except (CheckpointError, LostProcessError):
                raise
            except CapiError:
                # The run stops itself between two steps, so what it reached can be kept.
                closed_at = guard.report(self.position.step).closed_at
                self.position.step = self.position.step if closed_at is None else closed_at
                self.save()
                raise
            self.save()
            self.checkpoints.finish()
            self.stop.training = False
        return self.ending or "finished"

    def _iterate(self) -> None:
        position, total = self.position, self.settings.total_steps
        self.started, self.evaluated_for = time.monotonic(), 0.0
        self.images_done, device = 0, self.learner.device
        self._begin_window()
        idle_since = None
        for loaded in self.batches(position.step + position.data_offset, total + position.data_offset):
            if self._agree(loaded):
                self._handle_non_finite()
                return
            # Before the first step of a start workers are still being made.
            if idle_since is not None:
                self.idle.append((idle_since, moment(device)))
            batches = [self.to_device(part) for part in loaded]
            # What torch draws may differ between processes, since their images do.
            torch.manual_seed(step_seed(self.settings.seed, position.step + position.data_offset, self.processes.rank))
            logs = (position.step + 1) % self.settings.log_steps == 0 or position.step + 1 == total
            monitor = HealthMonitor() if logs else None
            with lost_process_is_an_error():
                metrics = train_step(self.learner, batches, position.step, monitor)
            position.step += 1
            self.images_done += self.settings.batch_size
            # What is logged, evaluated and saved is read from the device, so that the losses can be as well.
            if (monitor or self._evaluates() or self._saves()) and self._handle_non_finite():
                return
            self._after_step(metrics, monitor)
            idle_since = moment(device)

    def _agree(self, loaded: Sequence[LoadedBatch]) -> bool:
        """What concerns all processes before a step: a signal, an image that cannot be read, a save. True ends here."""
        failure = next((CapiError(part.failure) for part in loaded if part.failure), None)
        try:
            self.checkpoints.poll()
        except CheckpointError as error:
            failure = error
        broken = {name: reason for part in loaded for name, reason in part.broken.items()}
        minutes = (time.monotonic() - self.last_saved) / 60
        interrupted, preempted, failed, news, self.save_is_due = self.processes.any(
            self.stop.received is not None,
            self.stop.preempted,
            failure is not None,
            bool(broken.keys() - self.broken.reasons.keys()),
            self.settings.save_minutes is not None and minutes >= self.settings.save_minutes,
        )
        if failed:
            self._fail_together(failure)
        if news:
            self._note_broken(broken)
        if interrupted:
            self.ending = "preempted" if preempted else "interrupted"
        return interrupted

    def _note_broken(self, broken: dict[str, str]) -> None:
        """Every process knows of the broken images of all, and so all find at once that there are too many."""
        failure: CapiError | None = None
        for part in self.processes.gather(broken):
            try:
                self.broken.note(part)
            except CapiError as error:
                failure = error
        self.position.broken = self.broken.reasons
        if failure is not None:
            self._fail_together(failure)

    def _fail_together(self, failure: CapiError | None) -> NoReturn:
        """One sentence for all processes; a checkpoint that cannot be saved is not retried."""
        try:
            self.processes.fail_together(failure)
        except SharedError as error:
            if any(self.processes.gather(isinstance(failure, CheckpointError))):
                raise CheckpointError(str(error)) from error
            raise
        raise AssertionError("no process failed")

    def _after_step(self, metrics: StepMetrics, monitor: HealthMonitor | None) -> None:
        if monitor:
            values = metrics.values() | self._speed()
            self._begin_window()
            self._log(values | self._rates() | monitor.values())
            if self.progress:
                self.progress.update(self.position.step, bar_parts(values))
        if self._evaluates():
            start = time.monotonic()
            self._evaluate()
            self.evaluated_for += time.monotonic() - start
        if self._saves() or self.is_best:
            self.save()

    def _evaluates(self) -> bool:
        step, last = self.position.step, self.position.step == self.settings.total_steps
        return any(step % evaluation.every_steps == 0 or last for evaluation in self.evaluations)

    def _saves(self) -> bool:
        step, milestone = self.position.step, self.checkpoints.milestone_steps
        return self.save_is_due or step % self.settings.save_steps == 0 or bool(milestone and step % milestone == 0)

    def _speed(self) -> dict[str, float]:
        seconds = time.monotonic() - self.started
        # Evaluations are not training; where rows of a study must have the same time, theirs does not count.
        return {
            "seconds": seconds,
            "evaluation_seconds": self.evaluated_for,
            "images_per_second": self.images_done / seconds,
        } | self._use_of_device(seconds)

    def _begin_window(self) -> None:
        """What comes from here on belongs to the next record."""
        self.window = (time.monotonic() - self.started, self.evaluated_for, self.images_done)
        # Pairs of moments between which the device had nothing to compute.
        self.idle: list[tuple[Any, Any]] = []

    def _use_of_device(self, seconds: float) -> dict[str, float]:
        """Since the last record: how much of the device was used, and how long it waited for images."""
        window_start, evaluated, images = self.window
        trained = max(seconds - window_start - (self.evaluated_for - evaluated), 1e-9)
        waited = sum(since.elapsed_time(until) for since, until in self.idle) / 1e3
        speed, peak = (self.images_done - images) / trained, self.peak_images_per_second
        return {
            **({} if peak is None else {"mfu": speed / peak}),
            "data_wait": min(waited / trained, 1.0),
            "peak_memory": peak_bytes(self.learner.device) / 2**30,
        }

    def _rates(self) -> dict[str, float]:
        """The rates that the last step was taken with."""
        step = self.position.step - 1
        return {
            "learning_rate": self.learner.learning_rate(step),
            "teacher_momentum": self.learner.teacher_momentum(step),
            "broken_images": float(len(self.broken.reasons)),
        }

    def _evaluate(self) -> None:
        """Run what is due, in the main process; the others wait."""
        step, total = self.position.step, self.settings.total_steps
        due = [each for each in self.evaluations if step in {0, total} or step % each.every_steps == 0]
        learner = self.view(self.learner) if due else None
        failure: CapiError | None = None
        scores_by_name: dict[str, float | None] = {}
        try:
            for evaluation in due:
                # One that only leaves pictures has no scores.
                if learner is not None and (scores := evaluation.run(learner, step)):
                    scores_by_name |= scores
                    self._log(scores)
            if learner is not None and len(due) == len(self.evaluations):
                self._refuse_unknown_best(scores_by_name)
        except CapiError as error:
            failure = error
        self.processes.wait()
        self.processes.fail_together(failure)
        best = scores_by_name.get(self.settings.best or "")
        (self.is_best,) = self.processes.any(bool(step) and best is not None and best > self.best_score)
        if self.is_best and best is not None:
            self.best_score = best

    def _refuse_unknown_best(self, scores: Mapping[str, float | None]) -> None:
        """Raised after the first evaluation, not after a week."""
        best = self.settings.best
        if best is not None and best not in scores:
            raise CapiError(
                f'checkpoint.best = "{best}" is no score of the evaluations{nearest(best, scores)} (they give '
                f"{', '.join(scores) or 'none'})"
            )

    def _log(self, values: Mapping[str, float | None]) -> None:
        record = {"step": self.position.step, **values}
        for logger in self.loggers:
            logger(record)
        for alarm in self.watchman.see(record) if self.watchman else ():
            _LOG.warning("step %d: %s", self.position.step, alarm.sentence)

    def save(self) -> None:
        """Save the state as it is; before the first step there is nothing to save."""
        if self.position.step:
            self.checkpoints.save(self.learner, self.position, best=self.is_best)
            self.is_best = False
        self.last_saved = time.monotonic()

    def _handle_non_finite(self) -> bool:
        """Stop, continue (False) or roll back (True), if the loss of a step since the last look was not finite.

        The first such batch is kept for replay. All updates since a stop or a return were held back by the guard.
        """
        position, settings = self.position, self.settings
        guard = self.learner.guard
        seen = guard.report(position.step)
        position.skipped = min(seen.in_a_row, guard.patience)
        if not seen.number:
            return False
        step = seen.first
        if seen.closed_at is not None:
            step = position.step = seen.closed_at
            guard.reopen(position.skipped)
        what = f"the loss of step {step} is not finite (its batch is in {self._keep_for_replay(step)})"
        if seen.closed_at is None:
            others = f", nor are {seen.number - 1} later ones up to step {position.step - 1}" if seen.number > 1 else ""
            _LOG.warning("%s%s; nothing was updated, and the run continues", what, others)
            return False
        precise = "" if self.learner.precision == torch.float32 else ", or use run.precision=float32"
        advice = f"lower optimization.learning_rate{precise}"
        if settings.non_finite == "stop":
            self._fail_together(CapiError(f"{what}: {advice}, or set run.non_finite to skip or rollback"))
        earlier = position.rollbacks if settings.non_finite == "rollback" else guard.patience
        if settings.non_finite == "skip" or earlier >= settings.non_finite_limit:
            self._fail_together(CapiError(f"{what}, after {earlier} others that were skipped: {advice}"))
        self._roll_back(what)
        return True

    def _roll_back(self, what: str) -> None:
        """Go back to the newest checkpoint, and on from there with the data that follows this batch."""
        reached, offset, rollbacks = self.position.step, self.position.data_offset, self.position.rollbacks
        self.checkpoints.finish()
        if not self.checkpoints.steps():
            self._fail_together(
                CapiError(f"{what}, and there is no checkpoint to go back to: set run.non_finite to skip")
            )
        back = self.checkpoints.load(self.learner)
        self.position.step = back.step
        self.position.data_offset = offset + reached - back.step + 1
        self.position.rollbacks, self.position.skipped = rollbacks + 1, 0
        self.learner.guard.reopen()
        for logger in self.loggers:
            getattr(logger, "cut_after", lambda _: None)(back.step)
        if self.watchman:
            self.watchman.forget()
        _LOG.warning("%s; back to step %d, with other data", what, back.step)

    def _keep_for_replay(self, step: int) -> Path:
        """The exact batch of a step, made once more, and where the weights that met it are closest."""
        self.replay_folder.mkdir(parents=True, exist_ok=True)
        rank = f"_process_{self.processes.rank}" if self.processes.size > 1 else ""
        path = self.replay_folder / f"step_{step:08d}{rank}.safetensors"
        earlier = [saved for saved in self.checkpoints.steps() if saved <= step]
        facts = {"step": str(step), "nearest_checkpoint": str(earlier[-1]) if earlier else "none"}
        try:
            start = step + self.position.data_offset
            tensors = {
                f"{name}.{number}": value.contiguous().cpu()
                for loaded in self.batches(start, start + 1)
                for number, part in enumerate(loaded)
                for name, value in self.to_device(part)._asdict().items()
                if value is not None
            }
            with atomic_path(path) as partial:
                save_file(tensors, partial, metadata=facts)
        except Exception as error:
            # The loss is what the user must hear of, whatever the disk says.
            _LOG.warning("%s could not be written: %s", path, error)
        return path
