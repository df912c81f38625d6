"""Spread matrices orthogonalized by several processes, over every mesh of them; an assertion fails where wrong."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from capi.runtime.processes import joined
from capi.runtime.sharding import local_part, map_whole
from capi.train.muon import orthogonal

if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as processes:
        for shards in (1, 2, processes.size):
            mesh = init_device_mesh("cpu", (processes.size // shards, shards), mesh_dim_names=("replicas", "shards"))
            # More and fewer matrices than processes, and rows that do not divide.
            for shape in ((5, 7, 12), (1, 3, 2), (3, 12, 7)):
                matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
                seen = []

                def orthogonalize(stack: torch.Tensor, seen: list[int] = seen) -> torch.Tensor:
                    seen.append(len(stack))
                    return orthogonal(stack)

                parts = [distribute_tensor(matrix, mesh, [Replicate(), Shard(0)]) for matrix in matrices]
                orthogonalized = map_whole(
                    orthogonalize, torch.stack([local_part(matrix) for matrix in parts]), like=parts[0]
                )
                expected = [distribute_tensor(matrix, mesh, [Replicate(), Shard(0)]) for matrix in orthogonal(matrices)]
                torch.testing.assert_close(
                    orthogonalized, torch.stack([local_part(matrix) for matrix in expected]), rtol=1e-5, atol=1e-6
                )
                count = torch.tensor(sum(seen))
                dist.all_reduce(count)
                assert int(count) == len(matrices), "each matrix is orthogonalized once"
