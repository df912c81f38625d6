"""What a Sinkhorn queue costs: time and memory of the clustering and of a whole iteration, by the length of the queue.

    python benchmarks/sinkhorn_queue.py

A queue of q images beside a batch of b is compared with none and with a real batch of b + q, which is balanced over as
many images: in one interleaved run, on noise, with the sizes of a recipe.
"""

import argparse
from functools import partial

import torch
from measure import Work, interleaved_best, peak_extra_bytes

from capi.config.files import load_config
from capi.config.schema import Config
from capi.method.clustering import OnlineClustering
from capi.method.masking import PatchGrid
from capi.train.build import build_learner, mask_sampler
from capi.train.cost.step import random_batch
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch

CPU = torch.device("cpu")


def sized(arguments: argparse.Namespace, batch_size: int, queue: int) -> Config:
    """The recipe with another batch and queue."""
    sizes = [f"optimization.batch_size={batch_size}", f"clustering.queue={queue}"]
    return load_config(arguments.recipe, [*sizes, *arguments.overrides])


def prepared(config: Config) -> tuple[Learner, MaskedBatch]:
    """A learner with a full queue, and a batch of noise."""
    learner = build_learner(config, CPU)
    assert isinstance(learner.target, OnlineClustering)
    if learner.target.queue is not None:
        learner.target.queue.pretend_full()
    batch = random_batch(
        masks=mask_sampler(config),
        grid=PatchGrid(*config.grid),
        image_shape=(config.model.channels, *config.data.height_and_width),
        batch_size=config.optimization.batch_size,
        seed=config.seed,
        device=CPU,
    )
    return learner, batch


def clustering_alone(learner: Learner, batch: MaskedBatch) -> Work:
    """Loss, gradient and targets of the batch's tokens, which are computed beforehand."""
    tokens = learner.target.tokens(learner.teacher, batch.images)

    def work() -> None:
        learner.target.zero_grad()
        loss, targets = learner.target([tokens], [batch.predict_index])
        list(targets)
        loss.backward()

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mini")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--queues", type=int, nargs="+", default=[48, 240], help="multiples of the batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--overrides", nargs="*", default=[], help="KEY=VALUE for the recipe")
    arguments = parser.parse_args()
    batch, longest = arguments.batch_size, max(arguments.queues)
    sizes = [(batch, 0), *((batch, queue) for queue in arguments.queues), (batch + longest, 0)]
    clusterings: dict[str, Work] = {}
    steps: dict[str, Work] = {}
    queue_bytes = {}
    for images, queue in sizes:
        name = f"batch {images}" + (f", queue {queue}" if queue else "")
        config = sized(arguments, images, queue)
        learner, noise = prepared(config)
        queue_bytes[name] = 2 * queue * PatchGrid(*config.grid).size * config.model.width
        clusterings[name] = clustering_alone(learner, noise)
        steps[name] = partial(train_step, learner, [noise], 0)
    seconds = interleaved_best(clusterings, arguments.rounds), interleaved_best(steps, arguments.rounds)
    memory = {name: peak_extra_bytes(work) for name, work in steps.items()}
    for name in steps:
        times = f"clustering {seconds[0][name] * 1e3:8.1f} ms   iteration {seconds[1][name] * 1e3:8.1f} ms"
        print(f"{name:24} {times} {memory[name] / 2**20:6.0f} MiB more   queue {queue_bytes[name] / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
