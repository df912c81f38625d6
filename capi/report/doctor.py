"""What is well with a run, what is not and what to do about it, and what is not known yet.

Three sources: the healthy ranges of `capi.train.health`, general rules that hold for any run, and for recipes that
come with reference runs the band in which their curves lie.
"""

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from capi.config.schema import Config
from capi.errors import CapiError
from capi.report.metrics_reader import MetricsReader
from capi.report.pages.data import Column, RunState, number
from capi.report.references import Reference, reference_for
from capi.report.rules import Remark, Seen, State, on_range, remarks
from capi.runtime.lock import is_being_trained
from capi.train.checkpoint import Checkpoints
from capi.train.health import Finding, RunFacts, Watchman, spoken
from capi.train.run import run_facts
from capi.types import Statistics
from capi.zoo.metrics import FILE
from capi.zoo.run_folder import CONFIG, RunFolder, run_config

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
