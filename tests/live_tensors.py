"""Which tensors are alive, to measure memory."""

import gc

import torch
from torch import Tensor


class NewTensors:
    """The tensors that are made from now on.

    Older objects are set aside: a process that runs tests has millions, which take a second to look through.
    """

    def __init__(self) -> None:
        gc.freeze()

    def living(self) -> list[Tensor]:
        gc.collect()
        # No isinstance, which would ask every object that there is for its class.
        return [value for value in gc.get_objects() if type(value) in {Tensor, torch.nn.Parameter}]

    def bytes(self) -> int:
        """Of the distinct storages."""
        storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in self.living()}
        return sum(storages.values())
