"""Where an image is cut: at random for training, in the middle for evaluation; and the normalisation of pixels.

A random crop has a share of the area and an aspect drawn anew until it fits, ten times at most, and else the largest
one in the middle whose aspect is allowed. The draws of a sample come from its key, so they do not depend on who draws.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from capi.data.decoding import Box
from capi.runtime.randomness import Stream, uniforms
from capi.types import Float, Int

ATTEMPTS = 10
# What ImageNet evaluation cuts away: resize the short side to 256, keep 224.
KEPT_SHARE = 224 / 256


def crop_draws(keys: Int[Tensor, " b"]) -> list[list[float]]:
    """All that the crops of a batch need, a row for each sample."""
    return uniforms(keys, Stream.CROP, 2 * ATTEMPTS + 2).tolist()


def random_box(
    size: tuple[int, int], draws: Sequence[float], scale: tuple[float, float], aspect: tuple[float, float]
) -> Box:
    """A crop of an image of (height, width): area within `scale` of the whole, width / height within `aspect`."""
    height, width = size
    if scale == (1.0, 1.0):
        # Nothing is left to cut: the image is resized to the square as it is.
        return Box(0, 0, width, height)
    low, high = math.log(aspect[0]), math.log(aspect[1])
    for share, ratio in zip(draws[:ATTEMPTS], draws[ATTEMPTS : 2 * ATTEMPTS], strict=True):
        area = height * width * (scale[0] + share * (scale[1] - scale[0]))
        shape = math.exp(low + ratio * (high - low))
        across, down = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < across <= width and 0 < down <= height:
            return _placed(int(draws[-2] * (width - across + 1)), int(draws[-1] * (height - down + 1)), across, down)
    across, down = min(width, round(height * aspect[1])), min(height, round(width / aspect[0]))
    return _placed((width - across) // 2, (height - down) // 2, across, down)


def centre_box(size: tuple[int, int], target: tuple[int, int], kept: float = KEPT_SHARE) -> Box:
    """The middle of an image of (height, width), with the aspect of the target and `kept` of what fits."""
    (height, width), (down, across) = size, target
    unit = min(height / down, width / across) * kept
    left, top = (width - across * unit) / 2, (height - down * unit) / 2
    return Box(left, top, left + across * unit, top + down * unit)


def flips(keys: Int[Tensor, " b"]) -> list[bool]:
    """Which images of a batch are mirrored."""
    return (uniforms(keys, Stream.FLIP, 1)[:, 0] < 0.5).tolist()


def normalize(
    images: Tensor, mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu"
) -> Float[Tensor, "b c height width"]:
    """Pixels from 0 to 255 on the device, in units of the data's deviation."""
    centre = torch.tensor(mean).view(-1, 1, 1) * 255
    scale = 1 / (torch.tensor(std).view(-1, 1, 1) * 255)
    pixels, centre, scale = (value.to(device, non_blocking=True) for value in (images, centre, scale))
    return (pixels.float() - centre) * scale


def _placed(left: int, top: int, across: int, down: int) -> Box:
    return Box(left, top, left + across, top + down)
