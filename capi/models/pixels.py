"""Raw patches as an encoder: the features of a patch are its pixels. What any trained encoder should beat."""

import torch
from torch import Tensor, nn

from capi.errors import CapiError
from capi.types import IMAGENET, Features, Float, Statistics


class PixelEncoder(nn.Module):
    """A `VisionEncoder` without weights, without registers and without a pooled vector."""

    def __init__(self, patch_size: int = 16, statistics: Statistics = IMAGENET) -> None:
        super().__init__()
        if patch_size < 1:
            raise CapiError(f"patches of {patch_size} pixels cannot be: give at least 1")
        self.patch_size, self.statistics = patch_size, statistics

    @property
    def width(self) -> int:
        return len(self.statistics.mean) * self.patch_size**2

    def forward(self, images: Float[Tensor, "b c height width"], *, pooled: bool = True) -> Features:  # noqa: ARG002 - the contract's signature
        size, (height, width) = self.patch_size, images.shape[2:]
        if height % size or width % size:
            raise CapiError(f"patches of {size} pixels do not fill images of {height} x {width} pixels: resize them")
        return Features(None, torch.empty(len(images), 0, self.width, device=images.device), patch_pixels(images, size))


def patch_pixels(images: Float[Tensor, "b c height width"], size: int) -> Float[Tensor, "b rows columns pixels"]:
    """The pixels of each patch: channel by channel, in each row by row."""
    blocks = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3)
