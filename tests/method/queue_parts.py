"""How processes share the images of a queue: taken apart and put together, as an independent reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from capi.types import Float


def local_part(whole: Float[Tensor, "_ n d"], *, blocks: int, process: int, processes: int) -> Float[Tensor, "_ n d"]:
    """What one process keeps of the images of all.

    `whole` is ordered by batch and, within it, by the sample's number in the global batch. That is a row of blocks, one
    for each micro-batch, and the processes have equal parts of each block, in order.
    """
    return whole.unflatten(0, (blocks, processes, -1))[:, process].flatten(0, 1)


def whole_of_parts(parts: Sequence[Float[Tensor, "b n d"]], *, blocks: int) -> Float[Tensor, "_ n d"]:
    """The images of all processes in their one order, from the part of each; undone by `local_part`."""
    return torch.cat([part.unflatten(0, (blocks, -1)) for part in parts], dim=1).flatten(0, 1)
