"""What a run cost: time over all its starts, and from it energy and CO2 of the device alone.

Nothing here is measured at the socket. The assumptions are part of the result, in words.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capi.errors import CapiError, counted
from capi.report.pages.data import Column
from capi.train.cost.hardware import CARBON_INTENSITY, board_power

# Where nothing is published, or the name is not known.
_ASSUMED = {"cpu": 65.0, "mps": 30.0}
_ASSUMED_ACCELERATOR = 300.0


@dataclass(frozen=True)
class CostAssumptions:
    """What the user knows better than the report would assume: the power of the device, kg of CO2 a kWh."""

    watts: float | None = None
    carbon: float | None = None

    def __post_init__(self) -> None:
        if self.watts is not None and not (math.isfinite(self.watts) and self.watts > 0):
            raise CapiError(f"the power of the device must be a number of watts above 0, not {self.watts}")
        if self.carbon is not None and not (math.isfinite(self.carbon) and self.carbon >= 0):
            raise CapiError(f"the CO2 of a kWh must be a number of kilograms from 0 on, not {self.carbon}")


DEFAULT_COSTS = CostAssumptions()


@dataclass(frozen=True)
class Power:
    """What a device draws, and how that is known."""

    watts: float
    said: str


@dataclass(frozen=True)
class Cost:
    """Time, energy and CO2 of a run, and what they rest on."""

    seconds: float
    starts: int
    kilowatt_hours: float
    carbon_kilograms: float
    assumptions: tuple[str, ...]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The numbers for people."""
        counted = f"over {self.starts} starts" if self.starts > 1 else "in one start"
        return [
            ("Time", f"{spoken_time(self.seconds)}, {counted}"),
            ("Energy of the device", _spoken_amount(self.kilowatt_hours, "kWh", "Wh")),
            ("CO2 equivalent", _spoken_amount(self.carbon_kilograms, "kg", "g")),
        ]


def device_power(device: str, name: str | None = None) -> Power:
    """Power of a device such as `cuda:0`, by its maker's name for it where that is known."""
    kind = device.partition(":")[0]
    published = board_power(name) if name else None
    if published is not None:
        return Power(published, f"{name} draws {published:g} W all the time, its published thermal design power.")
    if kind in _ASSUMED:
        what = {"cpu": "The processor", "mps": "The Apple graphics processor"}[kind]
        watts = _ASSUMED[kind]
        return Power(watts, f"{what} is assumed to draw {watts:g} W all the time: a guess, not a measurement.")
    shown = name or f"device {device}"
    return Power(
        _ASSUMED_ACCELERATOR,
        f"{shown} is not in the table of known devices and is assumed to draw {_ASSUMED_ACCELERATOR:g} W "
        "all the time: a guess, not a measurement.",
    )


def seconds_of_starts(clock: Column, started_at: Sequence[int]) -> list[float]:
    """How long each start trained, from records whose clock restarts at each start and at each roll-back."""
    finite = np.isfinite(clock.values)
    steps, seconds = clock.steps[finite], clock.values[finite]
    start = np.zeros(len(steps), np.int64)
    for index, first in enumerate(started_at):
        # Of several starts at one step only the last wrote records.
        start[steps > first] = index
    passed = np.diff(seconds, prepend=0.0)
    restarted = (passed < 0) | (np.diff(start, prepend=0) != 0)
    spent = np.where(restarted, seconds, passed)
    # Whole numbers come back where there was nothing to count.
    return np.bincount(start, weights=spent, minlength=max(len(started_at), 1)).astype(float).tolist()


def cost_of(
    spent: Sequence[float],
    starts: Sequence[Mapping[str, Any]],
    given: CostAssumptions = DEFAULT_COSTS,
) -> Cost:
    """Energy and CO2 of the seconds that each start took, on the device that it ran on."""
    intensity = CARBON_INTENSITY if given.carbon is None else given.carbon
    powers = [_power(start, given.watts) for start in starts] or [_power({}, given.watts)]
    joules = sum(seconds * power.watts for seconds, power in zip(spent, powers, strict=True))
    energy = joules / 3.6e6
    assumptions = (
        *dict.fromkeys(power.said for power in powers),
        _grid_sentence(given.carbon),
        "Counted is the device alone: no other parts of the computer, no cooling, no making of the hardware.",
        "Time is what the metrics hold: not counted are starting up, the evaluation before the first step, and work "
        "that was lost when a run was killed.",
    )
    return Cost(sum(spent), max(len(starts), 1), energy, energy * intensity, assumptions)


def spoken_time(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 120:
        return counted(round(seconds), "second")
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def _power(start: Mapping[str, Any], watts: float | None) -> Power:
    if watts is not None:
        return Power(watts, f"The device draws {watts:g} W all the time, as was given.")
    machine = start.get("machine")
    name = machine.get("accelerator") if isinstance(machine, Mapping) else None
    return device_power(str(start.get("device", "cpu")), str(name) if name else None)


def _grid_sentence(carbon: float | None) -> str:
    if carbon is not None:
        return f"A kWh stands for {carbon:g} kg of CO2 equivalent, as was given."
    return (
        f"A kWh stands for {CARBON_INTENSITY} kg of CO2 equivalent, the world's average; where you are it may be a "
        "tenth of that or twice as much. The paper's 2651 kWh and 928 kg imply 0.35."
    )


def _spoken_amount(value: float, unit: str, thousandth: str) -> str:
    if value < 0.1:
        return f"{value * 1000:.3g} {thousandth}"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
