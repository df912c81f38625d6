"""How much memory a forward pass leaves for its backward pass."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tests.live_tensors import NewTensors


def saved_bytes(forward: Callable[[], Tensor], leaving_out: Iterable[Tensor] = ()) -> tuple[int, Tensor]:
    """Bytes of the distinct tensors that are kept after it, and its output.

    Most are reported by autograd. What selective checkpointing keeps is not: those are tensors of Python. Its states of
    random generators are bytes, of a number that does not depend on the batch, and left out.
    """
    addresses = {_address(value) for value in leaving_out}
    saved: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        # Held until the end: a storage that is freed might have its address given out again.
        saved.append(value)
        return value

    made = NewTensors()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = forward()
    saved += [value for value in made.living() if value.dtype != torch.uint8]
    storages = {_address(value): value.untyped_storage().nbytes() for value in saved}
    storages.pop(_address(output), None)
    return sum(size for address, size in storages.items() if address not in addresses), output


def _address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
