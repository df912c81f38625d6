"""Which training samples are held out to choose a setting: a share that follows from the seed alone."""

from typing import NamedTuple

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.runtime.randomness import permuted
from capi.types import Int

# Fewer held-out images than these tell settings apart by chance.
FEW_IMAGES, FEW_OF_A_CLASS = 50, 2


class Split(NamedTuple):
    """Numbers of samples, ascending: those to fit on while settings are tried, and those to choose by."""

    fit: Int[Tensor, " f"]
    held_out: Int[Tensor, " v"]


def hold_out(count: int, share: float, seed: int) -> Split:
    """A random share of `count` samples, at least one; the same for the same count and seed."""
    held = max(int(count * share), 1)
    if held >= count:
        raise CapiError(
            f"{count} training images cannot give {share:.0%} to choose a setting by: at least 2 are needed"
        )
    order = permuted(torch.arange(count), count, seed, torch.zeros(count, dtype=torch.int64))
    return Split(order[held:].sort().values, order[:held].sort().values)


def few_held_out(held_out: int, *, classes: int, settings: int) -> list[str]:
    """A warning where several settings were told apart by few images."""
    if settings < 2 or (held_out >= FEW_IMAGES and held_out >= FEW_OF_A_CLASS * classes):
        return []
    return [
        f"the best of {settings} settings was chosen by {held_out} held-out images of {classes} classes, which is few: "
        "another seed may choose another; fix the setting, or raise validation_share"
    ]
