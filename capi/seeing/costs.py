"""What a run cost: time over all its starts, and from it energy and CO2 of the device alone.

Nothing here is measured at the socket. The assumptions are part of the result, in words.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capi.errors import CapiError
from capi.visualize.report_data import Column

# Kilograms of CO2 equivalent for each kWh: 928 kg for 2651 kWh in the paper.
GRID_INTENSITY = 0.35
# Thermal design power in watts as the makers publish it. The first whose words all stand in a device's name counts.
_DESIGN_POWER = (
    ("B200", 1000),
    ("H200", 700),
    ("H100 PCIe", 350),
    ("H100 NVL", 400),
    ("H100", 700),
    ("A100 PCIE 40GB", 250),
    ("A100 80GB PCIe", 300),
    ("A100", 400),
    ("V100 PCIE", 250),
    ("V100", 300),
    ("P100", 300),
    ("L40S", 350),
    ("L40", 300),
    ("L4", 72),
    ("T4", 70),
    ("A40", 300),
    ("A30", 165),
    ("A10", 150),
    ("RTX A6000", 300),
    ("RTX 6000 Ada", 300),
    ("RTX 5090", 575),
    ("RTX 5080", 360),
    ("RTX 4090", 450),
    ("RTX 4080", 320),
    ("RTX 4070", 200),
    ("RTX 3090", 350),
    ("RTX 3080", 320),
    ("RTX 3070", 220),
    ("RTX 3060", 170),
    ("RTX 2080 Ti", 250),
    ("GTX 1080 Ti", 250),
    ("MI325X", 1000),
    ("MI300X", 750),
    ("MI250X", 560),
)
# Where nothing is published, or the name is not known.
_ASSUMED = {"cpu": 65.0, "mps": 30.0}
_ASSUMED_ACCELERATOR = 300.0


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
    if name:
        words = set(re.findall(r"[A-Z0-9]+", name.upper()))
        published = next((power for known, power in _DESIGN_POWER if set(known.upper().split()) <= words), None)
        if published is not None:
            return Power(
                float(published), f"{name} draws {published} W all the time, its published thermal design power."
            )
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
    """How long each start trained, from records whose clock begins anew at each start and at each roll-back."""
    known = np.isfinite(clock.values)
    steps, seconds = clock.steps[known], clock.values[known]
    start = np.zeros(len(steps), np.int64)
    for index, first in enumerate(started_at):
        # Of several starts at one step only the last wrote records.
        start[steps > first] = index
    passed = np.diff(seconds, prepend=0.0)
    anew = (passed < 0) | (np.diff(start, prepend=0) != 0)
    spent = np.where(anew, seconds, passed)
    # Whole numbers come back where there was nothing to count.
    return np.bincount(start, weights=spent, minlength=max(len(started_at), 1)).astype(float).tolist()


def cost_of(
    spent: Sequence[float],
    starts: Sequence[Mapping[str, Any]],
    *,
    watts: float | None = None,
    carbon: float | None = None,
) -> Cost:
    """Energy and CO2 of the seconds that each start took, on the device that it ran on."""
    require_costs(watts, carbon)
    intensity = GRID_INTENSITY if carbon is None else carbon
    powers = [_power(one, watts) for one in starts] or [_power({}, watts)]
    joules = sum(seconds * power.watts for seconds, power in zip(spent, powers, strict=True))
    energy = joules / 3.6e6
    assumptions = (
        *dict.fromkeys(power.said for power in powers),
        _grid_sentence(carbon),
        "Counted is the device alone: no other parts of the computer, no cooling, no making of the hardware.",
        "Time is what the metrics hold: not counted are starting up, the evaluation before the first step, and work "
        "that was lost when a run was killed.",
    )
    return Cost(sum(spent), max(len(starts), 1), energy, energy * intensity, assumptions)


def require_costs(watts: float | None, carbon: float | None) -> None:
    """Refuse what cannot be a power or an intensity."""
    if watts is not None and not (math.isfinite(watts) and watts > 0):
        raise CapiError(f"the power of the device must be a number of watts above 0, not {watts}")
    if carbon is not None and not (math.isfinite(carbon) and carbon >= 0):
        raise CapiError(f"the CO2 of a kWh must be a number of kilograms from 0 on, not {carbon}")


def spoken_time(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
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
        f"A kWh stands for {GRID_INTENSITY} kg of CO2 equivalent, which the paper's 2651 kWh and 928 kg imply; "
        "where you are it may be a tenth of that or twice as much."
    )


def _spoken_amount(value: float, unit: str, thousandth: str) -> str:
    if value < 0.1:
        return f"{value * 1000:.3g} {thousandth}"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
