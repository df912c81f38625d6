"""How much faster an iteration is when the process keeps freed memory (glibc only).

    python benchmarks/allocator.py

Both settings alternate in one run: glibc's thresholds can be changed at any time.
"""

import argparse
import ctypes

import torch
from measure import Work, interleaved_best

import capi
from capi.allocator import keep_freed_memory
from capi.api import mask_sampler
from capi.method.masking import Grid
from capi.train.check import random_batch
from capi.train.step import train_step

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _GLIBC_DEFAULT = -1, -3, 128 * 1024


def give_freed_memory_back() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _GLIBC_DEFAULT)
    libc.mallopt(_M_TRIM_THRESHOLD, _GLIBC_DEFAULT)
    libc.malloc_trim(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny4")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    config = capi.load_config(arguments.recipe, [f"optimization.batch_size={arguments.batch_size}"])
    learner = capi.build_learner(config)
    batch = random_batch(
        masks=mask_sampler(config),
        grid=Grid(*config.grid),
        image_shape=(config.model.channels, *config.data.height_and_width),
        batch_size=arguments.batch_size,
        seed=0,
        device=torch.device("cpu"),
    )

    best = {"default": float("inf"), "kept": float("inf")}
    for _ in range(arguments.rounds):
        for name, choose in (("default", give_freed_memory_back), ("kept", keep_freed_memory)):
            choose()
            # The first iterations after a change fill the heap anew: they are run, and the one after them is timed.
            works: dict[str, Work] = {name: lambda: [train_step(learner, [batch], 0) for _ in range(2)]}
            best[name] = min(best[name], interleaved_best(works, 1)[name] / 2)
    print(
        f"{arguments.recipe}, batch {arguments.batch_size}: default {best['default']:.3f} s, kept {best['kept']:.3f} s"
    )
    print(f"keeping freed memory makes an iteration {best['default'] / best['kept']:.2f} times faster")


if __name__ == "__main__":
    main()
