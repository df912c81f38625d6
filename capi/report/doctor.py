"""What is well with a run, what is not and what to do about it, and what is not known yet.

The metrics are judged by the watchman of `capi.train.health`, which also raises the alarms while a run trains. What is
judged here are the files, the checkpoints, the sizes of batch and data, the range of the images, and for recipes that
come with reference runs the band in which their curves lie. Doctor, report, watch and card show the same diagnosis.
"""

import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from capi.config.schema import Config
from capi.data.survey import statistics_warning
from capi.errors import CapiError, counted
from capi.report.metrics_reader import MetricsReader
from capi.report.pages.data import Column, RunState
from capi.report.references import Band, reference_for
from capi.runtime.lock import is_being_trained
from capi.runtime.summary import Summary
from capi.train.checkpoint import Checkpoints
from capi.train.health import Finding, FindingState, RunFacts, Watchman, number_text, verdict
from capi.train.run import run_facts
from capi.types import Statistics
from capi.zoo.run_folder import CONFIG, FILE, RunFolder, run_config

# Images of a batch for each prototype: with 1/16 the targets stay vague and less is learnt
# (docs/measurements/small-data.md).
_IMAGES_A_PROTOTYPE = 1 / 8
# Of all images, as `capi plan --suggest` has it of a batch.
_PROTOTYPES_AN_IMAGE = 4
_HEADS: dict[FindingState, tuple[str, str]] = {
    "alarm": ("Not well", "bold red"),
    "look": ("Worth a look", "bold yellow"),
    "well": ("Well", "bold green"),
    "unknown": ("Not known", "bold"),
}
_COMMANDS = ("pretrain", "demo")


@dataclass(frozen=True, repr=False)
class Diagnosis(Summary):
    """Everything there is to say about a run."""

    run: Path
    state: RunState
    findings: Sequence[Finding]

    def summary(self) -> tuple[str, dict[str, str]]:
        worth = [finding for state in ("alarm", "look") for finding in self.of(state)]
        about = {
            finding.title: ". ".join(part.rstrip(".") for part in (finding.text, finding.advice) if part)
            for finding in worth
        }
        well = ", ".join(finding.title for finding in self.of("well"))
        return f"{self.run}: {self.state.sentence} {self.sentence}", about | ({"well": well} if well else {})

    @property
    def has_alarms(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.of("alarm"))

    def of(self, state: FindingState) -> list[Finding]:
        """The findings of one kind."""
        return [finding for finding in self.findings if finding.state == state]

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        return verdict(self.findings)


def doctor(run: str | Path) -> Diagnosis:
    """What is well with a run and what is not, against general rules and, for the demo, reference runs.

    The run may be finished or not; a folder that is none is refused.
    """
    run = Path(run)
    if not run.is_dir():
        raise CapiError(f"there is no folder {run}: expected the folder of a run")
    reading = RunReading(run)
    reading.refresh()
    return reading.diagnosis()


def diagnosis_text(diagnosis: Diagnosis) -> Text:
    """The diagnosis for the terminal; `.plain` is the same without colours."""
    text = Text(f"{diagnosis.run}: {diagnosis.state.sentence}\n{diagnosis.sentence}\n")
    for state, (head, style) in _HEADS.items():
        findings = diagnosis.of(state)
        if findings:
            text.append(f"\n{head}\n", style)
        for finding in findings:
            text.append("  ").append(finding.title, "bold" if state == "alarm" else "").append(f": {finding.text}\n")
            if finding.advice:
                text.append(f"    {finding.advice}\n", "italic")
    text.rstrip()
    return text


class RunReading:
    """A run folder that is read again and again: its config where that can be read, its record, its metrics.

    Metrics are read on from where the last reading ended, and shown to a watchman.
    """

    def __init__(self, run: Path) -> None:
        self.folder = RunFolder(run)
        self._config_text: str | None = None

    def refresh(self) -> None:
        """Read what is new; all of it where another run took this one's place."""
        self.record: Mapping[str, Any] = self.folder.record(also_newer=True)
        if self.folder.config_text() != self._config_text:
            self._begin()
        self.trained_now = is_being_trained(self.folder.path)
        self.reader.read()
        self.columns: Mapping[str, Column] = self.reader.columns()

    def _begin(self) -> None:
        self._config_text = self.folder.config_text()
        self.config: Config | None = None
        self.facts: RunFacts | None = None
        self.unreadable = ""
        try:
            self.config = run_config(self.folder)
            self.facts = run_facts(self.config, self.record, self.last_start.get("device"))
        except CapiError as error:
            self.unreadable = str(error)
        self.watchman = Watchman(self.facts)
        self.reader = MetricsReader(self.folder.path / FILE, self.watchman.see, self.watchman.forget)

    @property
    def state(self) -> RunState:
        step, total = self.reader.step, self.facts.total_steps if self.facts else None
        if self.trained_now:
            return RunState("running", step, total)
        if step is not None and total is not None and step >= total:
            return RunState("finished", step, total)
        return RunState("unknown" if self.trained_now is None else "stopped", step, total)

    @property
    def data(self) -> Mapping[str, Any]:
        """What run.json says of the images."""
        data = self.record.get("data")
        return data if isinstance(data, Mapping) else {}

    @property
    def images(self) -> int | None:
        count = self.data.get("images")
        return count if isinstance(count, int) else None

    @property
    def last_start(self) -> Mapping[str, Any]:
        starts = self.record.get("starts")
        return starts[-1] if isinstance(starts, list) and starts and isinstance(starts[-1], Mapping) else {}

    def diagnosis(self) -> Diagnosis:
        """All findings, the cause of the others first."""
        findings = [
            *self._of_files(),
            *self._of_checkpoints(),
            *self._of_metrics(),
            *self._of_sizes(),
            *self._of_references(),
        ]
        wrong = any(finding.state == "alarm" for finding in findings)
        # Images far from what they are normalized with explain what else is wrong.
        causes = [
            replace(cause, state="alarm") if wrong and cause.state == "look" else cause for cause in self._of_range()
        ]
        return Diagnosis(self.folder.path, self.state, [*causes, *findings])

    def _of_files(self) -> Iterable[Finding]:
        """What of the run can be read, and how it is resumed."""
        reader = self.reader
        if self.unreadable:
            yield Finding("look", "Config", f"{self.unreadable}; health is not judged without it")
        if reader.broken or reader.not_numbers:
            lines = f"{reader.broken} line{'s' * (reader.broken != 1)} of {FILE} left out"
            yield Finding(
                "look", "Metrics", f"{lines if reader.broken else 'some values left out'}: no records of a run"
            )
        if reader.cut_off and not self.trained_now:
            yield Finding("look", "Metrics", f"the last line of {FILE} is cut off, and was left out")
        if not reader.records:
            yield Finding("unknown", "Metrics", "nothing was logged yet")
        if self.state.kind == "stopped":
            step, total = self.state.step, self.state.total
            at = f"stopped at step {step}" + (f" of {total}" if total else "")
            text = "the run ended before it logged anything" if step is None else at
            yield Finding("look", "State", text, f"To resume: {self._command()}")

    def _command(self) -> str:
        """What resumes the run: the command that started it, else one that does the same."""
        start, path = self.last_start, self.folder.path
        words = start.get("command")
        if isinstance(words, list) and len(words) > 1 and words[1] in _COMMANDS and _is_where_it_began(path, start):
            arguments = [str(word) for word in words[1:] if word not in {"--resume", "--overwrite"}]
            return f"cd {shlex.quote(str(start.get('folder', '.')))} && capi {shlex.join(arguments)} --resume"
        data = str(self.data.get("path")) if self.data else "IMAGES"
        return shlex.join(["capi", "pretrain", str(path / CONFIG), "--data", data, "--out", str(path), "--resume"])

    def _of_checkpoints(self) -> Iterable[Finding]:
        """Whether there is one to resume from or to load, and whether this capi reads it."""
        checkpoints, title = Checkpoints(self.folder.checkpoints), "Checkpoint"
        steps = checkpoints.steps()
        if not steps and self.state.kind == "finished":
            advice = "Restore the folder checkpoints, or train the run again."
            yield Finding("alarm", title, "none, so that the encoder is lost", advice)
        elif not steps:
            yield Finding("unknown", title, "none yet: a run that is resumed starts over")
        else:
            try:
                checkpoints.position(steps[-1])
                yield Finding("well", title, f"the newest is of step {steps[-1]}")
            except (CapiError, TypeError) as error:
                yield Finding("alarm", title, f"the newest, of step {steps[-1]}, cannot be read: {error}")

    def _of_metrics(self) -> Iterable[Finding]:
        """What the watchman says, and which alarms are over."""
        findings = self.watchman.findings()
        ranged = {rule.key for rule in self.watchman.rules}
        absent = ranged - set(self.columns) if self.columns else set()
        unmeasured = [finding for finding in findings if finding.key in absent]
        yield from (finding for finding in findings if finding not in unmeasured)
        if unmeasured:
            names = ", ".join(finding.title for finding in unmeasured)
            yield Finding("unknown", "Health", f"not measured by the capi that trained this: {names}")
        past = {finding.key: (step, finding) for step, finding in self.watchman.past}
        for step, finding in past.values():
            if finding.key not in self.watchman.raised:
                yield Finding("look", finding.title, f"alarm at step {step}, over now")

    def _of_sizes(self) -> Iterable[Finding]:
        """Whether batch and data are large enough for so many prototypes."""
        config = self.config
        if config is None or self.facts is None or not self.facts.target.clusters:
            return
        batch, prototypes = config.optimization.batch_size, config.clustering.prototypes
        positions = config.grid[0] * config.grid[1]
        if config.clustering.sinkhorn == "positionwise":
            text = f"{counted(batch, 'image')} at each position for {counted(prototypes, 'prototype')}"
            small = batch < _IMAGES_A_PROTOTYPE * prototypes
        else:
            patches = batch * positions
            text = f"{patches} patches are balanced over {prototypes} prototypes"
            small = patches < prototypes
        advice = "Use fewer with clustering.prototypes, or a larger optimization.batch_size." if small else ""
        yield Finding("look" if small else "well", "Batch", text + (": too few" if small else ""), advice)
        if self.images:
            few = _PROTOTYPES_AN_IMAGE * self.images < prototypes
            each = f"{self.images / prototypes:.3g} for each"
            text = f"{counted(self.images, 'image')} for {counted(prototypes, 'prototype')}, {each}"
            advice = "There are many prototypes for so few images: use fewer with clustering.prototypes." if few else ""
            yield Finding("look" if few else "well", "Data", text, advice)

    def _of_range(self) -> Iterable[Finding]:
        """Whether the images are near what they are normalized with; far from it they look constant to the model."""
        measured = _statistics(self.data.get("statistics"))
        if measured is None or self.config is None:
            return
        mean, std = self.config.data.mean, self.config.data.std
        if isinstance(mean, str) or isinstance(std, str) or len(mean) != len(measured.mean):
            return
        title, warning = "Range of the images", statistics_warning(measured, Statistics(mean, std))
        if warning is None:
            yield Finding("well", title, "mean and std are near data.mean and data.std")
            return
        text, _, advice = warning.rpartition(": use ")
        text += "; inputs that are nearly constant, or far from 0, make a run collapse"
        yield Finding("look", title, text, f"Start another run with {advice}.")

    def _of_references(self) -> Iterable[Finding]:
        """Where the curves lie against those of reference runs."""
        title, config = "Reference runs", self.config
        reference = reference_for(config, self.data.get("fingerprint")) if config else None
        if reference is None or config is None:
            text = "there are none with this model, these images and this number of steps"
            yield Finding("unknown", title, text)
            return
        compared = reference.compare(self.columns, config)
        runs = f"{len(reference.seeds)} reference runs of {reference.name}"
        if not compared:
            yield Finding("unknown", title, f"nothing to compare with {runs} yet")
        for each in compared:
            if each.outside:
                text = f"{number_text(each.value)} after {each.share:.0%} of the run; {runs} have {_range(each.seeds)}"
                text += f", and {_range(each.band)} is taken for normal"
                yield Finding("look", f"{each.metric} against reference runs", text)
        if inside := sum(not each.outside for each in compared):
            changes = reference.changes(config)
            other = f" (this run has other settings: {'; '.join(changes)})" if changes else ""
            yield Finding("well", title, f"{inside} of {len(compared)} curves lie where those of {runs} do{other}")


def _is_where_it_began(run: Path, start: Mapping[str, Any]) -> bool:
    """A folder that was moved or copied is not the one that its command would resume."""
    words = [str(word) for word in start["command"]]
    named = [after for word, after in itertools.pairwise(words) if word == "--out"]
    named += [word.removeprefix("--out=") for word in words if word.startswith("--out=")]
    place = Path(str(start.get("folder", "."))) / (named[-1] if named else "demo_run")
    return place.resolve() == run.resolve()


def _statistics(measured: Any) -> Statistics | None:
    """What the run measured of its images when it started; None where run.json has no such numbers."""
    mean, std = (measured.get(name) if isinstance(measured, Mapping) else None for name in ("mean", "std"))
    if not (isinstance(mean, list) and isinstance(std, list) and mean and len(mean) == len(std)):
        return None
    numbers = all(isinstance(number, int | float) and math.isfinite(number) for number in (*mean, *std))
    return Statistics(tuple(mean), tuple(std)) if numbers else None


def _range(band: Band) -> str:
    return f"{number_text(band.low)} to {number_text(band.high)}"
