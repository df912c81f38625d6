"""32 processes on one machine: threads with real numbers, and tensors without values for what memory would forbid."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from capi.method.clustering import OnlineClustering
from capi.method.clustering.queue import QueueShape
from capi.method.clustering.walk import ClusteringSettings
from capi.runtime.processes import Processes
from capi.runtime.sharding import average_gradients

RANKS, IMAGES, POSITIONS, WIDTH, PROTOTYPES, STEPS = 32, 2, 6, 8, 13, 4


def in_threads(size: int, work: Callable[[Processes], Any]) -> list[Any]:
    """What so many processes give that are threads of this one, by torch's own stand-in for a network."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", store=store, rank=rank, world_size=size)
            results[rank] = work(Processes(rank, size))
            dist.barrier()
            dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return results


def clustering(sinkhorn: str, processes: int) -> OnlineClustering:
    torch.manual_seed(0)
    shape = QueueShape(batches=2, images=RANKS * IMAGES // processes, positions=POSITIONS, micro_batches=IMAGES)
    settings = ClusteringSettings(sinkhorn=sinkhorn)  # type: ignore[arg-type]
    return OnlineClustering(width=WIDTH, prototypes=PROTOTYPES, settings=settings, queue=shape)


def trained(target: OnlineClustering, processes: Processes, parts: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The loss of every step, the targets of the last, prototypes and queue, of images in micro-batches."""
    target.reduction = processes
    optimizer, losses = torch.optim.SGD(target.parameters(), lr=0.5), []
    for step in range(STEPS):
        tokens = [part[0][step] for part in parts]
        loss, targets = target(tokens, [part[1] for part in parts], step)
        last = torch.cat([each.flatten(0, 1) for each in targets])
        loss.backward()
        losses.append(processes.mean({"loss": loss})["loss"])
        optimizer.step()
        optimizer.zero_grad()
        target.follow(None)
    assert target.queue is not None
    queued = target.queue.tokens.float()
    return {"loss": torch.stack(losses), "targets": last, "prototypes": target.prototypes.detach(), "queue": queued}


@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__sinkhorn_queue_and_averages_of_32_processes_are_those_of_one(sinkhorn: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(STEPS, RANKS * IMAGES, POSITIONS, WIDTH, generator=generator)
    predicted = torch.rand(RANKS * IMAGES, POSITIONS, generator=generator).argsort(1)[:, :3]
    targets = [clustering(sinkhorn, RANKS) for _ in range(RANKS)]

    def work(processes: Processes) -> dict[str, Tensor]:
        mine = range(processes.rank * IMAGES, (processes.rank + 1) * IMAGES)
        target = targets[processes.rank]
        average_gradients(target.parameters(), processes)
        return trained(target, processes, [(tokens[:, [image]], predicted[[image]]) for image in mine])

    many = in_threads(RANKS, work)
    halves = [slice(None, RANKS), slice(RANKS, None)]
    single = trained(clustering(sinkhorn, 1), Processes(), [(tokens[:, half], predicted[half]) for half in halves])
    for each in many:
        torch.testing.assert_close(each["loss"], single["loss"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(each["prototypes"], single["prototypes"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([each["targets"] for each in many]), single["targets"], rtol=1e-3, atol=1e-6)
    # Each process keeps the last two batches of its own images.
    together = torch.stack([each["queue"].view(2, IMAGES, POSITIONS, WIDTH) for each in many], 1)
    torch.testing.assert_close(together.flatten(1, 2), single["queue"].view(2, RANKS * IMAGES, POSITIONS, WIDTH))
    assert (single["loss"][0] - single["loss"][-1]).abs() > 1e-2


@pytest.mark.skipif(torch.__version__ < "2.13", reason="no products of bfloat16 in float32 without values")
@pytest.mark.parametrize(
    ("recipe", "processes", "shards", "ranks", "blocks"),
    [
        pytest.param("vits16", 32, 8, [31], 3, marks=pytest.mark.long),
        # 31 divides no width, prototypes or layer.
        pytest.param("vits16", 31, 31, [30], 3, marks=pytest.mark.long),
        *(
            pytest.param(recipe, processes, shards, [0, processes - 1], 12, marks=pytest.mark.thorough)
            for recipe in ("vits16", "vitb14", "vitl14")
            for processes, shards in ((32, 1), (32, 8), (32, 32), (31, 31))
        ),
    ],
)
def test__a_process_of_many_needs_what_is_planned(
    tmp_path: Path, recipe: str, processes: int, shards: int, ranks: list[int], blocks: int
) -> None:
    file = tmp_path / "tracked.json"
    shallow = [] if blocks == 12 else [f"model.depth={blocks}", f"model.predictor.depth={blocks}"]
    cell = [f"--processes={processes}", f"--shards={shards}", "--ranks", *map(str, ranks), "--only", recipe]
    command = [sys.executable, "benchmarks/ranks.py", *shallow, f"--json={file}", *cell]
    subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(file.read_text())
    assert [row["rank"] for row in rows] == ranks
    for row in rows:
        assert 0.95 < row["planned"] / row["peak"] < 1.05
        for tracked, planned in row["phases"].values():
            # The last of uneven shards is smaller than the first, for which the plan is.
            assert 0.95 < planned / tracked < (1.05 if processes % 8 == 0 else 1.12)
        assert 4 < row["other_collectives"] <= 40


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "room"),
    [([], 14.2), (["adapt.lora_rank=16"], 10.4), (["adapt.lora_rank=16", "optimization.micro_batches=2"], 16.3)],
    ids=str,
)
def test__adapting_a_large_encoder_needs_what_is_planned(tmp_path: Path, changes: list[str], room: float) -> None:
    """ViT-L/14 of DINOv2, 256 images of 224 px in parts, on one GPU: the numbers of docs/guides/adapting.md."""
    file = tmp_path / "tracked.json"
    command = [sys.executable, "benchmarks/ranks.py", "--only", "adapt", "--recompute", "off", f"--json={file}"]
    subprocess.run([*command, *changes], capture_output=True, text=True, check=True)
    (row,) = json.loads(file.read_text())
    assert row["planned"] / 2**30 == pytest.approx(room, abs=0.05)
    assert row["planned"] == pytest.approx(row["peak"], rel=0.02)
