"""Steps with compiled networks beside plain ones: `compiled_driver.py BACKEND NAME...` prints what came of them.

In a process of its own, since torch's compiler should not see the checks of annotations.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from capi.config.files import parse_config
from capi.config.schema import Config
from capi.method.clustering import OnlineClustering
from capi.method.clustering.walk import ClusteringSettings, cluster_slice
from capi.runtime.processes import Processes
from capi.train.build import build_learner, masked_batch
from capi.train.compilation import compile_networks
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch

SMALL = {
    "data": {"image_size": [16, 24]},
    "model": {"width": 16, "depth": 3, "heads": 2, "patch_size": 8, "registers": 4, "stochastic_depth": 0.0},
    "clustering": {"prototypes": 7},
    "masking": {"predict": 2},
    "optimization": {"batch_size": 6, "steps": 20, "learning_rate": 0.01},
}
CASES: dict[str, list[str]] = {
    "plain": [],
    "parts": ["optimization.micro_batches=2"],
    "stochastic": ["model.stochastic_depth=0.5", "optimization.micro_batches=2"],
    "recomputed": ["run.activation_checkpointing=full", "model.stochastic_depth=0.5"],
    "selective": ["run.activation_checkpointing=selective"],
    "mlp": ["model.head=mlp", "target.kind=ema_head", "model.predictor.kind=self"],
    "lowered": ["run.precision=bfloat16"],
    "standard": ["clustering.sinkhorn=standard"],
    "queued": ["clustering.queue=12"],
}


def broken(*_: Any) -> Any:
    raise OSError("the compiler is not there")


BACKENDS: dict[str, Any] = {"broken": broken}


def trained(config: Config, backend: Any = None, steps: int = 3) -> Learner:
    learner = build_learner(config)
    if backend is not None:
        compile_networks(learner, backend=backend)
    for step in range(1, 1 + steps):
        torch.manual_seed(step)
        images = torch.randn(config.optimization.batch_size, 3, *config.data.height_and_width)
        whole = masked_batch(config, images, step)
        parts = zip(*(value.chunk(config.optimization.micro_batches) for value in whole[:3]), strict=True)
        train_step(learner, [MaskedBatch(*part) for part in parts], step)
    return learner


def distance(ours: torch.nn.Module, theirs: torch.nn.Module) -> float:
    """Between two networks, in lengths of what training moved them."""
    gaps = [ours - theirs for ours, theirs in zip(ours.parameters(), theirs.parameters(), strict=True)]
    length = torch.nn.utils.get_total_norm(list(theirs.parameters()))
    return float(torch.nn.utils.get_total_norm(gaps) / length) if gaps else 0.0


def run(name: str, backend: str) -> dict[str, Any]:
    config = parse_config(SMALL, CASES[name])
    torch._dynamo.reset()
    counters.clear()
    compiled = trained(config, BACKENDS.get(backend, backend))
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    copied = compiled.as_encoder("student")
    plain = trained(config)
    return {
        "graphs": graphs,
        "breaks": breaks,
        "distance": distance(compiled.student, plain.student),
        "moved": distance(plain.student, build_learner(config).student),
        "clusters": isinstance(plain.target, OnlineClustering),
        "target_distance": distance(compiled.target, plain.target),
        "target_moved": distance(plain.target, build_learner(config).target),
        "copies": sorted({type(module.forward).__name__ for module in copied.modules()}),
    }


def run_slice(backend: str) -> dict[str, Any]:
    """A slice of the clustering as one of several processes computes it, with a queue behind the batch."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    torch._dynamo.reset()
    counters.clear()
    logits, processes = torch.randn(3, 6, 7), Processes(0, 4)
    losses = [
        float(function(logits.clone(), 4, ClusteringSettings(), processes).loss)
        for function in (torch.compile(cluster_slice, backend=backend), cluster_slice)
    ]
    dist.destroy_process_group()
    stats = counters["stats"]
    return {"graphs": stats["unique_graphs"], "breaks": dict(counters["graph_break"]), "losses": losses}


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {name: run_slice(sys.argv[1]) if name == "slice" else run(name, sys.argv[1]) for name in sys.argv[2:]}
    json.dump(results, sys.stdout)
