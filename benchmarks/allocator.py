"""How much faster an iteration is when the process keeps freed memory (glibc only).

    python benchmarks/allocator.py

Each setting has processes of its own, which alternate: glibc adapts its thresholds to what is freed, and stops doing so
for good once a program has set one.
"""

import argparse
import subprocess
import sys
from unittest.mock import patch

import torch
from measure import interleaved_best

import capi
from capi.method.masking import PatchGrid
from capi.runtime.devices import keep_freed_memory
from capi.train import build
from capi.train.cost.step import random_batch
from capi.train.step import train_step

SETTINGS = ("default", "kept")


def seconds_of_a_step(setting: str, recipe: str, batch_size: int) -> float:
    """The best of several iterations in this process; the first ones fill the heap."""
    config = capi.load_config(recipe, [f"optimization.batch_size={batch_size}"])
    with patch.object(build, "keep_freed_memory", keep_freed_memory if setting == "kept" else lambda: False):
        learner = capi.build_learner(config)
    batch = random_batch(
        masks=build.mask_sampler(config),
        grid=PatchGrid(*config.grid),
        image_shape=(config.model.channels, *config.data.height_and_width),
        batch_size=batch_size,
        seed=0,
        device=torch.device("cpu"),
    )
    train_step(learner, [batch], 0)
    return interleaved_best({setting: lambda: train_step(learner, [batch], 0)}, 2)[setting]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny4")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--setting", choices=SETTINGS, help="time one setting in this process")
    arguments = parser.parse_args()
    if arguments.setting is not None:
        print(seconds_of_a_step(arguments.setting, arguments.recipe, arguments.batch_size))
        return
    best = dict.fromkeys(SETTINGS, float("inf"))
    for _ in range(arguments.rounds):
        for setting in SETTINGS:
            command = [sys.executable, *sys.argv, "--setting", setting]
            timed = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - this program
            best[setting] = min(best[setting], float(timed.stdout))
    print(f"{arguments.recipe}, batch {arguments.batch_size}: ", end="")
    print(f"default {best['default']:.3f} s, kept {best['kept']:.3f} s")
    print(f"keeping freed memory makes an iteration {best['default'] / best['kept']:.2f} times faster")


if __name__ == "__main__":
    main()
