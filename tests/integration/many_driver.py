"""Several runs, one after the other, in processes that were started together: `many_driver.py IMAGES OUT NAME...`."""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import capi
from capi.runtime.processes import joined
from capi.train.compilation import compile_networks
from capi.train.step import Learner, StepMetrics, train_step
from capi.types import MaskedBatch

# Widths, registers and prototypes that neither 2 nor 3 divides.
BASE = [
    "data.image_size=16",
    "data.workers=0",
    "data.broken_limit=0.5",
    "model.patch_size=4",
    "model.width=20",
    "model.depth=2",
    "model.heads=5",
    "model.registers=4",
    "model.mlp_ratio=3.25",
    "model.stochastic_depth=0.0",
    "masking.predict=5",
    "clustering.prototypes=13",
    "optimization.batch_size=12",
    "optimization.steps=6",
    "optimization.learning_rate=0.003",
    "optimization.teacher_momentum=0.9",
    "checkpoint.every_steps=2",
    "checkpoint.keep=9",
    "run.log_steps=1",
    "run.loggers=[]",
    "run.report=false",
    "run.snapshots=0",
]
RUNS: dict[str, list[str]] = {
    "plain": [],
    "queued": ["clustering.queue=24"],
    "replicated": ["distributed.shards=1"],
    "accumulated": ["optimization.micro_batches=2", "run.activation_checkpointing=full"],
    "selective": ["run.activation_checkpointing=selective", "checkpoint.asynchronous=true"],
    "ibot": ["target.kind=ema_head", "model.head=mlp"],
    "balanced": ["target.kind=ema_head", "model.head=mlp", "target.ema_head.balance=sinkhorn"],
    "features": ["target.kind=features", "model.predictor.kind=self"],
    "standard": ["clustering.sinkhorn=standard", "model.positions=learned"],
    "stochastic": ["model.stochastic_depth=0.3", "optimization.steps=12"],
    # Below the length of every gradient.
    "clipped": ["optimization.clip=0.01"],
    "clipped_parts": ["optimization.clip=0.01", "optimization.micro_batches=2"],
    "compiled": ["run.compile=on", "optimization.micro_batches=2"],
    # Its third batch is bad, while the queue has room for another.
    "skipped": ["run.non_finite=skip", "run.log_steps=2", "clustering.queue=36"],
    "muon": ["optimization.optimizer=muon", "optimization.clip=1.0"],
    "layered": ["target.layers=all", "target.normalize=instance", "run.activation_checkpointing=full"],
    "lowered": ["run.precision=bfloat16"],
    "resumed": [],
    "muon_resumed": ["optimization.optimizer=muon", "optimization.clip=1.0"],
    "queue_resumed": ["clustering.queue=24"],
}


class Weights:
    """An evaluation, so that whole weights are put together."""

    every_steps = 3

    def run(self, learner: Any, step: int) -> dict[str, float]:
        networks = {"teacher": learner.teacher.average, "student": learner.student}
        images = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)
        with torch.no_grad():
            tokens = learner.teacher(images)
        return {name: float(network.encoder.registers.detach().sum()) for name, network in networks.items()} | {
            "tokens": float(tokens.abs().sum())
        }


def step_with_a_bad_batch(learner: Learner, batches: Sequence[MaskedBatch], step: int, *others: Any) -> StepMetrics:
    """The images of one step are NaN in the last process alone."""
    is_last = int(os.environ.get("RANK", "0")) + 1 == int(os.environ.get("WORLD_SIZE", "1"))
    if step == 2 and is_last:
        batches = [batch._replace(images=batch.images * torch.nan) for batch in batches]
    return train_step(learner, batches, step, *others)


def run(name: str, images: str, out: Path) -> None:
    step = step_with_a_bad_batch if name == "skipped" else train_step
    # What makes the code takes minutes, and whether it is right is tested with one process.
    compile_quickly = partial(compile_networks, backend="aot_eager")
    with (
        patch("capi.train.loop.train_step", step),
        patch("capi.train.run.compiler_warning", lambda _: None),
        patch("capi.train.run.compile_networks", compile_quickly),
    ):
        capi.pretrain(
            "tiny4",
            [*BASE, *RUNS[name]],
            data=images,
            out=out / name,
            resume=name.endswith("resumed"),
            device="cpu",
            evaluations=[Weights()],
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as processes:
        messages = {}
        for name in sys.argv[3:]:
            run(name, sys.argv[1], Path(sys.argv[2]))
        for key, overrides in {"undivided": ["optimization.batch_size=11"], "shards": ["distributed.shards=4"]}.items():
            try:
                capi.pretrain("tiny4", [*BASE, *overrides], data=sys.argv[1], out=f"{sys.argv[2]}/{key}", device="cpu")
            except capi.CapiError as error:
                messages[key] = str(error)
        Path(sys.argv[2], f"told-{processes.size}-{processes.rank}.json").write_text(json.dumps(messages))
