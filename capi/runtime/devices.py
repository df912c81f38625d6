"""The device that a call runs on, how it computes, what feeds it, and the memory of the process."""

import ctypes
import os
import platform
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

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


# What torch 2.9 says of `float32_products`: its newer names cannot be mixed with those that others use.
warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
_counted_as_accelerator = False


def is_accelerator(device: torch.device) -> bool:
    """Whether code takes the way of an accelerator: few large kernels, in place of little memory at a time."""
    return device.type != "cpu" or _counted_as_accelerator


@contextmanager
def as_on_accelerator() -> Iterator[None]:
    """Tensors of the CPU go the way of an accelerator's, to test it or to count what it costs."""
    global _counted_as_accelerator  # noqa: PLW0603 - of the process, as the device is
    before, _counted_as_accelerator = _counted_as_accelerator, True
    try:
        yield
    finally:
        _counted_as_accelerator = before


@contextmanager
def float32_products(precision: Literal["highest", "high"]) -> Iterator[None]:
    """Products of float32 as they are (`highest`), or with factors rounded to TF32 where the device can (`high`).

    Convolutions too, which torch rounds by default. The one place that changes a setting of `torch.backends`, and only
    for as long as it takes.
    """
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


class CpuEvent:
    """A moment on a CPU, with what a `torch.cuda.Event` can do."""

    def record(self) -> None:
        self.moment = time.perf_counter()

    def elapsed_time(self, later: "CpuEvent") -> float:
        """Milliseconds."""
        return (later.moment - self.moment) * 1e3


def moment(device: torch.device) -> Any:
    """Now, as the device sees it: when it has computed all that it was given. Nothing waits until it is read."""
    event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else CpuEvent()
    event.record()
    return event


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use: of the device, or of this process where the CPU computes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    # ru_maxrss counts bytes on macOS and KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Transfer:
    """Brings tensors to a device: to CUDA on a stream of its own, while the steps before are still computed there.

    From pinned memory, as the loader gives it, nothing waits for a copy but the kernels that need it. `streams` is
    `torch.cuda`, or what stands in for it; None copies in line.
    """

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self.device = device
        self.streams = torch.cuda if streams is None and device.type == "cuda" else streams
        self.copying = None if self.streams is None else self.streams.Stream(device)

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        if self.streams is None:
            return [value.to(self.device, non_blocking=True) for value in values]
        with self.streams.stream(self.copying):
            moved = [value.to(self.device, non_blocking=True) for value in values]
        computing = self.streams.current_stream(self.device)
        computing.wait_stream(self.copying)
        for value in moved:
            # Its memory belongs to the stream of copies, which must not use it again before it was read.
            value.record_stream(computing)
        return moved


def count_cores(processes: int = 1) -> int:
    """The machine's cores for each of so many processes on it."""
    return max((os.cpu_count() or 1) // processes, 1)


def choose_workers(
    asked: int | None, device: torch.device | None, *, images: int | None = None, processes: int = 1
) -> int:
    """Processes that read images ahead, for each of `processes` on a machine: as many as are asked for, or by default
    none where there are few images, one beside a CPU that computes, and all other cores beside an accelerator. Without
    a device nothing else computes: all cores.
    """
    if asked is not None:
        return asked
    if device is None:
        return count_cores(processes)
    if images is not None and images < FEW_IMAGES:
        return 0
    return 1 if device.type == "cpu" else max(min(count_cores(processes) - 1, MOST_WORKERS), 1)


# glibc maps every large block again and unmaps it at free, so each training step pays page faults for the same
# gigabytes again; raising two thresholds keeps the pages. From malloc.h; the values are C ints, so 2^31 - 1 is the
# largest trim threshold. Blocks above the mmap threshold still go back at once: no tensor of a step should be that
# large, and keeping such blocks would bloat the process.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_INT = 2**31 - 1
LARGEST_KEPT_BLOCK = 512 * 2**20


def keep_freed_memory(largest_block: int = LARGEST_KEPT_BLOCK) -> bool:
    """Keep freed memory in the process instead of handing it back to the kernel. True when that was possible, False on
    other C libraries.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    trimmed = mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
    # Some releases of glibc refuse more than 32 MiB.
    mapped = mallopt(_M_MMAP_THRESHOLD, largest_block) or mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
    return bool(trimmed and mapped)
