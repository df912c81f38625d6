"""The memory and the collectives of one process of many, as torch's own tracker sees them, beside `capi plan`.

    python benchmarks/ranks.py                    all cells: minutes each for ViT-L
    python benchmarks/ranks.py --only vits16 --processes 32 --shards 8 --ranks 0
    python benchmarks/ranks.py --only adapt --recompute off adapt.lora_rank=16        capi adapt on one GPU

The real step (FSDP2, bfloat16, recomputed blocks, micro-batches) of one process runs on tensors without values, over a
network that is none, on the way that an accelerator takes. Only the queue of kernels and the allocator's fragments are
missing. No memory is taken, so ViT-L with 512 images a GPU is tracked on a laptop.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
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

BY_FSDP = {"_allgather_base_", "_reduce_scatter_base_", "allgather_", "reduce_scatter_"}


@dataclass(frozen=True)
class Tracked:
    """Of one step of one process: bytes at the peak, as tracked and as planned; collectives of FSDP and others."""

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

    @property
    def error(self) -> float:
        return self.planned / self.peak - 1


class Collectives(TorchDispatchMode):
    """Counts what goes to other processes, by whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.by_fsdp = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            groups = [ProcessGroup.unbox(each) for each in tree_leaves(args) if is_group(each)]
            name = func._overloadpacket.__name__
            if any(group.size() > 1 for group in groups) and name != "barrier":
                # FSDP gathers and scatters, and adds up the gradients of replicas in a group of its own.
                world = dist.distributed_c10d._get_default_group().group_name
                others = name not in BY_FSDP and all(group.group_name == world for group in groups)
                self.others += others
                self.by_fsdp += not others
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


def is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def tracked(recipe: str, processes: int, rank: int, images: int, overrides: list[str]) -> Tracked:
    """One step of the process `rank`, with `images` images of its own, once moments and gradients are there."""
    fixed = [f"optimization.batch_size={images * processes}", "run.precision=bfloat16"]
    changes = [*fixed, *overrides]
    adapting = recipe == "adapt"
    config = adapted_config(ADAPTED, changes, weights=False) if adapting else load_config(recipe, changes)
    with as_on_accelerator(), fake_learner(config, processes, rank) as learner:
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
    rows = []
    print(
        "recipe   processes  shards  rank  images  tracked GiB  planned  error  FSDP's  others  phases, tracked/planned"
    )
    for recipe in arguments.only:
        images, parts = CELLS[recipe]
        for processes, shards in ALONE if recipe == "adapt" else WORLDS:
            if arguments.processes not in (None, processes) or arguments.shards not in (None, shards):
                continue
            overrides = [f"optimization.micro_batches={parts}", f"distributed.shards={shards}", *arguments.overrides]
            overrides.append(f"run.activation_checkpointing={arguments.recompute}")
            for rank in arguments.ranks or sorted({0, processes - 1}):
                row = tracked(recipe, processes, rank, images, overrides)
                rows.append(asdict(row))
                print(
                    f"{recipe:8} {processes:9} {shards:7} {rank:5} {images:7} {row.peak / 2**30:12.2f} "
                    f"{row.planned / 2**30:8.2f} {row.error:+6.1%} {row.fsdp_collectives:7} {row.other_collectives:7}",
                    *(
                        f"{name} {peak / 2**30:.2f}/{planned / 2**30:.2f}"
                        for name, (peak, planned) in row.phases.items()
                    ),
                    flush=True,
                )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
