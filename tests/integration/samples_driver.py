"""The images that each of several processes reads: `python -m tests.integration.samples_driver OUT SOURCE...`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from capi.config.files import load_config
from capi.data.locations import open_images
from capi.runtime.processes import Processes, joined
from capi.train.build import batch_loader, training_batches

STEPS, BATCH_SIZE, IMAGES = 7, 6, 21
CONFIG = [f"optimization.batch_size={BATCH_SIZE}", "data.window=5", "data.flip=false"]


def read(sources: list[str], processes: Processes) -> dict[str, list[list[int]]]:
    """The grey values of each step, which number the images, for each source, with and without workers."""
    config, numbers = load_config("demo", CONFIG), {}
    for source in sources:
        for workers in (0, 2):
            batches = training_batches(config, open_images(source), workers, processes)
            steps = batch_loader(batches, workers, torch.device("cpu"))(0, STEPS)
            numbers[f"{source} {workers}"] = [_numbers(step[0]) for step in steps]
    return numbers


def _numbers(batch: Any) -> list[int]:
    assert (batch.images == batch.images[:, :1, :1, :1]).all()
    return batch.images[:, 0, 0, 0].tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as together:
        everyone = together.gather(read(sys.argv[2:], together))
    if together.is_main:
        Path(sys.argv[1]).write_text(json.dumps(everyone))
