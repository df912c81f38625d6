"""GPUs by name, with what their data sheets say; and `this`, the machine at hand, whose peak is measured.

Energy is counted with the power of boards and the CO2 of a kWh, in plans before a run and in reports after it.
"""

import re
import time
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import torch
import yaml

from capi.config.schema import Config
from capi.errors import CapiError, counted, nearest
from capi.method.masking import PatchGrid
from capi.train.build import mask_sampler
from capi.train.cost.flop import iteration_flop
from capi.train.cost.step import memory_of
from capi.train.step import Learner
from capi.zoo.build import target_class

THIS = "this"
_WORDS = re.compile(r"[a-z0-9]+")
# Boards that share a number with one of the table and have another chip.
_OTHER_BOARDS = {"laptop", "max", "super", "ti"}
RunPrecision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Gpu:
    """What a plan has to know of a GPU, or of a machine without one: bytes, FLOP/s, watts.

    `measured` peaks are those of a large product; others stand in the data sheet, and no product reaches them.
    """

    name: str
    title: str
    memory: float
    bfloat16: float | None
    float32: float
    watts: float | None
    accelerator: bool = True
    measured: bool = False

    def precision(self, wanted: str) -> RunPrecision:
        """The precision of `run.precision` here: bfloat16 only where the chip has it."""
        if wanted == "bfloat16" and self.bfloat16 is None:
            raise CapiError(f"{self.title} has no bfloat16: leave run.precision at auto, or set it to float32")
        return "float32" if wanted == "float32" or self.bfloat16 is None else "bfloat16"

    def peak(self, precision: RunPrecision) -> float:
        return self.float32 if precision == "float32" or self.bfloat16 is None else self.bfloat16


@cache
def gpus() -> dict[str, Gpu]:
    """All that there is data of, by name."""
    text = (resources.files("capi.train.cost") / "gpus.yaml").read_text(encoding="utf-8")
    return {name: _from_data_sheet(name, sheet) for name, sheet in yaml.safe_load(text).items()}


def _from_data_sheet(name: str, sheet: dict[str, Any]) -> Gpu:
    rounded = sheet["bfloat16"]
    return Gpu(
        name=name,
        title=sheet["title"],
        memory=sheet["memory"] * 1e9,
        bfloat16=None if rounded is None else rounded * 1e12,
        float32=sheet["float32"] * 1e12,
        watts=board_power(sheet["title"]),
    )


def find_gpu(name: str, *, device: torch.device | None = None) -> Gpu:
    """A GPU of the table, or this machine with its peak measured."""
    if name == THIS:
        return this_machine(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if name not in gpus():
        # A name that is cut short means the ones that begin with it.
        longer = [title for title in gpus() if title.startswith(name)]
        close = nearest(name, longer or [*gpus(), THIS])
        raise CapiError(f'there is no GPU "{name}"{close} (known: {THIS}, {", ".join(gpus())})')
    return gpus()[name]


def gpu_of_device(title: str, memory: float) -> Gpu | None:
    """The GPU of the table that a driver names so, such as "NVIDIA A100-SXM4-80GB"; the one with the nearest memory."""
    words = set(_WORDS.findall(title.lower()))
    if words & _OTHER_BOARDS:
        return None
    alike = []
    for gpu in gpus().values():
        # What names the chip: a100, 4090, mi300x. Each die of an MI250X is a device of its own.
        chip = next(word for word in _WORDS.findall(gpu.title.lower()) if any(letter.isdigit() for letter in word))
        if chip in words and "both dies" not in gpu.title:
            alike.append(gpu)
    same_socket = [gpu for gpu in alike if ("pcie" in words) == ("PCIe" in gpu.title)]
    return min(same_socket or alike, key=lambda gpu: abs(gpu.memory - memory), default=None)


def peak_images_per_second(config: Config, learner: Learner, device: torch.device, processes: int) -> float | None:
    """What a run's devices would train on if they reached the peaks of their data sheets; None where those lack."""
    if device.type != "cuda" or target_class(config).wants_encoder:
        # What a frozen encoder computes is not known.
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(device), memory_of(device))
    if gpu is None:
        return None
    grid, optimization = PatchGrid(*config.grid), config.optimization
    visible, _, predicted = mask_sampler(config).counts(grid)
    flop = iteration_flop(
        learner.student,
        learner.target,
        batch_size=optimization.batch_size // (processes * optimization.micro_batches),
        patches=grid.size,
        visible=visible,
        predicted=predicted,
    )
    update = learner.student_optimizer.flop() / optimization.batch_size
    peak = gpu.peak("bfloat16" if learner.precision == torch.bfloat16 else "float32")
    return processes * peak / (sum(flop) + update)


def this_machine(device: torch.device, size: int | None = None) -> Gpu:
    """The machine at hand: all its memory, and the best of a few large products."""
    accelerator = device.type == "cuda"
    side = size or (8192 if accelerator else 2048)
    has_bfloat16 = accelerator and torch.cuda.is_bf16_supported(including_emulation=False)
    rounded = measured_peak(device, torch.bfloat16, side) if has_bfloat16 else None
    threads = torch.get_num_threads()
    title = torch.cuda.get_device_name(device) if accelerator else f"this machine, {counted(threads, 'thread')}"
    return Gpu(
        name=THIS,
        title=title,
        memory=float(memory_of(device)),
        bfloat16=rounded,
        float32=measured_peak(device, torch.float32, side),
        watts=None,
        accelerator=accelerator,
        measured=True,
    )


def measured_peak(device: torch.device, dtype: torch.dtype, size: int, rounds: int = 4) -> float:
    """FLOP/s of the best product of square matrices."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out, best = torch.empty_like(left), float("inf")
    for _ in range(rounds + 1):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        # Reading one value waits for the device.
        out[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


# kgCO2eq a kWh: the world's electricity in 2023, 480 g (Ember, Global Electricity Review 2024). The paper's 928 kg for
# 2651 kWh are 0.35, those of one data centre.
CARBON_INTENSITY = 0.48


def board_power(name: str) -> float | None:
    """Watts of a device by its maker's name for it; None where that is not known."""
    words = _words(name)
    return next((watts for board, watts in _boards() if board <= words), None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[A-Z0-9]+", name.upper()))


@cache
def _boards() -> list[tuple[set[str], float]]:
    text = (resources.files("capi.train.cost") / "board_power.yaml").read_text(encoding="utf-8")
    return [(_words(name), float(watts)) for name, watts in yaml.safe_load(text).items()]
