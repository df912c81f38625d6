"""Where the time of an iteration goes, under torch's profiler.

    python benchmarks/step_profile.py

One iteration of ViT-S/16 as in `step.py`, after one that warms up. The profiler itself takes some of the time, most of
it in small operations.
"""

import argparse
from collections import Counter
from typing import Any

import torch
from step import CASES
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

import capi
from capi.method.masking import PatchGrid
from capi.runtime.devices import keep_freed_memory
from capi.train.build import mask_sampler
from capi.train.cost.step import random_batch
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch

CLUSTERING = "clustering"
PRODUCTS = "products"
# What an operation belongs to, by the start of its name without `aten::`; the rest is elementwise.
OPERATIONS = {
    ("mm", "addmm", "bmm", "addmv", "mv"): PRODUCTS,
    ("_scaled_dot_product",): "attention",
    ("gelu",): "GELU",
    ("_fused_adamw", "_foreach_lerp", "lerp"): "optimisers and teacher",
    ("copy_", "cat", "index", "gather", "scatter", "fill_", "zero_", "clone"): "copies, gathering and scattering",
}
# Functions of our own, whose operations belong to them whatever they are.
FUNCTIONS = {"_Norm": "norms", "_Rotate": "rotary positions"}


def part_of(event: FunctionEvent) -> str:
    """What the time of an operation is counted for; of the clustering, its products are counted apart from all else."""
    name = event.name.removeprefix("aten::")
    part = next((part for starts, part in OPERATIONS.items() if name.startswith(starts)), "elementwise and the rest")
    within: FunctionEvent | None = event
    while within is not None:
        if within.name == CLUSTERING:
            return f"{CLUSTERING}: {PRODUCTS if part == PRODUCTS else 'balancing, softmax and the rest'}"
        for function, title in FUNCTIONS.items():
            if within.name in (function, f"{function}Backward"):
                return title
        within = within.cpu_parent
    return part


def profiled(learner: Learner, batch: MaskedBatch) -> Counter[str]:
    """Microseconds of each part in one iteration."""
    target: Any = learner.target
    forward = target.forward

    def marked(*given: Any) -> Any:
        with record_function(CLUSTERING):
            return forward(*given)

    target.forward = marked
    train_step(learner, [batch], 0)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        train_step(learner, [batch], 1)
    times: Counter[str] = Counter()
    for event in record.events():
        times[part_of(event)] += event.self_cpu_time_total
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="vits16")
    parser.add_argument("--batch-size", type=int, help="instead of the case's own")
    arguments = parser.parse_args()
    keep_freed_memory()
    title, batch_size, overrides = CASES[arguments.case]
    size = arguments.batch_size or batch_size
    config = capi.load_config(arguments.case, [f"optimization.batch_size={size}", *overrides])
    batch = random_batch(
        masks=mask_sampler(config),
        grid=PatchGrid(*config.grid),
        image_shape=(config.model.channels, *config.data.height_and_width),
        batch_size=size,
        seed=config.seed,
        device=torch.device("cpu"),
    )
    times = profiled(capi.build_learner(config), batch)
    print(f"{title}, batch {size}: {times.total() / 1e6:.2f} s")
    for part, microseconds in times.most_common():
        print(f"  {microseconds / times.total():6.1%}  {part}")


if __name__ == "__main__":
    main()
