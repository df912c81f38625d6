"""How much memory a forward pass leaves for its backward pass."""

from collections.abc import Callable

import torch
from torch import Tensor


def saved_bytes(forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes of the distinct tensors that autograd keeps, and the output."""
    storages: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = forward()
    return sum(storages.values()), output
