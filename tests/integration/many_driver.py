"""Several runs, one after the other, in processes that were started together: `many_driver.py IMAGES OUT NAME...`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

import capi
from capi.runtime.processes import joined

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
    "muon": ["optimization.optimizer=muon", "optimization.clip=1.0"],
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


def run(name: str, images: str, out: Path) -> None:
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
        told = {}
        for name in sys.argv[3:]:
            run(name, sys.argv[1], Path(sys.argv[2]))
        for key, overrides in {"undivided": ["optimization.batch_size=11"], "shards": ["distributed.shards=4"]}.items():
            try:
                capi.pretrain("tiny4", [*BASE, *overrides], data=sys.argv[1], out=f"{sys.argv[2]}/{key}", device="cpu")
            except capi.CapiError as error:
                told[key] = str(error)
        Path(sys.argv[2], f"told-{processes.size}-{processes.rank}.json").write_text(json.dumps(told))
