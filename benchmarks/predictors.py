"""Training speed of the three predictors at ViT-S/16, beside the paper's claims.

    python benchmarks/predictors.py

The paper says that a split predictor with self-attention trains 32 % faster than a fused one, and cross-attention
another 18 % faster. All of them take real iterations on the same batch, interleaved, so that noise meets them alike.
"""

import argparse
from functools import partial

import torch
from measure import Work, interleaved_best

import capi
from capi.config.schema import Config
from capi.method.masking import PatchGrid
from capi.train.build import mask_sampler
from capi.train.cost.flop import iteration_flop
from capi.train.cost.step import random_batch
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch

PAPER = ["clustering.prototypes=16384", "masking.predict=7"]
VARIANTS = {
    "fused": ["model.predictor.kind=fused"],
    "self, all masked": ["model.predictor.kind=self", "model.predictor.mask_tokens=masked"],
    "self": ["model.predictor.kind=self"],
    "cross": [],
}
# From one to the next: how much faster the paper says that it is. It does not say where its mask tokens stand.
CLAIMS = {("fused", "self"): 0.32, ("fused", "self, all masked"): 0.32, ("self", "cross"): 0.18}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="vits16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--overrides", nargs="*", default=PAPER)
    arguments = parser.parse_args()
    sized = [f"optimization.batch_size={arguments.batch_size}", *arguments.overrides]
    configs = {name: capi.load_config(arguments.recipe, [*sized, *own]) for name, own in VARIANTS.items()}
    learners = {name: capi.build_learner(config) for name, config in configs.items()}
    batch = noise(configs["cross"])
    works: dict[str, Work] = {name: partial(train_step, learner, [batch], 0) for name, learner in learners.items()}
    speeds = {name: arguments.batch_size / best for name, best in interleaved_best(works, arguments.rounds).items()}
    for name, speed in speeds.items():
        print(f"{name:17} {speed:7.2f} images/s, {flop(configs[name], learners[name]) / 1e9:6.2f} GFLOP an image")
    for (slow, fast), claim in CLAIMS.items():
        measured = speeds[fast] / speeds[slow] - 1
        work = flop(configs[slow], learners[slow]) / flop(configs[fast], learners[fast]) - 1
        print(f"{fast} over {slow}: {measured:+.0%} measured, {work:+.0%} by FLOP, {claim:+.0%} in the paper")


def noise(config: Config) -> MaskedBatch:
    """One batch for all: their masks and image sizes are the same."""
    return random_batch(
        masks=mask_sampler(config),
        grid=PatchGrid(*config.grid),
        image_shape=(config.model.channels, *config.data.height_and_width),
        batch_size=config.optimization.batch_size,
        seed=config.seed,
        device=torch.device("cpu"),
    )


def flop(config: Config, learner: Learner) -> float:
    """FLOP of one image in one iteration."""
    visible, _, predicted = mask_sampler(config).counts(PatchGrid(*config.grid))
    size = config.optimization.batch_size
    patches = PatchGrid(*config.grid).size
    parts = iteration_flop(
        learner.student, learner.target, batch_size=size, patches=patches, visible=visible, predicted=predicted
    )
    return sum(parts)


if __name__ == "__main__":
    main()
