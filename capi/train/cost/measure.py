"""A plan beside real iterations on this machine: does what was counted agree with what is measured?"""

import ctypes
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from capi.config.files import load_config
from capi.config.schema import Config
from capi.train.cost.hardware import Gpu
from capi.train.cost.plan import Assumptions, PlanComparison, RunPlan, plan_run
from capi.train.dry_run import check

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# More would keep a CPU busy for minutes without telling more.
MOST_IMAGES = 32


@dataclass(frozen=True)
class Measured:
    """The plan of the iteration that was run, and what it took. Memory is None where the system does not tell it."""

    plan: RunPlan
    seconds: float
    peak_bytes: int | None

    @property
    def comparisons(self) -> list[PlanComparison]:
        rows = [PlanComparison("seconds a step", self.plan.effort.seconds_a_step, self.seconds)]
        if self.peak_bytes is not None:
            rows.append(PlanComparison("peak bytes", float(self.plan.memory.peak), float(self.peak_bytes)))
        return rows

    @property
    def mfu(self) -> float:
        """The share of the peak that the iteration really reached."""
        return self.plan.mfu * self.plan.effort.seconds_a_step / self.seconds


def measured_config(config: Config, images: int | None = None) -> Config:
    """The config with a batch that can be tried: that of one micro-batch, at most 32 images unless said."""
    optimization = config.optimization
    batch = images or min(optimization.batch_size // optimization.micro_batches, MOST_IMAGES)
    changed = optimization.model_copy(update={"batch_size": batch, "micro_batches": 1})
    return config.model_copy(update={"optimization": changed})


def measure(
    config: Config,
    gpu: Callable[[], Gpu],
    device: torch.device,
    *,
    assumptions: Assumptions | None = None,
    rounds: int = 2,
    progress: Callable[[], None] = lambda: None,
) -> Measured:
    """Run real iterations of a config whose batch fits, on noise, and plan the same.

    `gpu` is asked afterwards, since measuring its peak takes memory too.
    """
    # One iteration of a tiny model: what libraries load when they are first used is no part of the plan.
    tiny = ["model.width=16", "model.depth=1", "clustering.prototypes=8", "optimization.batch_size=2"]
    check(load_config("small", tiny), device=device, rounds=1)
    before = _reset_peak()
    cost = check(config, device=device, rounds=rounds, progress=progress).cost
    peak = _status("VmHWM")
    risen: int | None = cost.peak_bytes
    if device.type != "cuda":
        risen = None if before is None or peak is None else peak - before
    return Measured(plan_run(config, gpu(), assumptions=assumptions), cost.seconds, risen)


def _reset_peak() -> int | None:
    """Let the highest resident memory of this process count from here; what it is now (Linux)."""
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return None
    try:
        _RESET.write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    try:
        match = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
