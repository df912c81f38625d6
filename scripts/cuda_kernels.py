"""What torch.compile writes for a GPU, compiled for it by Triton ahead of time: no GPU is needed, and none runs it.

Inductor lowers a graph of fake CUDA tensors to Triton kernels; each is compiled to a cubin for every architecture.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from capi.method.clustering import walk
from capi.models.layers import Block
from capi.types import OneProcess

CUDA = torch.device("cuda", 0)
# Compute capability, multiprocessors: A100 and H100.
ARCHITECTURES = {80: 108, 90: 132}
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)


def balance(logits: Tensor) -> tuple[Tensor, ...]:
    """The slice function of the clustering, as a compiler sees it."""
    return tuple(walk.cluster_slice(logits, logits.shape[1], walk.ClusteringSettings(), OneProcess()))


def block() -> tuple[Callable[..., Any], list[Tensor]]:
    """A block of ViT-L as the teacher runs it."""
    module = Block(width=1024, heads=16, mlp_width=4096, drop_rate=0.0).to(CUDA).eval().requires_grad_(False)

    def forward(x: Tensor) -> Tensor:
        output: Tensor = module(x, None)
        return output

    return forward, [torch.empty(8, 257, 1024, device=CUDA)]


def written(function: Callable[..., Any], inputs: list[Tensor]) -> dict[str, str]:
    """The kernels that inductor writes for a function, by name."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    fake = inputs[0].fake_mode  # type: ignore[attr-defined]
    with patch("torch.compiler.is_compiling", lambda: True):
        graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)
    lowering = GraphLowering(graph, example_inputs=inputs)
    with V.set_graph_handler(lowering), V.set_fake_mode(fake):
        lowering.run(*inputs)
        code = lowering.codegen()[0]
    return dict(_KERNEL.findall(code if isinstance(code, str) else code.value))


def try_compiling() -> int:
    """How many kernels fail, over all architectures."""
    failed = 0
    for capability, processors in ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as folder, a_gpu(capability, processors):
            for name in ("balance", "block"):
                try:
                    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
                        function, inputs = (
                            (balance, [torch.empty(4, 512, 4096, device=CUDA)]) if name == "balance" else block()
                        )
                        kernels = written(function, inputs)
                except Exception as error:
                    failed += 1
                    print(f"FAILED  {name} for sm_{capability}: {type(error).__name__}: {str(error)[:400]}", flush=True)
                    continue
                for kernel, source in kernels.items():
                    failed += not compiled(kernel, source, Path(folder), capability, name)
    return failed


def compiled(kernel: str, source: str, folder: Path, capability: int, name: str) -> bool:
    """Whether Triton makes a cubin of it, in every configuration that inductor would time."""
    file = folder / f"{kernel}.py"
    file.write_text(source)
    space: dict[str, Any] = {"__file__": str(file), "__name__": kernel}
    try:
        exec(compile(source, str(file), "exec"), space)  # noqa: S102 - what inductor wrote
        tuner = space[kernel]
        tuner.precompile(warm_cache_only=True)
        sizes = [len(each.kernel.asm["cubin"]) for each in tuner.compile_results]
    except Exception as error:
        print(f"FAILED  {name}: {kernel} for sm_{capability}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        return False
    print(
        f"ok      {name}: {kernel} for sm_{capability}, {len(sizes)} of {min(sizes)} to {max(sizes)} bytes", flush=True
    )
    return True


@contextmanager
def a_gpu(capability: int, processors: int) -> Iterator[None]:
    """What inductor asks of a GPU: its properties, and nothing of its driver."""
    from torch._inductor.runtime import hints

    properties = hints.DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=processors,
        cc=capability,
        major=capability // 10,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
    )
    capabilities = (capability // 10, capability % 10)
    with ExitStack() as stack:
        stack.enter_context(patch.object(hints.DeviceProperties, "create", lambda *_: properties))
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda *_: capabilities))
        stack.enter_context(patch("torch.cuda.is_available", lambda: True))
        stack.enter_context(patch("torch.cuda.current_device", lambda: 0))
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda *_: properties))
        yield


if __name__ == "__main__":
    raise SystemExit(try_compiling())
