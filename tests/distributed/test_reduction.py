"""Real processes: what several compute together must be what one computes alone."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from capi.distributed.reduction import AllProcesses
from capi.method.bounded import ClusteringSettings, Totals, cluster
from capi.method.queue import local_part
from capi.method.sinkhorn import OneProcess

IMAGES, POSITIONS, WIDTH, PROTOTYPES = 12, 5, 8, 20


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(IMAGES, POSITIONS, WIDTH, generator=generator)
    index = torch.rand(IMAGES, POSITIONS, generator=generator).argsort(1)[:, :3]
    prototypes = torch.randn(PROTOTYPES, WIDTH, generator=generator)
    return tokens, index, prototypes, torch.randn(PROTOTYPES, generator=generator)


def queued() -> torch.Tensor:
    """Two earlier batches."""
    return torch.randn(2 * IMAGES, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


def share_of_process(rank: int, world: int, folder: str, settings: ClusteringSettings) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    tokens, index, prototypes, bias = inputs()
    mine = slice(rank * IMAGES // world, (rank + 1) * IMAGES // world)
    for name, earlier in (("batch", None), ("queue", local_part(queued(), blocks=2, process=rank, processes=world))):
        totals = cluster(tokens[mine], index[mine], prototypes, bias, settings, AllProcesses(), earlier)
        torch.save(totals._asdict(), Path(folder) / f"{name}{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world", "sinkhorn", "chunk_bytes"),
    [(2, "positionwise", None), (3, "standard", None), (3, "positionwise", 1), (2, "standard", 2000)],
)
def test__clustering_is_that_of_the_global_batch_and_the_global_queue(
    tmp_path: Path, world: int, sinkhorn: str, chunk_bytes: int | None
) -> None:
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=chunk_bytes)
    mp.spawn(share_of_process, (world, str(tmp_path), settings), nprocs=world)
    found = {}
    for case, earlier in (("batch", None), ("queue", queued())):
        parts = [Totals(**torch.load(tmp_path / f"{case}{rank}.pt", weights_only=True)) for rank in range(world)]
        found[case] = alone = cluster(*inputs(), settings, OneProcess(), earlier)
        tolerance = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(torch.cat([part.targets for part in parts]), alone.targets, **tolerance)
        for name in ("loss", "prototype_gradient", "bias_gradient"):
            mean = torch.stack([getattr(part, name) for part in parts]).mean(0)
            torch.testing.assert_close(mean, getattr(alone, name), **tolerance)
    # Balancing each process by itself, or without the queue, would give something else: the test could fail.
    tokens, index, prototypes, bias = inputs()
    own = cluster(tokens[: IMAGES // world], index[: IMAGES // world], prototypes, bias, settings, OneProcess())
    assert (own.targets - found["batch"].targets[: IMAGES // world]).abs().max() > 1e-3
    assert (found["queue"].targets - found["batch"].targets).abs().max() > 1e-3
