"""What the functions of this package take alike: devices, names, a place for progress."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from capi.errors import CapiError
from capi.runtime.processes import own_device
from capi.runtime.progress import EvaluationProgress

Names = str | Path | Sequence[str | Path]


def choose_device(name: str | None = None) -> torch.device:
    """The device of that name, or the best one there is: cuda, mps, cpu."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = own_device(torch.device(name))
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise CapiError(f'the device "{name}" is not there: use cpu, or another device that torch finds') from error
    return device


def device_of(device: torch.device | str | None) -> torch.device:
    """A device by its name, or the best one."""
    return choose_device(None if device is None else str(device))


def listed(names: Names) -> Sequence[str | Path]:
    """A single name is a list of one, not of its letters."""
    return [names] if isinstance(names, str | Path) else names


def progress_on(console: Console | None) -> EvaluationProgress:
    """Bars on that console, or none."""
    return EvaluationProgress(console or Console(quiet=True))
