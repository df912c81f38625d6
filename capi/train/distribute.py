"""A learner over many processes: built once, spread by FSDP2, and put together again for evaluations.

The weights are drawn by the main process as a single one would draw them and sent to where they belong; the others
never hold the whole model, for they build it without memory (on the meta device). Prototypes are small and stay whole
in every process. So a run starts from the same weights whatever the number of processes, and one that was saved by
some resumes with any other number.
"""

from collections.abc import Callable
from functools import partial

import torch

from capi.config.schema import Config
from capi.models.layers import TransformerBlock
from capi.runtime.devices import keep_freed_memory
from capi.runtime.processes import Processes
from capi.runtime.sharding import average_gradients, device_mesh, fill_from_main, flat_mesh, shard, spread, whole_state
from capi.train import build
from capi.train.build import Networks
from capi.train.recomputation import recompute
from capi.train.step import Learner
from capi.types import VisionEncoder


def distribute(
    config: Config,
    whole: Learner | None,
    processes: Processes,
    device: torch.device,
    frozen_encoder: VisionEncoder | None = None,
) -> Learner:
    """The learner of this process. `whole` is the main process's, with all weights, and is not changed."""
    keep_freed_memory()
    networks = _without_weights(config, frozen_encoder, processes.size)
    mesh = device_mesh(processes, config.distributed.shards, device)
    precision = build.choose_precision(config.run.precision, device)
    recompute(networks.blocks, config.run.activation_checkpointing)
    for network in (networks.student, networks.teacher):
        # Put together by themselves: blocks, and the head, which a teacher hardly ever needs and float32 suits.
        units = {module: precision for module in network.modules() if isinstance(module, TransformerBlock)}
        heads = {part: torch.float32 for name, part in network.named_modules() if name.rpartition(".")[2] == "head"}
        shard(network, units | heads, mesh)
    sources = (None, None, None) if whole is None else (whole.student, whole.teacher, whole.target)
    for part, source in zip(networks, sources, strict=True):
        part.to_empty(device=device)
        fill_from_main(part, source, own=networks.target.sharded_buffers if part is networks.target else ())
    networks.target.reduction = processes
    average_gradients(networks.target.parameters(), processes)
    learner = build.assemble(config, networks, device)
    learner.average = processes.mean
    learner.spread = partial(spread, mesh=flat_mesh(processes, device))
    return learner


def whole_view(
    config: Config, processes: Processes, device: torch.device, frozen_encoder: VisionEncoder | None = None
) -> Callable[[Learner], Learner | None]:
    """A function that puts a learner together, for evaluations in the main process; the others get None."""

    def view(learner: Learner) -> Learner | None:
        states = [whole_state(network) for network in (learner.student, learner.teacher)]
        if not processes.is_main:
            return None
        networks = _without_weights(config, frozen_encoder)
        for network, state in zip((networks.student, networks.teacher), states, strict=True):
            network.to_empty(device=device)
            network.load_state_dict(state)
        return build.assemble(config, Networks(networks.student, networks.teacher, learner.target), device)

    return view


def _without_weights(config: Config, frozen_encoder: VisionEncoder | None, processes: int = 1) -> Networks:
    with torch.device("meta"):
        return build.build_networks(config, "meta", frozen_encoder, processes)
