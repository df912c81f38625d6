"""The device that a call runs on, and the worker processes that feed it."""

import os

import torch

from capi.errors import CapiError
from capi.runtime.processes import own_device

# Of fewer images, starting a worker takes longer than reading them.
FEW_IMAGES = 256
# One accelerator is fed by so many.
MOST_WORKERS = 12


def choose_device(device: torch.device | str | None = None) -> torch.device:
    """That device, or the best one there is: cuda, mps, cpu. Of several processes on a machine each has its own."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        chosen = own_device(torch.device(device))
        torch.empty(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:
        raise CapiError(f'the device "{device}" is not there: use cpu, or another device that torch finds') from error
    return chosen


def count_cores(processes: int = 1) -> int:
    """The machine's cores for each of so many processes on it."""
    return max((os.cpu_count() or 1) // processes, 1)


def choose_workers(asked: int | None, device: torch.device, *, images: int | None = None, processes: int = 1) -> int:
    """Processes that read images ahead, for each of `processes` on a machine: as many as are asked for, or by default
    none where there are few images, one beside a CPU that computes, and all other cores beside an accelerator.
    """
    if asked is not None:
        return asked
    if images is not None and images < FEW_IMAGES:
        return 0
    return 1 if device.type == "cpu" else max(min(count_cores(processes) - 1, MOST_WORKERS), 1)
