"""What measuring a run's health costs: the monitor's time in one iteration against all iterations between two records.

    python benchmarks/health.py

A monitor looks at one iteration of `run.log_steps`. Its work is timed by itself, on tokens and gradients of the sizes
of an iteration, in turns with whole iterations that nobody looks at.
"""

import argparse
import copy

import torch
from measure import Work, interleaved_best

import capi
from capi.config.schema import Config
from capi.method.health import HealthMonitor
from capi.method.masking import PatchGrid
from capi.runtime.devices import keep_freed_memory
from capi.train.build import build_learner, mask_sampler
from capi.train.cost.step import random_batch
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch

CASES = {
    "demo": ("the demo recipe", 64, []),
    # The paper's setting of prototypes and predictions.
    "vits16": ("ViT-S/16 at 224 px", 64, ["clustering.prototypes=16384", "masking.predict=7"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--batch-size", type=int, help="instead of each case's own")
    arguments = parser.parse_args()
    keep_freed_memory()
    for recipe, (title, batch_size, overrides) in CASES.items():
        if arguments.only in (None, recipe):
            size = arguments.batch_size or batch_size
            config = capi.load_config(recipe, [f"optimization.batch_size={size}", *overrides])
            print_share(title, config, arguments.rounds)
    print("asked: under 1 %")


def print_share(title: str, config: Config, rounds: int) -> None:
    batch = batch_of(config)
    learner = build_learner(config)
    best = interleaved_best(
        {"iteration": lambda: train_step(learner, [batch], 5), "monitor": monitoring(copy.deepcopy(learner), batch)},
        rounds,
    )
    every = config.run.log_steps
    print(
        f"{title}, batch {len(batch.images)}: iteration {1e3 * best['iteration']:.1f} ms, monitor "
        f"{1e3 * best['monitor']:.1f} ms in one of {every}: {best['monitor'] / (every * best['iteration']):.2%}"
    )


def monitoring(learner: Learner, batch: MaskedBatch) -> Work:
    """What a monitor does in an iteration, with gradients as they are before the update."""
    tokens = [learner.teacher(batch.images)]
    for parameter in (*learner.student.parameters(), *learner.target.parameters()):
        parameter.grad = torch.randn_like(parameter)

    def work() -> object:
        monitor = HealthMonitor()
        monitor.tokens(tokens, learner.target)
        monitor.gradients(learner.student, learner.teacher, learner.target)
        return monitor.values()

    return work


def batch_of(config: Config) -> MaskedBatch:
    return random_batch(
        masks=mask_sampler(config),
        grid=PatchGrid(*config.grid),
        image_shape=(config.model.channels, *config.data.height_and_width),
        batch_size=config.optimization.batch_size,
        seed=0,
        device=torch.device("cpu"),
    )


if __name__ == "__main__":
    main()
