"""The kernels that inductor would launch for a slice of the clustering on an A100 that is not here, and their bytes.

    python benchmarks/inductor.py
    python benchmarks/inductor.py --positions 8 --images 64 --reads 4

The function of a slice is traced, lowered and scheduled by torch's own compiler for CUDA, with the exchanges of 32
processes in between. Nothing is compiled by Triton and nothing runs, so neither has to be here; torch is given a GPU
with the numbers of an A100. This leans on torch's internals, and on the release of `scripts/constraints.txt`.

Bytes are in arrays of positions x images x prototypes in float32, as inductor counts them: what a kernel reads several
times counts once.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.testing._internal.distributed.fake_pg import FakeStore

from capi.method.clustering.online import SLICE_OPTIONS
from capi.method.clustering.walk import ClusteringSettings, cluster_slice
from capi.types import Reduction

A100 = SimpleNamespace(
    name="A100",
    major=8,
    minor=0,
    multi_processor_count=108,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
    L2_cache_size=40 << 20,
    shared_memory_per_block_optin=166912,
    is_integrated=0,
    gcnArchName="",
)


class Exchanges:
    """All-reduces as dynamo traces them."""

    def _reduce(self, value: Tensor, operation: str) -> Tensor:
        return collectives.wait_tensor(torch.ops._c10d_functional.all_reduce(value, operation, "0"))

    def sum(self, value: Tensor) -> Tensor:
        return self._reduce(value, "sum")

    def max(self, value: Tensor) -> Tensor:
        return self._reduce(value, "max")


@contextlib.contextmanager
def pretended_gpu() -> Any:
    with (
        patch.multiple(CudaInterface, get_device_properties=lambda *_: A100, get_compute_capability=lambda *_: 80),
        patch.multiple(CudaInterface, is_available=lambda: True),
        patch.multiple(CudaInterface.Worker, get_device_properties=lambda *_: A100, current_device=lambda: 0),
        patch.multiple(torch.cuda, get_device_properties=lambda *_: A100, get_device_capability=lambda *_: (8, 0)),
        patch.multiple(torch.cuda, current_device=lambda: 0, device_count=lambda: 1),
        patch("torch._inductor.scheduler.has_triton", lambda *_: True),
        patch("torch.utils._triton.has_triton_package", lambda *_: True),
    ):
        yield


@contextlib.contextmanager
def lowered(function: Callable[..., Any], *inputs: Tensor, reads: int | None = None) -> Iterator[GraphLowering]:
    """What inductor makes of a function of tensors of an A100, which are given without values, on the CPU."""
    mode, cuda = FakeTensorMode(), torch.device("cuda", 0)
    with mode:
        # On the CPU, since this build of torch cannot index a tensor of a GPU; the graph is then moved.
        functional = torch.func.functionalize(function, remove="mutations")
        on_cpu = [torch.empty(value.shape, dtype=value.dtype) for value in inputs]
        graph = make_fx(functional, decomposition_table=select_decomp_table())(*on_cpu)
        there = [torch.empty(value.shape, dtype=value.dtype, device=cuda) for value in inputs]
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": cuda}
        node.meta.clear()
    graph.graph.eliminate_dead_code()
    graph.recompile()
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*there)
    options = {} if reads is None else {"realize_reads_threshold": reads}
    with V.set_fake_mode(mode), torch._inductor.config.patch(options):
        lowering = GraphLowering(graph, example_inputs=there, is_inference=True)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*there)
            yield lowering


def scheduled(function: Callable[..., Any], *inputs: Tensor, reads: int | None = None) -> list[tuple[Any, int]]:
    """What inductor launches, in order, and the bytes of each."""
    with lowered(function, *inputs, reads=reads) as lowering:
        lowering._update_scheduler()
        return [(node, node.get_read_write_buffers_sizes()) for node in lowering.scheduler.nodes]


def launched(function: Callable[..., Any], *inputs: Tensor, processes: int = 32) -> tuple[int, int]:
    """How many kernels inductor launches for a function of a slice, and the bytes that they read and write."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    with pretended_gpu():
        nodes = scheduled(function, *inputs, reads=SLICE_OPTIONS["realize_reads_threshold"])
    dist.destroy_process_group()
    kernels = sum("Extern" not in type(node).__name__ for node, _ in nodes)
    return kernels, sum(size for _, size in nodes)


def slice_function(logits: Tensor) -> tuple[Tensor, ...]:
    """The clustering of a slice over processes, as a GPU computes it."""
    return balanced_slice(logits, Exchanges())


def balanced_slice(logits: Tensor, reduction: Reduction) -> tuple[Tensor, ...]:
    gradient = torch.empty_like(logits, dtype=torch.bfloat16)
    # Overwritten logits are not written back where dynamo traces, which is not here.
    clustered = cluster_slice(logits.clone(), logits.shape[1], ClusteringSettings(), reduction, gradient)
    return (*clustered, gradient)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=32)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--prototypes", type=int, default=16384)
    parser.add_argument(
        "--reads",
        type=int,
        default=SLICE_OPTIONS["realize_reads_threshold"],
        help="realize_reads_threshold of inductor",
    )
    arguments = parser.parse_args()
    shape = (arguments.positions, arguments.images, arguments.prototypes)
    array = 4 * arguments.positions * arguments.images * arguments.prototypes
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=32)
    with pretended_gpu():
        nodes = scheduled(slice_function, torch.empty(shape, device="meta"), reads=arguments.reads)
    dist.destroy_process_group()
    kernels = [(node, size) for node, size in nodes if "Extern" not in type(node).__name__]
    exchanges = (len(nodes) - len(kernels)) // 2
    for node, size in kernels:
        what = ", ".join(sorted({name for part in node.get_nodes() for name in origins(part)}))
        print(f"  {size / array:5.2f} arrays  {what}")
    total = sum(size for _, size in nodes)
    print(f"{len(kernels)} kernels, {exchanges} exchanges, {total / array:.2f} arrays, {total / 1e9:.2f} GB")


def origins(node: Any) -> set[str]:
    """The operations that a buffer was made by."""
    return {str(origin.target).removeprefix("aten.").split(".")[0] for origin in node.node.get_origins()}


if __name__ == "__main__":
    main()
