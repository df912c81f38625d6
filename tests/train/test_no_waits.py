"""Between two logs nothing waits for the device.

The learner lies on torch's meta device, whose tensors have no values: reading one (`item`, `tolist`, the truth of a
tensor, `nonzero`, a copy to the CPU) raises. A copy from the CPU waits as well, unless it is asked not to.
Several processes have fake tensors, which tell as little.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.optim import adam, optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from capi.config.schema import Config
from capi.train.build import build_learner, device_mover, resolve_target
from capi.train.cost.fake_processes import fake_learner
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch
from tests.train.test_loop import Noise, make_loop
from tests.train.test_step import batch_of
from tests.variants import LAYERS, NETWORKS, TARGETS, TOGETHER, varied

META = torch.device("meta")
# The clustering gets with its micro-batches which rows it must give.
SETTINGS = {
    "clustering": [],
    "queued": ["clustering.queue=24", "optimization.micro_batches=2"],
    "clipped": ["optimization.clip=1.0"],
    "muon": ["optimization.optimizer=muon", "optimization.clip=1.0"],
}
CASES = NETWORKS | TARGETS | TOGETHER | LAYERS | SETTINGS


class NoCopies(TorchDispatchMode):
    """Raises where the CPU hands a tensor to the device and waits until it is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = {value.device.type for value in args if isinstance(value, Tensor)}
        if func in {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}:
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            devices |= {torch.device(kwargs["device"]).type} if kwargs.get("device") else set()
        else:
            # It brings tensors from elsewhere to the device; other operations take a number of the CPU as it is.
            blocking = func is torch.ops.aten.where.self
        if blocking and devices == {"cpu", "meta"}:
            raise RuntimeError("a copy to the device waits for it")
        return func(*args, **kwargs)


class NoNewTensors(TorchFunctionMode):
    """Raises where Python's numbers are made a tensor of the device, which is a copy that dispatch does not see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in {torch.tensor, torch.as_tensor, Tensor.new_tensor} and result.device == META:
            raise RuntimeError("a copy to the device waits for it")
        return result


@contextmanager
def no_blocking_copies() -> Iterator[None]:
    with NoCopies(), NoNewTensors():
        yield


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


def to_meta(batch: MaskedBatch) -> MaskedBatch:
    return MaskedBatch(*(value.to(META, non_blocking=True) for value in batch[:3]))


@pytest.mark.parametrize("name", CASES)
def test__a_step_does_not_wait_for_the_device(small_config: Config, on_meta: None, name: str) -> None:
    config = varied(small_config, "optimization.batch_size=12", *CASES[name])
    learner, batch = meta_learner(config), batch_of(config)
    parts = [MaskedBatch(*part) for part in zip(*(value.chunk(2) for value in batch[:3]), strict=True)]
    with no_blocking_copies():
        # The second step finds what the first left.
        for step in (3, 4):
            metrics = train_step(learner, [to_meta(part) for part in parts], step)
    assert metrics.student_loss.device == META
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        metrics.values()


@pytest.mark.parametrize("name", ["clustering", "ema_head with sinkhorn", "clipped"])
def test__a_step_of_several_processes_does_not_wait(small_config: Config, name: str) -> None:
    config = varied(small_config, "optimization.batch_size=24", "optimization.micro_batches=2", *CASES[name])
    batch = batch_of(small_config)
    with fake_learner(config, processes=2) as learner:
        part = MaskedBatch(*map(torch.empty_like, batch[:3]))
        metrics = train_step(learner, [part, part], 3)
        with pytest.raises(DataDependentOutputException):
            metrics.values()


@pytest.mark.parametrize("name", ["features", "clustering", "queued"])
def test__the_loop_does_not_wait_between_two_logs(
    small_config: Config, tmp_path: Path, on_meta: None, name: str
) -> None:
    # The noise comes in one part.
    config = varied(small_config, *CASES[name], "optimization.batch_size=12", "optimization.micro_batches=1")
    loop = make_loop(config, tmp_path, Noise(config), log_steps=6, save_steps=100)
    loop.learner, loop.to_device = meta_learner(config), device_mover(config, META)
    # The sixth step is logged, and so it reads what it measures.
    with no_blocking_copies(), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        loop.run()
    assert loop.position.step == 5


def test__what_waits_is_found(on_meta: None) -> None:
    value = torch.ones(3, device=META)
    for wait in (torch.Tensor.tolist, torch.Tensor.nonzero, torch.Tensor.cpu, lambda values: values[0].item()):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            wait(value)
    with pytest.raises(RuntimeError, match="meta"):
        bool(value[0] > 0)
    with no_blocking_copies(), pytest.raises(RuntimeError, match="waits for it"):
        torch.ones(3).to(META)
    for number in (torch.zeros(()), torch.zeros(1)):
        with no_blocking_copies(), pytest.raises(RuntimeError, match="waits for it"):
            torch.where(value > 0, number, value)
    for make in (lambda: torch.tensor([1.0], device=META), lambda: value.new_tensor([1.0])):
        with no_blocking_copies(), pytest.raises(RuntimeError, match="waits for it"):
            make()
