"""What is well with a run, what is not and what to do about it, and what is not known yet.

Three sources: the healthy ranges of `capi.train.health`, general rules that hold for any run, and for recipes that
come with reference runs the band in which their curves lie.

What can be said of any run, whatever its recipe: losses, scores, speed, images and sizes.

A rule looks at the metrics and the config and makes remarks. What rings is wrong in any run; what is worth a look may
have a good reason.
"""

import itertools
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.text import Text

from capi.config.schema import Config
from capi.data.survey import statistics_warning
from capi.errors import CapiError
from capi.report.metrics_reader import MetricsReader
from capi.report.pages.data import Column, RunState, number
from capi.report.references import Reference, reference_for
from capi.runtime.lock import is_being_trained
from capi.train.checkpoint import Checkpoints
from capi.train.health import RULES, Finding, RunFacts, Watchman, spoken
from capi.train.run import run_facts
from capi.types import Statistics
from capi.zoo.run_folder import CONFIG, FILE, RunFolder, run_config

State = Literal["alarm", "look", "well", "unknown"]
_LOSSES = {"student_loss": "Loss of the student", "clustering_loss": "Loss of the clustering"}
# Kinds of target that are the same from the first step to the last.
_FIXED = ("pixels", "frozen")
# Values whose median stands for a time of the run, how many a curve must have, and the share of the run before which
# curves are not judged.
_FEW, _ENOUGH, _EARLY = 5, 12, 0.2
# A loss that fell by less than this has not fallen; one that fell by less in the last half stands still.
_FALL, _STANDSTILL = 0.01, 0.005
# Scores of few images vary by chance: so many are judged together. All of them this far below the best have fallen.
_LAST_SCORES, _LOST = 3, 0.8
# Images of a batch for each prototype: with 1/16 the targets stay vague and less is learnt (docs/small-data.md).
_IMAGES_A_PROTOTYPE = 1 / 8
# Broken images that are worth a look.
_BROKEN = 0.01


@dataclass(frozen=True)
class Remark:
    """One thing that there is to say, and what to do about it."""

    state: State
    title: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Seen:
    """What rules look at; None where it is not known."""

    columns: Mapping[str, Column]
    config: Config | None = None
    images: int | None = None
    statistics: Statistics | None = None
    """Mean and std of a sample of the images, as the run measured them when it started."""
    device: str | None = None

    @property
    def clusters(self) -> bool:
        """Whether prototypes are learnt beside the student; without a config, whether their loss was logged."""
        return self.config.target.kind == "clustering" if self.config else "clustering_loss" in self.columns

    @property
    def targets_change(self) -> bool:
        """Whether the teacher has a part in the targets."""
        return self.config is None or self.config.target.kind not in _FIXED

    @property
    def is_float32(self) -> bool:
        """Whether the run has this precision already; `auto` is bfloat16 on a GPU alone."""
        precision = self.config.run.precision if self.config else "auto"
        return precision == "float32" or (precision == "auto" and self.device is not None and "cuda" not in self.device)

    @property
    def is_early(self) -> bool:
        """Whether it is too early to judge curves."""
        if self.config is None:
            return False
        return self.last_step < _EARLY * self.config.optimization.steps

    @property
    def last_step(self) -> int:
        return max((int(column.steps[-1]) for column in self.columns.values() if len(column.steps)), default=0)

    @property
    def scores(self) -> dict[str, Column]:
        """What evaluations found, where they found numbers."""
        found = {key: _finite(column) for key, column in self.columns.items() if "/" in key}
        return {key: column for key, column in found.items() if len(column.steps)}


def remarks(seen: Seen) -> list[Remark]:
    """Of all rules."""
    return [remark for rule in _RULES for remark in rule(seen)]


def on_numbers(seen: Seen) -> Iterable[Remark]:
    """Values that are no numbers, after there were some. Losses must be numbers from the first on."""
    judged = {rule.key for rule in RULES}
    precise = "" if seen.is_float32 else ", or use run.precision=float32"
    for key, column in seen.columns.items():
        lost = np.isnan(column.values)
        since_known = lost if key in _LOSSES else lost & (np.cumsum(~lost) > 0)
        if not since_known.any():
            continue
        # The rules of health look at the last values themselves.
        ends = bool(lost[-1]) and key not in judged
        text = f"{since_known.sum()} of {len(lost)} values are no numbers, the last at step {_at(column, since_known)}"
        yield Remark(
            "alarm" if ends else "look",
            f"Numbers of {key}",
            text,
            f"Go back to an earlier checkpoint; lower optimization.learning_rate{precise}.",
        )


def on_losses(seen: Seen) -> Iterable[Remark]:
    """Whether they fell at all, and still do."""
    for key, title in _LOSSES.items():
        if key == "clustering_loss" and not seen.clusters:
            continue
        column = _finite(seen.columns.get(key))
        if len(column.steps) < _ENOUGH or seen.is_early:
            yield Remark("unknown", title, "too few records to judge whether it falls")
            continue
        first, middle, last = _first(column.values), _middle(column.values), _last(column.values)
        if last > first * (1 - _FALL):
            yield Remark(
                "alarm",
                title,
                f"{number(first)} at first, {number(last)} now: it did not fall",
                "Nothing is learnt. Check that the images differ, and try another optimization.learning_rate.",
            )
        elif last > middle * (1 - _STANDSTILL):
            yield _standstill(title, f"{number(middle)} half-way, {number(last)} now: it stands still", seen)
        else:
            yield Remark("well", title, f"fell from {number(first)} to {number(last)}, also in the last half")


def _standstill(title: str, text: str, seen: Seen) -> Remark:
    """Targets may get harder while the teacher learns: a loss stands still then while the features get better."""
    risen = [key for key, column in seen.scores.items() if _still_rises(column)]
    if risen:
        reason = ": the targets get harder" if seen.targets_change else ""
        return Remark("well", title, f"{text}, while {risen[0]} still rises{reason}")
    harder = "The targets get harder as the teacher learns, so judge by scores if you can."
    ended = "The targets stay the same, so that it has learnt what it can at this rate, unless scores still rise."
    return Remark("look", title, text, harder if seen.targets_change else ended)


def on_scores(seen: Seen) -> Iterable[Remark]:
    """Where evaluations stand against the untrained encoder and against their best."""
    if not seen.scores:
        asked = seen.config is not None and bool(seen.config.evaluations)
        advice = "" if asked else "The key evaluations of the config asks for some."
        yield Remark("unknown", "Scores", "no evaluation was made", advice)
    for key, column in seen.scores.items():
        values, steps = column.values, column.steps
        text = f"{values[0]:.1%} at step {steps[0]}"
        if len(steps) <= _LAST_SCORES or seen.is_early:
            yield Remark("unknown", key, f"{text}, {values[-1]:.1%} now: too few scores to judge")
            continue
        text += f", {values[-1]:.1%} now, {values.max():.1%} at best (step {steps[values.argmax()]})"
        if np.median(values[-_LAST_SCORES:]) < values[0]:
            yield Remark("alarm", key, text, "The features got worse than at the start: see what else rings.")
        elif values[-_LAST_SCORES:].max() < _LOST * values.max():
            yield Remark(
                "look", key, text, "The score fell from its best. With few images to score that may be chance."
            )
        else:
            yield Remark("well", key, text)


def on_speed(seen: Seen) -> Iterable[Remark]:
    """Whether the last steps took much longer than usual."""
    speeds = _steps_per_second(seen.columns.get("seconds"))
    if len(speeds) < _ENOUGH:
        return
    batch, unit = (seen.config.optimization.batch_size, "images/s") if seen.config else (1, "steps/s")
    usual, now = (f"{median * batch:.3g}" for median in (np.median(speeds), _last(speeds)))
    text = f"{now} {unit} now, {usual} as a rule"
    if _last(speeds) < np.median(speeds) / 2:
        advice = "Look for other work on the machine, a slow disk, or too few data.workers."
        yield Remark("look", "Speed", f"{text}: it fell by more than half", advice)
    else:
        yield Remark("well", "Speed", text)


def on_images(seen: Seen) -> Iterable[Remark]:
    """How many cannot be read."""
    broken = _finite(seen.columns.get("broken_images")).last
    if broken is None or not seen.images:
        return
    share, limit = broken / seen.images, seen.config.data.broken_limit if seen.config else 1.0
    text = f"{broken:.0f} of {seen.images} were found to be unreadable ({share:.1%})"
    advice = f"They are named in the log. Repair them: the run stops above data.broken_limit = {limit:g}."
    state: State = "alarm" if share > limit else "look" if share > _BROKEN else "well"
    yield Remark(state, "Images", text, "" if state == "well" else advice)


def on_range(seen: Seen) -> Iterable[Remark]:
    """Whether the images are near what they are normalized with; far from it they look constant to the model."""
    if seen.statistics is None or seen.config is None:
        return
    mean, std = seen.config.data.mean, seen.config.data.std
    if isinstance(mean, str) or isinstance(std, str) or len(mean) != len(seen.statistics.mean):
        return
    warning = statistics_warning(seen.statistics, Statistics(mean, std))
    if warning is None:
        yield Remark("well", "Range of the images", "mean and std are near data.mean and data.std")
        return
    text, _, advice = warning.rpartition(": use ")
    yield Remark(
        "look",
        "Range of the images",
        f"{text}; inputs that are nearly constant, or far from 0, make a run collapse",
        f"Start another run with {advice}.",
    )


def on_sizes(seen: Seen) -> Iterable[Remark]:
    """Whether batch and data are large enough for so many prototypes."""
    if seen.config is None or not seen.clusters:
        return
    batch, prototypes = seen.config.optimization.batch_size, seen.config.clustering.prototypes
    if seen.config.clustering.sinkhorn == "positionwise":
        text = f"{batch} images are balanced over {prototypes} prototypes at each position"
        small = batch < _IMAGES_A_PROTOTYPE * prototypes
    else:
        patches = batch * seen.config.grid[0] * seen.config.grid[1]
        text = f"{patches} patches are balanced over {prototypes} prototypes"
        small = patches < prototypes
    advice = "Use fewer with clustering.prototypes, or a larger optimization.batch_size." if small else ""
    yield Remark("look" if small else "well", "Batch", text + (": too few" if small else ""), advice)
    if seen.images:
        few = seen.images < prototypes
        text = f"{seen.images} images for {prototypes} prototypes, {seen.images / prototypes:.3g} for each"
        yield Remark(
            "look" if few else "well",
            "Data",
            text,
            "There are more prototypes than images: use fewer with clustering.prototypes." if few else "",
        )


_RULES: tuple[Callable[[Seen], Iterable[Remark]], ...] = (
    on_numbers,
    on_losses,
    on_scores,
    on_speed,
    on_images,
    on_sizes,
)


def _finite(column: Column | None) -> Column:
    if column is None:
        return Column(np.empty(0, np.int64), np.empty(0))
    known = np.isfinite(column.values)
    return Column(column.steps[known], column.values[known])


def _first(values: npt.NDArray[np.float64]) -> float:
    return float(np.median(values[: min(_FEW, max(len(values) // 10, 1))]))


def _middle(values: npt.NDArray[np.float64]) -> float:
    start = (len(values) - _FEW) // 2
    return float(np.median(values[start : start + _FEW]))


def _last(values: npt.NDArray[np.float64]) -> float:
    return float(np.median(values[-_FEW:]))


def _still_rises(column: Column) -> bool:
    """Whether the last score is the best one, and above those of the first half."""
    values = column.values
    return bool(values[-1] >= values.max() and values[-1] > values[(len(values) - 1) // 2])


def _steps_per_second(seconds: Column | None) -> npt.NDArray[np.float64]:
    """Between neighbouring records; the clock starts anew with each start of the run."""
    clock = _finite(seconds)
    steps, passed = np.diff(clock.steps), np.diff(clock.values)
    forward = (steps > 0) & (passed > 0)
    return np.asarray(steps[forward] / passed[forward], dtype=np.float64)


def _at(column: Column, where: npt.NDArray[np.bool_]) -> int:
    return int(column.steps[where][-1])


_HEADS: dict[State, tuple[str, str]] = {
    "alarm": ("Not well", "bold red"),
    "look": ("Worth a look", "bold yellow"),
    "well": ("Well", "bold green"),
    "unknown": ("Not known", "bold"),
}
_COMMANDS = ("pretrain", "demo")


@dataclass(frozen=True)
class Diagnosis:
    """Everything there is to say about a run."""

    run: Path
    state: RunState
    remarks: Sequence[Remark]

    @property
    def ringing(self) -> bool:
        """Whether anything is wrong."""
        return any(remark.state == "alarm" for remark in self.remarks)

    def of(self, state: State) -> list[Remark]:
        """The remarks of one kind."""
        return [remark for remark in self.remarks if remark.state == state]

    @property
    def sentence(self) -> str:
        """The diagnosis in one line."""
        wrong, look = len(self.of("alarm")), len(self.of("look"))
        if wrong:
            return f"{_counted(wrong, 'thing')} not well, {look} worth a look."
        if not any(remark.state == "well" for remark in self.remarks):
            return "Nothing is known yet."
        return "All is well." if not look else f"Nothing rings; {_counted(look, 'thing')} worth a look."


def doctor(run: str | Path) -> Diagnosis:
    """What is well with a run and what is not, against general rules and, for the demo, reference runs.

    The run may be finished or not; a folder that is none is refused.
    """
    run = Path(run)
    if not run.is_dir():
        raise CapiError(f"there is no folder {run}: expected the folder of a run")
    patient = _Patient.of(run)
    found = [
        *patient.on_files(),
        *patient.on_checkpoints(),
        *patient.on_health(),
        *remarks(patient.seen),
        *patient.on_references(),
    ]
    return Diagnosis(run, patient.state, [*_causes(found, patient.seen), *found])


def _causes(found: Sequence[Remark], seen: Seen) -> list[Remark]:
    """What explains the rest: the range of the images is worth a look, and an alarm where something is wrong."""
    wrong = any(remark.state == "alarm" for remark in found)
    return [replace(one, state="alarm") if wrong and one.state == "look" else one for one in on_range(seen)]


def diagnosis_text(diagnosis: Diagnosis) -> Text:
    """For the terminal; `.plain` is the same without colours."""
    text = Text(f"{diagnosis.run}: {diagnosis.state.sentence}\n{diagnosis.sentence}\n")
    for state, (head, style) in _HEADS.items():
        found = diagnosis.of(state)
        if found:
            text.append(f"\n{head}\n", style)
        for remark in found:
            text.append("  ").append(remark.title, "bold" if state == "alarm" else "").append(f": {remark.text}\n")
            if remark.advice:
                text.append(f"    {remark.advice}\n", "italic")
    text.rstrip()
    return text


@dataclass
class _Patient:
    """A run as it is read: its config where that can be read, its metrics, and what they set off."""

    folder: RunFolder
    record: Mapping[str, Any]
    config: Config | None
    unreadable: str
    trained_now: bool | None
    watchman: Watchman = field(init=False)
    rung: list[tuple[int, Finding]] = field(default_factory=list)

    @classmethod
    def of(cls, run: Path) -> "_Patient":
        folder = RunFolder(run)
        record, config, unreadable = folder.record(also_newer=True), None, ""
        folder.config_text()
        try:
            config = run_config(folder)
        except CapiError as error:
            unreadable = str(error)
        return cls(folder, record, config, unreadable, is_being_trained(run))

    def __post_init__(self) -> None:
        self._forget()
        self.reader = MetricsReader(self.folder.path / FILE, self._see, self._forget)
        self.reader.read()
        self.columns: Mapping[str, Column] = self.reader.columns()

    def _forget(self) -> None:
        # Without a config nobody knows the ranges, and the watchman is not asked.
        self.watchman = Watchman(run_facts(self.config) if self.config else RunFacts(1, 1, 0))
        self.rung.clear()

    def _see(self, record: dict[str, Any]) -> None:
        self.rung += [(record["step"], finding) for finding in self.watchman.see(record)]

    @property
    def total(self) -> int | None:
        return self.config.optimization.steps if self.config else None

    @property
    def state(self) -> RunState:
        step = self.reader.step
        if self.trained_now:
            return RunState("running", step, self.total)
        if step is not None and step == self.total:
            return RunState("finished", step, self.total)
        return RunState("unknown" if self.trained_now is None else "stopped", step, self.total)

    @property
    def images(self) -> int | None:
        data = self.record.get("data")
        count = data.get("images") if isinstance(data, Mapping) else None
        return count if isinstance(count, int) else None

    @property
    def statistics(self) -> Statistics | None:
        """What the run measured of its images when it started; None where run.json has no such numbers."""
        data = self.record.get("data")
        found = data.get("statistics") if isinstance(data, Mapping) else None
        if not isinstance(found, Mapping):
            return None
        mean, std = _finite_numbers(found.get("mean")), _finite_numbers(found.get("std"))
        return Statistics(mean, std) if mean and len(mean) == len(std) else None

    @property
    def seen(self) -> Seen:
        return Seen(self.columns, self.config, self.images, self.statistics, self._last_start().get("device"))

    def on_files(self) -> list[Remark]:
        """What of the run can be read, and how it goes on."""
        found, reader = [], self.reader
        if self.unreadable:
            found.append(Remark("look", "Config", f"{self.unreadable}; health is not judged without it"))
        if reader.broken or reader.not_numbers:
            text = f"{_counted(reader.broken, 'line')} of {FILE} left out" if reader.broken else "some values left out"
            found.append(Remark("look", "Metrics", f"{text}: no records of a run"))
        if reader.cut_off and not self.trained_now:
            found.append(Remark("look", "Metrics", f"the last line of {FILE} is cut off, and was left out"))
        if not reader.records:
            found.append(Remark("unknown", "Metrics", "nothing was logged yet"))
        if self.state.kind == "stopped":
            found.append(Remark("look", "State", self._stopped(), f"To go on: {self.command()}"))
        return found

    def _stopped(self) -> str:
        if self.reader.step is None:
            return "the run ended before it logged anything"
        return f"stopped at step {self.reader.step}" + (f" of {self.total}" if self.total else "")

    def _last_start(self) -> Mapping[str, Any]:
        starts = self.record.get("starts")
        return starts[-1] if isinstance(starts, list) and starts and isinstance(starts[-1], Mapping) else {}

    def command(self) -> str:
        """What goes on with the run: the command that started it, else one that does the same."""
        start = self._last_start()
        words = start.get("command")
        if (
            isinstance(words, list)
            and len(words) > 1
            and words[1] in _COMMANDS
            and self._is_where_it_began(start, words)
        ):
            kept = [str(word) for word in words[1:] if word not in {"--resume", "--overwrite"}]
            return f"cd {shlex.quote(str(start.get('folder', '.')))} && capi {shlex.join(kept)} --resume"
        data = self.record.get("data")
        path = str(data.get("path")) if isinstance(data, Mapping) else "IMAGES"
        out = self.folder.path
        return shlex.join(["capi", "pretrain", str(out / CONFIG), "--data", path, "--out", str(out), "--resume"])

    def _is_where_it_began(self, start: Mapping[str, Any], words: Sequence[str]) -> bool:
        """A folder that was moved or copied is not the one that its command would go on with."""
        named = [after for word, after in itertools.pairwise(words) if word == "--out"]
        named += [word.removeprefix("--out=") for word in words if str(word).startswith("--out=")]
        place = Path(str(start.get("folder", "."))) / (named[-1] if named else "demo_run")
        return place.resolve() == self.folder.path.resolve()

    def on_checkpoints(self) -> list[Remark]:
        """Whether there is one to go on from or to load, and whether this capi reads it."""
        checkpoints, title = Checkpoints(self.folder.checkpoints), "Checkpoint"
        steps = checkpoints.steps()
        if not steps:
            if self.state.kind == "finished":
                lost = "none, so that the encoder is lost"
                return [Remark("alarm", title, lost, "Restore the folder checkpoints, or train the run again.")]
            return [Remark("unknown", title, "none yet: if the run goes on, it starts over")]
        try:
            checkpoints.position(steps[-1])
        except (CapiError, TypeError) as error:
            return [Remark("alarm", title, f"the newest, of step {steps[-1]}, cannot be read: {error}")]
        return [Remark("well", title, f"the newest is of step {steps[-1]}")]

    def on_health(self) -> list[Remark]:
        """The rules of health as things stand, and what rang on the way."""
        if self.config is None:
            return []
        findings = self.watchman.findings()
        missing = [one for one in findings if one.rule.key not in self.columns] if self.columns else []
        found = [_health_remark(one) for one in findings if one not in missing]
        if missing:
            names = ", ".join(one.rule.title for one in missing)
            found.append(Remark("unknown", "Health", f"not measured by the capi that trained this: {names}"))
        ringing = {one.rule.key for one in findings if one.state == "alarm"}
        past = {one.rule.key: (step, one) for step, one in self.rung if one.rule.key not in ringing}
        return found + [
            Remark("look", one.rule.title, f"rang at step {step}, and is well now") for step, one in past.values()
        ]

    def on_references(self) -> list[Remark]:
        """Where the curves lie against those of reference runs."""
        data = self.record.get("data")
        fingerprint = data.get("fingerprint") if isinstance(data, Mapping) else None
        reference = reference_for(self.config, fingerprint) if self.config else None
        if reference is None or self.config is None:
            return [
                Remark(
                    "unknown", "Reference runs", "there are none with this model, these images and this number of steps"
                )
            ]
        return _reference_remarks(reference, self.columns, self.config)


def _finite_numbers(values: Any) -> tuple[float, ...]:
    """The numbers of a list; none where anything else is among them."""
    listed = values if isinstance(values, list) else []
    return tuple(listed) if all(isinstance(one, int | float) and math.isfinite(one) for one in listed) else ()


def _health_remark(finding: Finding) -> Remark:
    if finding.value is None:
        return Remark("unknown", finding.rule.title, f"not enough to go by yet (healthy: {spoken(finding.limits)})")
    text = f"{number(finding.value)} (healthy: {spoken(finding.limits)})"
    early = ": too early to judge" if finding.state == "unknown" else ""
    return Remark(finding.state, finding.rule.title, text + early, finding.advice)


def _reference_remarks(reference: Reference, columns: Mapping[str, Column], config: Config) -> list[Remark]:
    found = reference.compare(columns, config)
    runs = f"{len(reference.seeds)} reference runs of {reference.name}"
    if not found:
        return [Remark("unknown", "Reference runs", f"nothing to compare with {runs} yet")]
    outside = [
        Remark(
            "look",
            f"{one.metric} against reference runs",
            f"{number(one.value)} after {one.share:.0%} of the run; {runs} have {_range(one.seeds)}, and "
            f"{_range(one.band)} is taken for normal",
        )
        for one in found
        if one.outside
    ]
    inside = len(found) - len(outside)
    text = f"{inside} of {len(found)} curves lie where those of {runs} do"
    changes = reference.changes(config)
    if changes:
        text += f" (this run has other settings: {'; '.join(changes)})"
    return [*outside, *([Remark("well", "Reference runs", text)] if inside else [])]


def _range(band: tuple[float, float]) -> str:
    return f"{number(band[0])} to {number(band[1])}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
