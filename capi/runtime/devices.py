"""The device that a call runs on."""

import torch

from capi.errors import CapiError
from capi.runtime.processes import own_device


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
