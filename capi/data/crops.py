"""Where an image is cut: at random for training, in the middle for evaluation; and the normalization of pixels.

A random crop has a share of the area and an aspect drawn again until it fits, ten times at most, and else the largest
one in the middle whose aspect is allowed. The draws of a sample come from its key, so they do not depend on who draws.

`Transform` is the preprocessing of the evaluations, as a function to call:

    images = capi.transform(encoder)("photo.jpg")
    features = encoder(images)

An image is a file, a Pillow image, a numpy array (height, width) or (height, width, channels), or a tensor (height,
width) or (channels, height, width). Values of arrays and tensors are scaled by their dtype: uint8 from 0 to 255, uint16
and other integers from 0 to 65535, floats from 0 to 1, bool as black and white. Several images are a list, or a batch
with one more axis in front. The middle of an image is kept as classification does: the short side is resized to 256 for
a crop of 224 pixels, and so on in proportion; bicubic. Then comes the encoder's own mean and std, and the batch lies
where its weights do.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from capi.data.decoding import Box, BrokenImageError, Decoder, PillowPicture, Pixels, array_pixels, as_array, resize
from capi.errors import CapiError, expect
from capi.runtime.protocol import PAPER_SIZE
from capi.runtime.randomness import Stream, uniforms
from capi.types import Float, Int, VisionEncoder, statistics_of

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


def center_box(size: tuple[int, int], target: tuple[int, int], share: float = KEPT_SHARE) -> Box:
    """The middle of an image of (height, width), with the aspect of the target and `share` of what fits."""
    (height, width), (down, across) = size, target
    unit = min(height / down, width / across) * share
    left, top = (width - across * unit) / 2, (height - down * unit) / 2
    return Box(left, top, left + across * unit, top + down * unit)


def flips(keys: Int[Tensor, " b"]) -> list[bool]:
    """Which images of a batch are mirrored."""
    return (uniforms(keys, Stream.FLIP, 1)[:, 0] < 0.5).tolist()


# How far brightness, contrast and saturation move from 1, and hue in turns, at full strength (as in BYOL and DINO).
COLOR_RANGES = (0.4, 0.4, 0.2, 0.1)
# Of luminance (ITU-R BT.601).
LUMINANCE = (0.299, 0.587, 0.114)


def color_changes(keys: Int[Tensor, " b"], strength: float, channels: int) -> Float[Tensor, "b c e"]:
    """The matrix of each image that maps (its channels, 1) to channels in other colors, full scale being 1.

    Brightness f scales by f, contrast moves away from middle gray: f x + (1 - f) / 2, saturation moves away from the
    luminance l: f x + (1 - f) l, and hue turns around the gray axis. All are affine, so that one product does them all.
    Images that do not have 3 channels change in brightness and contrast alone.
    """
    draws = 2 * uniforms(keys, Stream.COLOR, len(COLOR_RANGES)) - 1
    brightness, contrast, saturation, hue = (strength * draws * torch.tensor(COLOR_RANGES)).T
    matrix = torch.eye(channels, dtype=torch.float64).expand(len(keys), -1, -1)
    if channels == len(LUMINANCE):
        gray = torch.full_like(matrix, 1 / 3)
        # Rodrigues' rotation around (1, 1, 1) / sqrt(3).
        cross = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]], dtype=torch.float64) / math.sqrt(3)
        angle = 2 * math.pi * hue[:, None, None]
        turned = gray + angle.cos() * (matrix - gray) + angle.sin() * cross
        luminance = torch.tensor(LUMINANCE, dtype=torch.float64).expand(3, 3)
        saturated = 1 + saturation[:, None, None]
        matrix = (saturated * matrix + (1 - saturated) * luminance) @ turned
    matrix = (1 + contrast)[:, None, None] * (1 + brightness)[:, None, None] * matrix
    shift = (-contrast / 2)[:, None, None].expand(-1, channels, 1)
    return torch.cat([matrix, shift], 2).float()


def recolor(
    images: Tensor, changes: Float[Tensor, "b c e"], device: torch.device | str = "cpu"
) -> Float[Tensor, "b c height width"]:
    """Pixels from 0 to 255 on the device, in the colors that `color_changes` gives, cut off at black and white."""
    pixels, changes = images.to(device, non_blocking=True).float(), changes.to(device, non_blocking=True)
    changed = torch.baddbmm(255 * changes[:, :, -1:], changes[:, :, :-1], pixels.flatten(2))
    return changed.clamp(0, 255).view_as(pixels)


def normalize(
    images: Tensor, mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu"
) -> Float[Tensor, "b c height width"]:
    """Pixels from 0 to 255 on the device, in units of the data's std."""
    center = torch.tensor(mean).view(-1, 1, 1) * 255
    scale = 1 / (torch.tensor(std).view(-1, 1, 1) * 255)
    pixels, center, scale = (value.to(device, non_blocking=True) for value in (images, center, scale))
    return (pixels.float() - center) * scale


def _placed(left: int, top: int, across: int, down: int) -> Box:
    return Box(left, top, left + across, top + down)


@dataclass(frozen=True)
class Frame:
    """The size that images get, and the share of the image that is kept (None: all of it, squeezed)."""

    size: tuple[int, int]
    share: float | None = KEPT_SHARE
    channels: int = 3

    def box(self, image_size: tuple[int, int]) -> Box:
        if self.share is None:
            return Box(0, 0, image_size[1], image_size[0])
        return center_box(image_size, self.size, self.share)


def image_size_of(encoder: VisionEncoder) -> tuple[int, int]:
    """Height and width that images get where nobody asks for others: the encoder's own, else the paper's.

    Encoders of runs and of their exports have the size that they were trained at. Published models, baselines, and
    files that do not say it have none.
    """
    own: int | tuple[int, int] | None = getattr(encoder, "image_size", None)
    if own is None:
        return PAPER_SIZE
    return (own, own) if isinstance(own, int) else (own[0], own[1])


ImageLike = str | Path | Image.Image | npt.NDArray[Any] | Tensor
_SINGLE = (str, Path, Image.Image)
_BATCH_AXES = 4
_KINDS = "a file, a Pillow image, an array or a tensor"


@dataclass(frozen=True)
class Transform:
    """Called on an image or several (files, Pillow images, arrays, tensors), it gives the encoder's batch."""

    encoder: VisionEncoder
    size: tuple[int, int]

    def __call__(self, images: ImageLike | Iterable[Any]) -> Float[Tensor, "b c height width"]:
        expect("images", images, (*_SINGLE, Iterable), f"{_KINDS}, or several")
        is_array = isinstance(images, np.ndarray | Tensor) and images.ndim != _BATCH_AXES
        listed = [images] if is_array or isinstance(images, _SINGLE) else list(images)
        if not listed:
            raise CapiError(f"there is no image to transform: give {_KINDS}, or several")
        mean, std = statistics_of(self.encoder)
        frame = Frame(self.size, channels=len(mean))
        pixels = torch.from_numpy(np.stack([_framed(image, frame) for image in listed]))
        first = next(self.encoder.parameters(), None) if isinstance(self.encoder, nn.Module) else None
        device, dtype = (torch.device("cpu"), torch.float32) if first is None else (first.device, first.dtype)
        return normalize(pixels, mean, std, device).to(dtype)


def transform(encoder: VisionEncoder, size: int | tuple[int, ...] | None = None) -> Transform:
    """What makes batches for this encoder, of images of `size` pixels: a side, or height and width.

    Without a size they get the encoder's own: that of its run, or 224 where it has none.
    """
    expect("the encoder", encoder, VisionEncoder, "what capi.load gives, or another encoder (capi.types.VisionEncoder)")
    size = image_size_of(encoder) if size is None else size
    expect("size", size, (int, tuple, list), "a side, or height and width")
    sides = (size, size) if isinstance(size, int) else tuple(size)
    patch = encoder.patch_size
    if len(sides) != 2 or any(side < 1 or side % patch for side in sides):
        fitting = " x ".join(str(max(round(side / patch), 1) * patch) for side in (*sides, *sides)[:2]) or str(patch)
        raise CapiError(
            f"size={size} does not fit the encoder: its sides must be multiples of the patch size {patch}, such as "
            f"{fitting}"
        )
    return Transform(encoder, (sides[0], sides[1]))


def _framed(image: Any, frame: Frame) -> Pixels:
    """The pixels of the frame, (channels, height, width), from 0 to 255."""
    decoder = Decoder(channels=frame.channels)
    if isinstance(image, np.ndarray | Tensor):
        return _framed_array(image, frame)
    if not isinstance(image, _SINGLE):
        raise CapiError(f"an image must be {_KINDS}, not a {type(image).__name__}")
    name = "the image" if isinstance(image, Image.Image) else str(image)
    if not isinstance(image, Image.Image) and not Path(image).is_file():
        problem = f"{image} is no file" if Path(image).exists() else f"there is no file {image}"
        raise CapiError(f"{problem}: give an image file, a Pillow image, or several")
    try:
        picture = PillowPicture(decoder, image) if isinstance(image, Image.Image) else decoder.open(Path(image))
        box = frame.box((picture.shape.height, picture.shape.width))
        return picture.crop(box, frame.size)
    except BrokenImageError as error:
        raise CapiError(f"{name} cannot be read ({error})") from error


def _framed_array(image: npt.NDArray[Any] | Tensor, frame: Frame) -> Pixels:
    try:
        values = as_array(image)
        if isinstance(image, Tensor) and image.ndim == 3:
            values = np.moveaxis(values, 0, -1)
        pixels = array_pixels(values, frame.channels)
        return resize(pixels, frame.box((pixels.shape[0], pixels.shape[1])), frame.size, frame.channels)
    except BrokenImageError as error:
        raise CapiError(f"the {type(image).__name__} cannot be used as an image ({error})") from error
