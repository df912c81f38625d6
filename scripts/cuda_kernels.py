"""What torch.compile writes for a GPU, compiled for it by Triton ahead of time: no GPU is needed, and none runs it.

Inductor lowers a graph of fake CUDA tensors to Triton kernels (`benchmarks/inductor.py`); Triton compiles each to a
cubin for every architecture, in every configuration that inductor would time.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from inductor import balanced_slice, lowered, pretended_gpu

from capi.method.clustering.online import SLICE_OPTIONS
from capi.models.layers import Block
from capi.types import OneProcess

# Compute capability, multiprocessors: A100 and H100.
ARCHITECTURES = {80: 108, 90: 132}
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)


def block() -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A block of ViT-L as the teacher runs it in bfloat16, and its inputs: tokens, then parameters."""
    module = Block(width=1024, heads=16, mlp_width=4096, drop_rate=0.0).eval().to("meta", torch.bfloat16)
    names = dict(module.named_parameters())

    def forward(x: Tensor, *parameters: Tensor) -> Tensor:
        with patch("torch.nn.functional.scaled_dot_product_attention", flash):
            output: Tensor = torch.func.functional_call(
                module, dict(zip(names, parameters, strict=True)), (x, None), strict=True
            )
        return output

    return forward, [torch.empty(8, 257, 1024, device="meta", dtype=torch.bfloat16), *names.values()]


def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as a GPU does it: a kernel that inductor calls, and does not write."""
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return output


def written(function: Callable[..., Any], *inputs: Tensor, reads: int | None = None) -> dict[str, str]:
    """The kernels that inductor writes for a function, by name."""
    with lowered(function, *inputs, reads=reads) as lowering:
        code = lowering.codegen()[0]
    return dict(_KERNEL.findall(code if isinstance(code, str) else code.value))


def try_compiling() -> int:
    """How many kernels fail, over all architectures."""
    failed = 0
    forward, inputs = block()
    for capability, processors in ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as folder, a_gpu(capability, processors), torch.no_grad():
            slices = written(
                lambda logits: balanced_slice(logits, OneProcess()),
                torch.empty(4, 512, 16384, device="meta"),
                reads=SLICE_OPTIONS["realize_reads_threshold"],
            )
            for name, kernels in (("balance", slices), ("block", written(forward, *inputs))):
                failed += not kernels
                print(f"{'ok' if kernels else 'FAILED':7} {name}: inductor writes {len(kernels)} kernels", flush=True)
                for kernel, source in kernels.items():
                    failed += not compiled(kernel, source, Path(folder), capability, name)
    return failed


def compiled(kernel: str, source: str, folder: Path, capability: int, name: str) -> bool:
    """Whether Triton makes a cubin of it, in every configuration that inductor would time."""
    file = folder / f"{name}_{kernel}.py"
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
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", capability, properties.warp_size)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))
    with ExitStack() as stack:
        stack.enter_context(pretended_gpu())
        # Otherwise it asks the driver to load what it compiled.
        stack.enter_context(torch._inductor.config.patch(use_static_cuda_launcher=False))
        stack.enter_context(patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", lambda: None))
        stack.enter_context(patch.object(hints.DeviceProperties, "create", lambda *_: properties))
        yield


if __name__ == "__main__":
    raise SystemExit(try_compiling())
