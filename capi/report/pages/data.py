"""What a report is made of: one run as plain data, gathered elsewhere, so that drawing needs no files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from capi.errors import counted
from capi.method.targets import LossLabel
from capi.train.health import Finding, is_score, is_too_short, verdict

StateKind = Literal["running", "finished", "stopped", "unknown"]


@dataclass(frozen=True)
class Column:
    """One metric of a run, in the order of its steps; a value is NaN where nothing was measured."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    @property
    def last(self) -> float | None:
        """The newest value; None where there is none at all."""
        return float(self.values[-1]) if len(self.values) else None


@dataclass(frozen=True)
class RunState:
    """Where a run stands. `step` is None before the first metrics, `total` where the config cannot be read."""

    kind: StateKind
    step: int | None
    total: int | None

    @property
    def mark(self) -> str:
        """One word, and a sign that needs no colour."""
        signs = {"running": "▶", "finished": "✓", "stopped": "■", "unknown": "?"}
        return f"{signs[self.kind]} {'unclear' if self.kind == 'unknown' else self.kind}"

    @property
    def sentence(self) -> str:
        if self.step is None:
            return {
                "running": "The run is training and has not written metrics yet.",
                "unknown": "There are no metrics yet.",
            }.get(self.kind, "There are no metrics: the run ended before it wrote any.")
        of_total = f"{self.step:,}" + (f" of {self.total:,}" if self.total else "")
        return {
            "running": f"The run is training, at step {of_total}.",
            "finished": f"The run has finished all {counted(self.step, 'step')}.",
            "stopped": f"The run stopped at step {of_total}. The command that started it resumes it with --resume.",
            "unknown": f"The run has reached step {of_total}; whether it still trains is unknown on this system.",
        }[self.kind]


@dataclass(frozen=True)
class Picture:
    """A picture that the page carries inside itself."""

    address: str
    width: int
    height: int


@dataclass(frozen=True)
class Emergence:
    """A fixed image, and what the encoder made of it at a growing number of steps."""

    number: int
    photo: Picture | None
    pictures: Sequence[tuple[int, Picture]]


@dataclass(frozen=True)
class PrototypeStrip:
    """The patches that belong most to a prototype, and the share of all patches that are nearest to it."""

    number: int
    share: float | None
    strip: Picture


@dataclass(frozen=True)
class Gain:
    """What an evaluation scored before the first step and scores now, and what raw pixels score."""

    name: str
    untrained: float
    now: float
    pixels: float | None


@dataclass(frozen=True)
class RunReport:
    """Everything that the report of a run shows."""

    name: str
    state: RunState
    columns: Mapping[str, Column] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    """The diagnosis, as the doctor has it."""
    past: Sequence[tuple[int, Finding]] = ()
    """Alarms by the step at which they were raised."""
    notes: Sequence[str] = ()
    emergence: Sequence[Emergence] = ()
    emergence_note: str = ""
    neighbors: Sequence[Sequence[tuple[Picture, float | None]]] = ()
    """Rows of a photo and the images nearest to it, with their cosines."""
    pixels: Mapping[str, float] = field(default_factory=dict)
    """What raw pixels score, by evaluation."""
    prototypes: Sequence[PrototypeStrip] = ()
    prototypes_note: str = ""
    cost: Sequence[tuple[str, str]] = ()
    assumptions: Sequence[str] = ()
    loss: LossLabel | None = None
    """What the student's loss is; None where neither run.json nor the config says it."""
    config: str = ""
    provenance: Sequence[tuple[str, str]] = ()

    @property
    def alarms(self) -> list[Finding]:
        """What is wrong now."""
        return [finding for finding in self.findings if finding.state == "alarm"]

    @property
    def is_judged(self) -> bool:
        """Whether anything is known to be well, of a run that is long enough to say so."""
        return any(finding.state == "well" for finding in self.findings) and not is_too_short(self.findings)

    @property
    def has_scores(self) -> bool:
        """Whether an evaluation was logged."""
        return any(is_score(key) for key in self.columns)

    @property
    def gains(self) -> list[Gain]:
        """The score of each evaluation against the untrained encoder and raw pixels; the teacher's where it has one."""
        gains: dict[str, Gain] = {}
        for key in sorted(self.columns, key=lambda key: not key.endswith("/teacher")):
            values, steps = self.columns[key].values, self.columns[key].steps
            name = key.rpartition("/")[0]
            if is_score(key) and name not in gains and steps[0] == 0 and ((values >= 0) & (values <= 1)).all():
                gains[name] = Gain(name, float(values[0]), float(values[-1]), self.pixels.get(name))
        return list(gains.values())

    @property
    def measures(self) -> list[Finding]:
        """The findings of metrics with a healthy range."""
        return [finding for finding in self.findings if finding.limits is not None]

    @property
    def verdict(self) -> str:
        """What is well and what is not, in one line."""
        return verdict(self.findings)
