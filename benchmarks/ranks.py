"""The memory and the collectives of one process of many, as torch's own tracker sees them, beside `capi plan`.

    python benchmarks/ranks.py                    all cells: minutes each for ViT-L
    python benchmarks/ranks.py --only vits16 --processes 32 --shards 8 --ranks 0
    python benchmarks/ranks.py --only adapt --recompute off adapt.lora_rank=16        capi adapt on one GPU

The real step (FSDP2, bfloat16, recomputed blocks, micro-batches) of one process runs on tensors without values, over a
network that is none, on the way that an accelerator takes. Only the queue of kernels and the allocator's fragments are
missing. No memory is taken, so ViT-L with 512 images a GPU is tracked on a laptop. With `--json` every row is kept as
soon as it is there, and a second call tracks what is missing.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capi.api.training import adapted_config
from capi.config.files import load_config
from capi.config.schema import Config
from capi.method.masking import PatchGrid
from capi.models.costs import CLUSTERING, PHASES, STUDENT, TEACHER, UPDATE
from capi.models.layers import _Norm
from capi.runtime.devices import as_on_accelerator
from capi.train.build import mask_sampler
from capi.train.cost.fake_processes import CPU, fake_learner
from capi.train.cost.hardware import find_gpu
from capi.train.cost.plan import plan_run
from capi.train.step import train_step
from capi.types import MaskedBatch

# Images of a GPU, and in how many micro-batches: what the plan says fits 80 GB.
CELLS = {"vits16": (512, 2), "vitb14": (256, 2), "vitl14": (128, 2), "adapt": (256, 4)}
# 31 divides no width, head, prototype or layer.
WORLDS = ((32, 1), (32, 8), (32, 32), (31, 31))
# What `adapt` starts from, on one GPU of 24 GB; its file is not needed.
ADAPTED, ALONE = "baseline:dinov2_vitl14", ((1, 1),)


@dataclass(frozen=True)
class Tracked:
    """A step of one process: bytes at the peak, as tracked and as planned; collectives of FSDP and others."""

    recipe: str
    processes: int
    shards: int
    rank: int
    images: int
    recomputed: str
    peak: int
    planned: int
    phases: dict[str, tuple[int, int]]
    fsdp_collectives: int
    other_collectives: int


class Collectives(TorchDispatchMode):
    """Counts what goes to other processes, by whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.by_fsdp = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            groups = [ProcessGroup.unbox(each) for each in tree_leaves(args) if is_group(each)]
            if any(group.size() > 1 for group in groups) and func._overloadpacket.__name__ != "barrier":
                by_fsdp = is_called_by_fsdp()
                self.by_fsdp += by_fsdp
                self.others += not by_fsdp
        return func(*args, **(kwargs or {}))


class Tracker(MemTracker):
    """torch's own without its statistics of modules, which know no micro-batches and no weights without gradients.

    It observes the step to know its phases.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.phases = TEACHER, dict.fromkeys(PHASES, 0)

    def _update_peak_stats(self, peak_state: Any) -> None:
        super()._update_peak_stats(peak_state)
        total = self._curr_mem_snap[CPU]["Total"]
        self.phases[self.phase] = max(self.phases[self.phase], total)

    def tokens(self, *_: Any) -> None:
        self.phase = CLUSTERING

    def gradients(self, *_: Any) -> None:
        self.phase = UPDATE

    # What it does before and after every module.
    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = lambda *_: None  # type: ignore[assignment]


def fused_norm(x: Tensor, _: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:  # noqa: ARG001
    """What an accelerator's one kernel keeps: its input and a number of each row. torch takes many steps on a CPU."""
    normed: Tensor = _Norm.apply(x, weight)
    return normed


def is_called_by_fsdp() -> bool:
    """Gathering, scattering, and the sums over replicas, whose group may be that of all processes."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if "/fsdp/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def tracked(recipe: str, processes: int, rank: int, images: int, overrides: list[str]) -> Tracked:
    """One step of the process `rank`, with `images` images of its own, once moments and gradients are there."""
    fixed = [f"optimization.batch_size={images * processes}", "run.precision=bfloat16"]
    changes = [*fixed, *overrides]
    adapting = recipe == "adapt"
    config = adapted_config(ADAPTED, changes, weights=False) if adapting else load_config(recipe, changes)
    with as_on_accelerator(), patch.object(F, "rms_norm", fused_norm), fake_learner(config, processes, rank) as learner:
        batches = empty_batches(config, images)
        tracker, collectives = Tracker(), Collectives()
        for optimizer in learner.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            # Makes what it keeps.
            optimizer.step()
            optimizer.zero_grad()
        states = [value for optimizer in learner.optimizers for value in tree_leaves(dict(optimizer.state))]
        inputs = [value for batch in batches for value in batch]
        modules = (learner.student, learner.teacher, learner.target)
        tracker.track_external(*modules, *(value for value in (*states, *inputs) if isinstance(value, Tensor)))
        learner.student.register_forward_pre_hook(lambda *_: setattr(tracker, "phase", STUDENT))
        with tracker, collectives:
            # Late enough that nothing stands still.
            train_step(learner, batches, config.optimization.steps // 2, tracker)
        peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    planned = plan_run(config, find_gpu("rtx4090" if adapting else "a100-80g"), processes)
    return Tracked(
        recipe=recipe,
        processes=processes,
        shards=planned.saving.shards,
        rank=rank,
        images=images,
        recomputed=config.run.activation_checkpointing,
        peak=peak,
        planned=planned.memory.peak,
        phases={name: (tracker.phases[name], planned.memory.phases[name]) for name in PHASES},
        fsdp_collectives=collectives.by_fsdp,
        other_collectives=collectives.others,
    )


def empty_batches(config: Config, images: int) -> list[MaskedBatch]:
    visible, _, predicted = mask_sampler(config).counts(PatchGrid(*config.grid))
    parts = config.optimization.micro_batches
    return [
        MaskedBatch(
            torch.empty(images // parts, config.model.channels, *config.data.height_and_width),
            torch.empty(images // parts, visible, dtype=torch.int64),
            torch.empty(images // parts, predicted, dtype=torch.int64),
        )
        for _ in range(parts)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--only", choices=CELLS, nargs="+", default=list(CELLS))
    parser.add_argument("--processes", type=int)
    parser.add_argument("--shards", type=int)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--recompute", choices=("off", "selective", "full"), default="full")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    file = Path(arguments.json) if arguments.json else None
    rows = {cell(row): row for row in (json.loads(file.read_text()) if file and file.exists() else ())}
    print(
        "recipe   processes  shards  rank  images  tracked GiB  planned  error  FSDP's  others  phases, tracked/planned"
    )
    for recipe in arguments.only:
        images, parts = CELLS[recipe]
        for processes, shards in ALONE if recipe == "adapt" else WORLDS:
            if arguments.processes not in (None, processes) or arguments.shards not in (None, shards):
                continue
            overrides = [f"optimization.micro_batches={parts}", f"distributed.shards={shards}", *arguments.overrides]
            overrides.append(f"run.activation_checkpointing='{arguments.recompute}'")
            for rank in arguments.ranks or sorted({0, processes - 1}):
                key = (recipe, processes, shards, rank, images, arguments.recompute)
                if key not in rows:
                    rows[key] = asdict(tracked(recipe, processes, rank, images, overrides))
                    if file:
                        file.write_text(json.dumps(list(rows.values()), indent=1))
                print(line(rows[key]), flush=True)


def cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("recipe", "processes", "shards", "rank", "images", "recomputed"))


def line(row: dict[str, Any]) -> str:
    gib, phases = 2**30, row["phases"].items()
    return (
        f"{row['recipe']:8} {row['processes']:9} {row['shards']:7} {row['rank']:5} {row['images']:7} "
        f"{row['peak'] / gib:12.2f} {row['planned'] / gib:8.2f} {row['planned'] / row['peak'] - 1:+6.1%} "
        f"{row['fsdp_collectives']:7} {row['other_collectives']:7} "
        + " ".join(f"{name} {measured / gib:.2f}/{wanted / gib:.2f}" for name, (measured, wanted) in phases)
    )


if __name__ == "__main__":
    main()
