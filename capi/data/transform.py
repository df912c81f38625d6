"""From images to what an encoder takes: the preprocessing of the evaluations, as a function to call.

    images = capi.transform(encoder)("photo.jpg")
    features = encoder(images)

An image is a file, a Pillow image, a numpy array (height, width) or (height, width, channels), or a tensor (height,
width) or (channels, height, width). Values of arrays and tensors are scaled by their dtype: uint8 from 0 to 255, uint16
and other integers from 0 to 65535, floats from 0 to 1, bool as black and white. Several images are a list, or a batch
with one more axis in front.

The middle of an image is kept as classification does: the short side is resized to 256 for a crop of 224 pixels, and so
on in proportion; bicubic. Then comes the encoder's own mean and deviation, and the batch lies where its weights do.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from capi.data.crops import normalize
from capi.data.decoding import BrokenImageError, Decoder, PillowPicture, Pixels, array_pixels, as_array, resize
from capi.data.frame import Frame, image_size_of
from capi.errors import CapiError, expect
from capi.types import Float, VisionEncoder, statistics_of

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
        device, dtype = _home(self.encoder)
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
        found = f"{image} is no file" if Path(image).exists() else f"there is no file {image}"
        raise CapiError(f"{found}: give an image file, a Pillow image, or several")
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


def _home(encoder: VisionEncoder) -> tuple[torch.device, torch.dtype]:
    """Where an encoder's weights lie, and how precise they are."""
    first = next(encoder.parameters(), None) if isinstance(encoder, nn.Module) else None
    return (torch.device("cpu"), torch.float32) if first is None else (first.device, first.dtype)
