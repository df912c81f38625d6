"""Between two logs nothing waits for the device.

The learner lies on torch's meta device, whose tensors have no values: reading one (`item`, `tolist`, the truth of a
tensor, `nonzero`, a copy to the CPU) raises. A copy from the CPU waits as well, unless it is asked not to.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import adam, optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from capi.config.schema import Config
from capi.data.loader import LoadedBatch
from capi.train.build import build_learner, resolve_target
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch
from tests.train.test_loop import Noise, make_loop
from tests.train.test_step import batch_of
from tests.variants import NETWORKS, TARGETS, TOGETHER, varied

META = torch.device("meta")
# The clustering is told with its micro-batches which rows it must give.
CASES = NETWORKS | TARGETS | TOGETHER | {"clustering": [], "clipped": ["optimization.clip=1.0"]}
CASES |= {"muon": ["optimization.optimizer=muon", "optimization.clip=1.0"]}


class NoBlockingCopies(TorchDispatchMode):
    """Raises where the CPU hands a tensor to the device and waits until it is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}:
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            devices = {value.device.type for value in args[:2] if isinstance(value, Tensor)}
            devices |= {torch.device(kwargs["device"]).type} if kwargs.get("device") else set()
            if blocking and devices == {"cpu", "meta"}:
                raise RuntimeError("a copy to the device waits for it")
        return func(*args, **kwargs)


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lists of torch lack the meta device: of fused optimisers, and of autocast."""
    for module in (adam, optimizer):
        if hasattr(module, "_get_fused_kernels_supported_devices"):
            monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())


def meta_learner(config: Config) -> Learner:
    config, encoder = resolve_target(config)
    return build_learner(config, META, encoder)


def to_meta(batch: LoadedBatch | MaskedBatch) -> MaskedBatch:
    return MaskedBatch(*(value.to(META, non_blocking=True) for value in batch[:3]))


@pytest.mark.parametrize("name", CASES)
def test__a_step_does_not_wait_for_the_device(small_config: Config, on_meta: None, name: str) -> None:
    config = varied(small_config, *CASES[name])
    learner, batch = meta_learner(config), batch_of(config)
    with NoBlockingCopies():
        metrics = train_step(learner, [to_meta(batch), to_meta(batch)], 3)
    assert metrics.student_loss.device == META
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        metrics.values()


def test__the_loop_does_not_wait_between_two_logs(small_config: Config, tmp_path: Path, on_meta: None) -> None:
    config = varied(small_config, *TARGETS["features"])
    loop = make_loop(config, tmp_path, Noise(config), log_steps=6, save_steps=100)
    loop.learner, loop.to_device = meta_learner(config), to_meta
    # The sixth step is logged, and so it reads what it measures.
    with NoBlockingCopies(), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        loop.run()
    assert loop.position.step == 5


def test__what_waits_is_found(on_meta: None) -> None:
    value = torch.ones(3, device=META)
    for wait in (torch.Tensor.tolist, torch.Tensor.nonzero, torch.Tensor.cpu, lambda one: one[0].item()):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            wait(value)
    with pytest.raises(RuntimeError, match="meta"):
        bool(value[0] > 0)
    with NoBlockingCopies(), pytest.raises(RuntimeError, match="waits for it"):
        torch.ones(3).to(META)
