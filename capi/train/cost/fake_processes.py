"""One of many processes without the others: FSDP2's own step on tensors without values, over a network that is none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

# Teaches older releases of torch what a collective gives.
import torch.distributed._tools.fake_collectives
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from capi.config.schema import Config
from capi.runtime.processes import Processes
from capi.train import build
from capi.train.distribute import distribute
from capi.train.guard import Guard
from capi.train.recomputation import recompute
from capi.train.step import Learner

CPU = torch.device("cpu")


@contextmanager
def fake_learner(config: Config, processes: int, rank: int = 0) -> Iterator[Learner]:
    """The learner of a process, spread over all of them. Within this every new tensor is a fake one.

    A process alone keeps its learner whole, as a run does.
    """
    # What torch makes itself is real, such as the number of a mesh's axis.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if processes == 1:
        with torch.device("meta"):
            networks = build.build_networks(config, "meta")
        recompute(networks.blocks, config.run.activation_checkpointing)
        for network in networks:
            _fill(network, CPU, mode)
        with mode:
            yield build.assemble(config, networks, CPU)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        # Fake tensors cannot be swapped, by which `to_empty` brings a module to life.
        with (
            patch("capi.train.distribute.fill_from_main"),
            patch.object(nn.Module, "to_empty", lambda module, device: _fill(module, device, mode)),
        ):
            learner = distribute(config, None, Processes(rank, processes), CPU)
        with mode:
            learner.guard = Guard(CPU, learner.guard.patience)
            yield learner
    finally:
        dist.destroy_process_group()


def _fill(root: nn.Module, device: torch.device, mode: FakeTensorMode) -> None:
    for module in root.modules():
        with mode:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    empty = torch.empty_like(parameter, device=device)
                    module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)
    for module in root.modules():
        group: Any = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for sharded in group.fsdp_params if group else ():
            sharded.reset_sharded_param()
