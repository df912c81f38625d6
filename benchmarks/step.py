"""Speed of a whole iteration as images/s and as a share of this machine's GEMM peak.

    python benchmarks/step.py

The peak is the best float32 product of 4096 x 4096 matrices, measured before and after in the same run. Only the FLOP
that the method requires are counted (capi/train/cost/flop.py): what is computed twice to save memory counts once.
"""

import argparse

import torch
from measure import gemm_peak

import capi
from capi.runtime.devices import keep_freed_memory

# The paper's setting of prototypes and predictions, at batches that fit a laptop.
PAPER = ["clustering.prototypes=16384", "masking.predict=7"]
CASES = {
    "tiny4": ("ViT-tiny/4 at 32 px", 128, ["clustering.prototypes=4096", "masking.predict=7"]),
    "vits16": ("ViT-S/16 at 224 px", 64, PAPER),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--peak-size", type=int, default=4096)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--batch-size", type=int, help="instead of each case's own")
    arguments = parser.parse_args()
    keep_freed_memory()
    costs = {}
    peak = gemm_peak(arguments.peak_size)
    for recipe, (_, batch_size, overrides) in CASES.items():
        if arguments.only in (None, recipe):
            size = arguments.batch_size or batch_size
            config = capi.load_config(recipe, [f"optimization.batch_size={size}", *overrides])
            costs[recipe] = capi.check(config, device="cpu", rounds=arguments.rounds).cost
            peak = max(peak, gemm_peak(arguments.peak_size))
    print(f"GEMM peak {peak / 1e9:.0f} GFLOP/s on {torch.get_num_threads()} threads")
    for recipe, cost in costs.items():
        print(
            f"{recipe:7} {CASES[recipe][0]}, batch {cost.batch_size}: {cost.images_per_second:.2f} images/s, "
            f"{sum(cost.flop_an_image) / 1e9:.2f} GFLOP an image, {cost.flop_per_second / peak:.1%} of the peak"
        )


if __name__ == "__main__":
    main()
