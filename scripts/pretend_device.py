"""A device that is none: tensors that say they lie on an accelerator and whose numbers are the CPU's.

A real accelerator refuses an operation on tensors of two devices, and a CPU cannot: there all are alike. Within
`pretending(device)` tensors that are made on that device, or brought there, refuse it too, while every operation gives
what the CPU gives. So code runs with its real loops and its real numbers, backward passes included, and what was left
on the wrong device is an error at its line.

    cuda:0      without a backward pass, since torch asks the driver there
    standin:0   a backend of Python's, with backward passes (torch 2.10 and newer); its build needs no CUDA
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

CPU = torch.device("cpu")
STAND_IN = "standin"
_ATEN = torch.ops.aten
# What goes from device to device; and what CUDA lets read an index on the CPU.
_COPIES = {_ATEN._to_copy.default, _ATEN.copy_.default, _ATEN._copy_from.default}
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._unsafe_index.Tensor}
# What CUDA has a kernel for and a CPU has not: the same numbers in another way.
_INSTEAD = {_ATEN.mm.dtype: lambda left, right, dtype: left.to(dtype) @ right.to(dtype)}
# What torch asks CUDA's driver about before any mode sees it; the first three may take a tensor of the CPU.
_TAKES_CPU = {Tensor.__getitem__, Tensor.__setitem__, Tensor.copy_}
_ASKS_DRIVER = _TAKES_CPU | {Tensor.contiguous, Tensor.__invert__, torch.nn.functional.scaled_dot_product_attention}
_ASKS_DRIVER |= {Tensor.nonzero, torch.nonzero, Tensor.__int__, Tensor.__float__, Tensor.__bool__, Tensor.__index__}


class WrongDeviceError(RuntimeError):
    """An operation on tensors of two devices."""


class Pretender(Tensor):
    """A tensor of the CPU under another device's name."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "Pretender":
        made: Pretender = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS_DRIVER and any(value.device.type == "cuda" for value in args if isinstance(value, Pretender)):
            return _on_cpu(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Pretender({self.inner!r}, device={self.device})"

    def tolist(self) -> Any:
        return self.inner.tolist()


def _on_cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU's numbers, under the device's name again."""
    flat, spec = tree_flatten((args, kwargs))
    device = next(value.device for value in flat if isinstance(value, Pretender))
    left = [value for value in flat if isinstance(value, Tensor) and not isinstance(value, Pretender) and value.ndim]
    if left and (func not in _TAKES_CPU or not isinstance(args[0], Pretender)):
        raise WrongDeviceError(f"{func} has tensors of two devices")
    flat = [value.inner if isinstance(value, Pretender) else value for value in flat]
    inner_args, inner_kwargs = tree_unflatten(flat, spec)
    given = func(*inner_args, **inner_kwargs)
    return tree_map(lambda value: Pretender(value, device) if isinstance(value, Tensor) else value, given)


class Pretending(TorchDispatchMode):
    """Makes what is asked for on the device, and notes which operations it saw."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.pretended, self.seen = device, set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self)


def _run(func: Any, args: Any, kwargs: dict[str, Any], mode: Pretending | None = None) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    devices = [value.device for value in tensors if isinstance(value, Pretender)]
    asked = next((value for value in flat if isinstance(value, torch.device)), None)
    wanted = asked if asked is not None else devices[0] if devices else CPU
    if mode is not None and not devices and wanted.type != mode.pretended.type:
        return func(*args, **kwargs)
    if mode is not None:
        mode.seen.add(func)
    # A single number of the CPU is read by the host, which hands it on.
    left = [value for value in tensors if not isinstance(value, Pretender) and value.ndim]
    if devices and left and func not in _COPIES | _INDEXED:
        shapes = ", ".join(f"{value.device} {tuple(value.shape)}" for value in tensors)
        raise WrongDeviceError(f"{func} has tensors of two devices: {shapes}")
    inner = [
        value.inner if isinstance(value, Pretender) else CPU if isinstance(value, torch.device) else value
        for value in flat
    ]
    inner_args, inner_kwargs = tree_unflatten(inner, spec)
    # Memory is pinned for a real device alone.
    inner_kwargs.pop("pin_memory", None)
    given = _INSTEAD.get(func, func)(*inner_args, **inner_kwargs)
    if wanted.type == "cpu":
        return given
    device = torch.device(wanted.type, wanted.index or 0)
    wrapped = tree_map(lambda value: Pretender(value, device) if isinstance(value, Tensor) else value, given)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if devices else wrapped


_library = torch.library.Library("_", "IMPL")


class _Module:
    """What torch asks of a device's module."""

    is_initialized = is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda _: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))


def stand_in() -> torch.device:
    """Registers a backend of Python's under a name of its own, once in a process."""
    from torch.utils import backend_registration

    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise RuntimeError(f"torch {torch.__version__} has no backends of Python's: 2.10 and newer have")
    if not hasattr(torch, STAND_IN):
        setup(STAND_IN, backend_module=_Module())
        # What autocast does not know stays as it is, as for other devices.
        _library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return torch.device(STAND_IN, 0)


@contextmanager
def pretending(device: torch.device) -> Iterator[Pretending]:
    """Let tensors be made on the device and moved there."""

    def on_cpu_first(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """torch makes a tensor of given numbers inside of itself, where no mode sees it."""

        def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            value = make(*args, **kwargs)
            return value if device is None else value.to(device)

        return made

    patches = [patch.object(torch, name, on_cpu_first(getattr(torch, name))) for name in ("tensor", "as_tensor")]
    # Inference mode wants tensors of its own; without gradients the numbers are the same.
    patches.append(patch("torch._C._InferenceMode", lambda wanted: torch.no_grad() if wanted else nullcontext()))
    if device.type == "cuda":
        free = 2**34
        patches.append(patch("torch.cuda._lazy_init", lambda: None))
        # A parameter that takes the data of another tensor would be a bare one of CUDA.
        patches.append(patch("torch.__future__._overwrite_module_params_on_conversion", True))
        patches.append(patch("torch.cuda.is_available", lambda: True))
        patches.append(patch("torch.cuda.is_bf16_supported", lambda *_, **__: True))
        patches.append(patch("torch.cuda.mem_get_info", lambda *_: (free, free)))
        patches.append(patch("torch.cuda.get_device_capability", lambda *_: (8, 0)))
        patches.append(patch("torch.cuda.get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB"))
    mode = Pretending(device)
    for each in patches:
        each.start()
    try:
        with mode:
            yield mode
    finally:
        for each in patches:
            each.stop()
