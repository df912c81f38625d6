"""Weights over many devices: FSDP2 (`fully_shard`) over a mesh of replicas and shards.

One copy of the weights, their gradients and their moments lies on `shards` processes together; the processes beyond
that hold further copies. `shards` of 1 is what DDP does: every process has all weights, and gradients are averaged. As
many shards as processes need the least memory. In between, a copy lies within a machine, where the network is fast.

A network knows nothing of it: it is taken apart at the modules that are named as units, which are put together for
the time in which they compute. Masters, gradients' sums and moments are float32; units may compute in bfloat16.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from capi.errors import CapiError
from capi.runtime.processes import Processes, lost_process_is_an_error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def device_mesh(processes: Processes, shards: int | None, device: torch.device) -> "DeviceMesh":
    """Replicas times shards; neighbours share a copy."""
    from torch.distributed.device_mesh import init_device_mesh

    shards = chosen_shards(processes, shards)
    return init_device_mesh(device.type, (processes.size // shards, shards), mesh_dim_names=("replicas", "shards"))


def chosen_shards(processes: Processes, shards: int | None) -> int:
    """How many processes share a copy; without a number all of them do."""
    shards = shards or processes.size
    if processes.size % shards:
        raise CapiError(
            f"distributed.shards is {shards}, which does not divide the {processes.size} processes: set a divisor of "
            f"{processes.size}"
        )
    return shards


def shard(root: nn.Module, units: Mapping[nn.Module, torch.dtype], mesh: "DeviceMesh") -> None:
    """Spread a module's parameters over a mesh, in place. What lies in no unit is put together with the root.

    A unit's parameters are sent and used in the precision that is given with it; the root's are float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for module, precision in [*units.items(), (root, torch.float32)]:
        # Sums of gradients stay in float32 whatever the products were computed in.
        policy = MixedPrecisionPolicy(
            param_dtype=None if precision == torch.float32 else precision,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        # By default a root stays whole after its forward pass, and a network without a backward pass would stay so.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def flat_mesh(processes: Processes, device: torch.device) -> "DeviceMesh":
    """All processes in a row."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (processes.size,), mesh_dim_names=("processes",))


def spread(value: Tensor, axis: int, mesh: "DeviceMesh") -> Tensor:
    """The tensor of which every process has a part along an axis, in their order; it shares the memory of `value`."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(value, mesh, [Shard(axis)], run_check=False)


def fill_from_main(module: nn.Module, source: nn.Module | None, own: Container[str] = ()) -> None:
    """Copy parameters and buffers from the main process, which alone has the whole of them in `source`.

    Buffers that are a process's `own` start at zero.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    given = {} if source is None else source.state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with lost_process_is_an_error():
        set_model_state_dict(module, given, options=options)
    theirs = {} if source is None else dict(source.named_buffers())
    for name, buffer in module.named_buffers():
        if name in own:
            buffer.zero_()
            continue
        if source is not None:
            buffer.copy_(theirs[name])
        broadcast(buffer)


def broadcast(value: Tensor) -> None:
    """The main process's values, in place."""
    with lost_process_is_an_error():
        dist.broadcast(value, src=0)


def average_gradients(parameters: Iterable[nn.Parameter], processes: Processes) -> None:
    """Make every gradient of these whole parameters the mean over the processes, whenever it is computed."""

    def exchange(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(processes.sum(parameter.grad) / processes.size)

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(exchange)


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict with whole tensors on the CPU of the main process; empty in the others."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    with lost_process_is_an_error():
        state: Any = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return dict(state)


def whole(value: Tensor) -> Tensor:
    """A value that may be spread over processes, put together."""
    gathered = getattr(value, "full_tensor", None)
    return value if gathered is None else gathered()


def local_part(value: Tensor) -> Tensor:
    """What this process has of a value that may be spread over processes; it shares its memory."""
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()


def map_whole(function: Callable[[Tensor], Tensor], stack: Tensor, like: Tensor) -> Tensor:
    """A function of a stack of tensors that are all spread like `like`; this process gives and gets its own parts.

    The function sees whole tensors, each in one process alone, some of the stack in each, perhaps none.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(like, DTensor):
        return function(stack)
    shape = torch.Size([len(stack), *like.shape])
    stride = torch.empty(shape, device="meta").stride()
    parts = [Shard(each.dim + 1) if isinstance(each, Shard) else each for each in like.placements]

    def spread_as(value: Tensor, placements: Any) -> DTensor:
        return DTensor.from_local(value, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)

    with lost_process_is_an_error():
        apart = spread_as(stack, parts).redistribute(placements=[Shard(0)] * like.device_mesh.ndim)
        done = spread_as(function(apart.to_local()).contiguous(), apart.placements)
        return done.redistribute(placements=parts).to_local()
