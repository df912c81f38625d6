"""Timing and memory of several implementations in one interleaved run."""

import ctypes
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

Work = Callable[[], object]


def interleaved_best(
    works: dict[str, Work], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The best time of each, in seconds; every round runs all of them, so that noise meets them alike.

    Where other programs take the cores, `time.process_time` counts what this one had of them, over all its threads.
    """
    best = dict.fromkeys(works, float("inf"))
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            start = clock()
            work()
            best[name] = min(best[name], clock() - start)
    return best


def peak_extra_bytes(work: Work) -> int:
    """How far the resident memory of this process rises above its start while `work` runs (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return _status("VmHWM") - before


def gemm_peak(size: int = 4096, rounds: int = 5) -> float:
    """FLOP/s of the best float32 product of square matrices."""
    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    best = interleaved_best({"gemm": lambda: torch.mm(left, right, out=out)}, rounds)
    return 2 * size**3 / best["gemm"]


def _status(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match, f"/proc/self/status has no {field}"
    return int(match[1]) * 1024
