"""Decoding: from an image file as it is in the wild to a crop of pixels.

Whatever the file holds becomes values from 0 to 255 with the channels that the model wants: bytes where the file has
bytes, floats where it has more (16-bit images keep their depth). Images are turned as their EXIF tag says; palettes
are looked up; what is transparent is laid on white. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where the crop
stays at least as large as the model's input; that is for training alone, never for evaluation.
"""

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image, ImageOps, PngImagePlugin, UnidentifiedImageError
from torch import Tensor

from capi.data.tiff import TIFF_EXTRA, TiffFile, has_tiff_reader, is_tiff, open_tiff
from capi.errors import CapiError, counted
from capi.runtime.documents import open_regular, regular_size
from capi.runtime.image_files import MAX_IMAGE_BYTES, open_image
from capi.runtime.retry import retry

Pixels = npt.NDArray[Any]
EncodedSource = Path | bytes
# What was decoded: an image in L, RGB or floats, or an array where Pillow has no mode for its channels.
Decoded = Image.Image | Pixels
JPEG_FACTORS = (8, 4, 2)
# A TIFF of more pixels is read in parts.
READ_IN_PARTS = 2**24
# Before a strong reduction whole blocks of pixels are averaged; three times the final size is left for the filter.
_REDUCING_GAP = 3.0
_TURNED = (5, 6, 7, 8)
# How far floats may lie beyond 0 and 1.
_ROUNDING = 1e-3
_MAYBE_TRANSPARENT = ("1", "L", "RGB", "P", "PA", "LA", "La", "RGBA", "RGBa")


class BrokenImageError(Exception):
    """A file that cannot be used, and why."""


class ChannelsError(BrokenImageError):
    """A file with another number of channels than the model has."""

    def __init__(self, what: str, advice: str, channels: int) -> None:
        super().__init__(f"{what}: {advice}")
        self.what, self.channels = what, channels


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def scaled(self, horizontal: float, vertical: float) -> "Box":
        return Box(self.left * horizontal, self.top * vertical, self.right * horizontal, self.bottom * vertical)


@dataclass(frozen=True)
class Decoder:
    """How files become pixels: the channels wanted, and what is refused."""

    channels: int = 3
    max_pixels: int = 178_000_000
    smallest_side: int = 1
    reduced: bool = False
    turned: bool = True
    """Whether images are turned as their EXIF tag says."""
    crop_first: bool = False
    """Whether a crop is cut out before it is resized, as RandomResizedCrop does: the filter sees no pixel outside."""
    max_pixels_in_parts: int | None = None
    """Of a TIFF that is read in parts; by default `max_pixels`, which a single tile or strip never exceeds."""

    def open(self, source: EncodedSource) -> "OpenedImage":
        """Read the header. A file that is refused or no image raises `BrokenImageError`."""
        with self.guarded():
            content = retry(lambda: _read_file(source)) if isinstance(source, Path) else source
            looks_tiff = isinstance(content, Path) or is_tiff(content)
            # Other channels than Pillow knows always need the extra, and `open_tiff` names it.
            needs_reader = self.channels not in {1, 3} or has_tiff_reader()
            file = open_tiff(content) if looks_tiff and needs_reader else None
            if file is not None and self._reads_with_tifffile(file):
                return TiffPicture(self, file)
            try:
                image = self._open_with_pillow(content)
            except UnidentifiedImageError as error:
                if file is None and looks_tiff:
                    raise BrokenImageError(f"a TIFF that Pillow alone cannot read: {TIFF_EXTRA}") from error
                if file is None or not file.is_direct:
                    raise
                self._check_tiff(file)
                return TiffPicture(self, file)
            # Before the EXIF tag is looked for: a PNG is decoded to find it.
            self._check_size(*image.size)
            return PillowPicture(self, image, _low_bytes(image, content))

    def _open_with_pillow(self, source: EncodedSource) -> Image.Image:
        image = open_image(source)
        if image.format == "TIFF" and not has_tiff_reader() and _has_equal_pages(image):
            raise CapiError(f"TIFF files with several pages need the extra: {TIFF_EXTRA}")
        return image

    def _reads_with_tifffile(self, file: TiffFile) -> bool:
        """Whether Pillow cannot read it (channels, pages, 16 bits), or would decode all where a part is enough."""
        in_parts = file.is_plain and file.width * file.height > READ_IN_PARTS
        if self.channels in {1, 3} and file.pages == 1 and not file.is_deep_color and not in_parts:
            return False
        self._check_tiff(file)
        return True

    def _check_tiff(self, file: TiffFile) -> None:
        """Refuse too many channels before anything is decoded: a few bytes may claim them."""
        if file.unnamed and file.channels != self.channels:
            raise ChannelsError(
                f"{file.pages} pages of {file.width} x {file.height} whose axis has no name",
                f"if they are channels, use {_setting(file.channels)}, else write each to a file of its own",
                file.channels,
            )
        _check_channels(file.channels, self.channels)
        limit = self.max_pixels_in_parts or self.max_pixels
        self._check_size(file.width, file.height, limit)
        if file.width * file.height * file.channels > 4 * limit:
            raise BrokenImageError(
                f"{counted(file.channels, 'channel')} of {file.width} x {file.height} pixels are too many"
            )
        if file.pixels_at_once * file.samples > 4 * self.max_pixels:
            raise BrokenImageError(f"{file.width} x {file.height} pixels in too few parts: store them in tiles of 512")

    def _check_size(self, width: int, height: int, limit: int | None = None) -> None:
        limit = limit or self.max_pixels
        if width * height > limit:
            parts = ", if not as a TIFF in tiles" if self.max_pixels_in_parts and limit == self.max_pixels else ""
            raise BrokenImageError(
                f"{width} x {height} pixels are more than data.max_megapixels = {limit / 1e6:g} allows{parts}"
            )
        if min(width, height) < self.smallest_side:
            raise BrokenImageError(f"{width} x {height} pixels are less than a patch of {self.smallest_side}")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn what goes wrong inside a codec into `BrokenImageError`, and let our own limit be the limit."""
        before = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = self.max_pixels
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except (BrokenImageError, CapiError, MemoryError):
            raise
        except Image.DecompressionBombError as error:
            limit = f"data.max_megapixels = {self.max_pixels / 1e6:g}"
            raise BrokenImageError(f"more pixels than {limit} allows") from error
        except Exception as error:
            # Codecs raise whatever they like about a broken file.
            unknown = isinstance(error, UnidentifiedImageError)
            raise BrokenImageError("no image that can be read" if unknown else error_reason(error)) from error
        finally:
            Image.MAX_IMAGE_PIXELS = before


class ImageShape(NamedTuple):
    """The size of an image as it is seen, and how it may be read."""

    width: int
    height: int
    reducible: bool = False
    in_parts: bool = False

    def factor(self, box: Box, size: tuple[int, int]) -> int:
        """The factor by which decoding can reduce the image, with the crop still at least as large as `size`."""
        height, width = size
        room = min((box.right - box.left) / width, (box.bottom - box.top) / height)
        return next((factor for factor in JPEG_FACTORS if self.reducible and factor <= room), 1)


@runtime_checkable
class OpenedImage(Protocol):
    """An opened image, which gives all of its pixels or a crop."""

    shape: ImageShape

    def load(self, factor: int = 1) -> Decoded: ...

    def decode(self, factor: int = 1) -> Pixels: ...

    def part(self, box: Box, size: tuple[int, int]) -> tuple[Decoded, Box]: ...

    def crop(self, box: Box, size: tuple[int, int]) -> Pixels: ...


class PillowPicture:
    """An image that Pillow decodes, always whole, a JPEG at a fraction of its size where that is enough."""

    def __init__(self, decoder: Decoder, image: Image.Image, low: Image.Image | None = None) -> None:
        """`low` holds the low bytes of colors of 16 bits, of which Pillow gives the high ones."""
        self.decoder, self.image, self.low = decoder, image, low
        self.orientation = image.getexif().get(ExifTags.Base.Orientation, 1) if decoder.turned else 1
        width, height = image.size
        # Of a TIFF, Pillow gives the size as it is seen.
        if self.orientation in _TURNED and image.format != "TIFF":
            width, height = height, width
        self.shape = ImageShape(width, height, reducible=decoder.reduced and image.format in {"JPEG", "MPO"})

    def load(self, factor: int = 1) -> Decoded:
        """The whole image in L, RGB or floats, a JPEG at 1 / factor of its size."""
        with self.decoder.guarded():
            if factor > 1:
                # `draft` takes exactly this factor when it is asked for this size.
                self.image.draft(None, (max(self.image.width // factor, 1), max(self.image.height // factor, 1)))
            if self.low is not None:
                high, low = (np.asarray(self._turned(half)).astype(np.uint16) for half in (self.image, self.low))
                return full_scale(256 * high + low)
            plain = _plain(self._turned(self.image))
            plain.load()
            return plain

    def _turned(self, image: Image.Image) -> Image.Image:
        return ImageOps.exif_transpose(image) if self.orientation != 1 else image

    def decode(self, factor: int = 1) -> Pixels:
        """The same as (height, width) or (height, width, channels)."""
        return np.asarray(self.load(factor))

    def part(self, box: Box, size: tuple[int, int]) -> tuple[Decoded, Box]:
        """Decoded pixels that hold a crop at least as large as `size`, and the crop's box within them."""
        factor = self.shape.factor(box, size)
        return self.load(factor), box.scaled(1 / factor, 1 / factor)

    def crop(self, box: Box, size: tuple[int, int]) -> Pixels:
        """A crop resized to (height, width), as (channels, height, width)."""
        factor = self.shape.factor(box, size)
        return crop_decoded(self.load(factor), factor, box, size, self.decoder)


class TiffPicture:
    """A TIFF with any number of channels, of which only the tiles or strips under the crop are decoded."""

    def __init__(self, decoder: Decoder, file: TiffFile) -> None:
        self.decoder, self.file = decoder, file
        self.shape = ImageShape(file.width, file.height, in_parts=True)

    def load(self, factor: int = 1) -> Decoded:
        return self.decode(factor)

    def decode(self, factor: int = 1) -> Pixels:  # noqa: ARG002 - the contract's signature
        return self._part(0, self.shape.height, 0, self.shape.width)

    def part(self, box: Box, size: tuple[int, int]) -> tuple[Decoded, Box]:  # noqa: ARG002 - the contract's signature
        # Rounding may push a box out of the image by a hair, where there are no pixels.
        left, top = max(math.floor(box.left), 0), max(math.floor(box.top), 0)
        right, bottom = min(math.ceil(box.right), self.shape.width), min(math.ceil(box.bottom), self.shape.height)
        inside = Box(box.left - left, box.top - top, box.right - left, box.bottom - top)
        return self._part(top, bottom, left, right), inside

    def crop(self, box: Box, size: tuple[int, int]) -> Pixels:
        pixels, inside = self.part(box, size)
        decoder = self.decoder
        return resize(pixels, inside, size, decoder.channels, quick=decoder.reduced, crop_first=decoder.crop_first)

    def _part(self, top: int, bottom: int, left: int, right: int) -> Pixels:
        with self.decoder.guarded():
            values = self.file.read(top, bottom, left, right)
        return full_scale(values)


def crop_decoded(decoded: Decoded, factor: int, box: Box, size: tuple[int, int], decoder: Decoder) -> Pixels:
    """A crop of what was decoded at 1 / factor; the box is in pixels of the full size."""
    # Not the ratio of the sizes: the last reduced pixel may lie partly outside of the image.
    scaled = box.scaled(1 / factor, 1 / factor)
    return resize(decoded, scaled, size, decoder.channels, quick=decoder.reduced, crop_first=decoder.crop_first)


def resize(
    decoded: Decoded,
    box: Box,
    size: tuple[int, int],
    channels: int,
    *,
    quick: bool = False,
    crop_first: bool = False,
) -> Pixels:
    """Bicubic, antialiased; (channels, height, width), bytes where all fits Pillow's RGB or L, else floats.

    `quick` averages whole blocks of pixels before a strong reduction. With `crop_first` the filter sees no pixel
    outside of the box; without it the result is a part of the whole image resized.
    """
    parts = [np.asarray(_resize(layer, box, size, quick, crop_first)) for layer in _layers(decoded, channels)]
    planes = parts[0].transpose(2, 0, 1) if parts[0].ndim == 3 else np.stack(parts)
    if channels == 1 and len(planes) > 1:
        planes = planes.mean(0, keepdims=True)
    return np.repeat(planes, channels, axis=0) if len(planes) == 1 and channels > 1 else planes


def _layers(decoded: Decoded, channels: int) -> list[Image.Image]:
    """What Pillow can resize at once: an image in L, RGB or floats, or one image for each channel."""
    if not isinstance(decoded, Image.Image):
        if decoded.dtype != np.uint8 or (decoded.ndim == 3 and decoded.shape[2] != 3):
            layers = decoded[None] if decoded.ndim == 2 else decoded.transpose(2, 0, 1)
            _check_channels(len(layers), channels)
            return [Image.fromarray(np.ascontiguousarray(layer, dtype=np.float32)) for layer in layers]
        decoded = Image.fromarray(decoded)
    _check_channels(len(decoded.getbands()), channels)
    return [decoded.convert("L") if channels == 1 and decoded.mode == "RGB" else decoded]


def _check_channels(count: int, wanted: int) -> None:
    if wanted != 1 and count not in {1, wanted}:
        raise ChannelsError(f"{count} channels in place of {wanted}", f"use {_setting(count)}", count)


def _setting(channels: int) -> str:
    return f"model.channels={channels} (capi data check: --channels {channels})"


def _has_equal_pages(image: Image.Image) -> bool:
    """Whether a TIFF has another page of the size of the first; smaller ones are previews."""
    size, several = image.size, False
    for number in range(1, getattr(image, "n_frames", 1)):
        image.seek(number)
        several = several or image.size == size
    image.seek(0)
    return several


def _resize(image: Image.Image, box: Box, size: tuple[int, int], quick: bool, crop_first: bool) -> Image.Image:
    # Rounding may push a scaled box out of the image by a hair, which Pillow refuses.
    inside = Box(max(box.left, 0), max(box.top, 0), min(box.right, image.width), min(box.bottom, image.height))
    if crop_first:
        # A box of a reduced JPEG may begin within a pixel: that pixel is the most the filter sees of what is outside.
        left, top = math.floor(inside.left), math.floor(inside.top)
        image = image.crop((left, top, math.ceil(inside.right), math.ceil(inside.bottom)))
        inside = Box(inside.left - left, inside.top - top, inside.right - left, inside.bottom - top)
    gap = _REDUCING_GAP if quick else None
    return image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=inside, reducing_gap=gap)


def _plain(image: Image.Image) -> Image.Image:
    """Any mode as bytes in L or RGB, or as floats from 0 to 255 where there is more than a byte."""
    mode = image.mode
    if mode == "F" or mode.startswith("I"):
        return Image.fromarray(full_scale(np.asarray(image)))
    if mode in _MAYBE_TRANSPARENT and _has_transparency(image):
        opaque = image.convert("RGBA")
        white = Image.new("RGBA", opaque.size, "white")
        return Image.alpha_composite(white, opaque).convert("RGB")
    return image if mode in {"L", "RGB"} else image.convert("L" if mode == "1" else "RGB")


def as_array(image: Pixels | Tensor) -> Pixels:
    """The values of a tensor; arrays as they are."""
    if not isinstance(image, Tensor):
        return image
    values = image.detach().cpu()
    # numpy has no bfloat16.
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def array_pixels(values: Pixels, channels: int) -> Pixels:
    """An array (height, width) or (height, width, channels) as values from 0 to 255, by its dtype.

    Bytes stay bytes and bool becomes 0 and 255; uint16 and other integers from 0 to 65535 are 16-bit values; floats lie
    between 0 and 1.
    """
    possible = {1, 3} if channels == 1 else {1, channels}
    if values.ndim not in {2, 3} or 0 in values.shape or (values.ndim == 3 and values.shape[2] not in possible):
        numbers = " or ".join(str(number) for number in sorted(possible))
        raise BrokenImageError(
            f"shape {tuple(values.shape)}: expected an array (height, width) or (height, width, channels), or a tensor "
            f"(height, width) or (channels, height, width), of {numbers} channel{'s' * (possible != {1})}"
        )
    if np.issubdtype(values.dtype, np.floating) and (values.min() < -_ROUNDING or values.max() > 1 + _ROUNDING):
        raise BrokenImageError(
            f"{values.dtype} values from {values.min():.3g} to {values.max():.3g}: floats must lie between 0 and 1; "
            "give bytes as uint8, or divide by the largest value that there can be"
        )
    return full_scale(values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values)


def full_scale(values: Pixels) -> Pixels:
    """Bytes, or floats from 0 to 255: floats count as fractions of full scale, integers as 16-bit where they fit."""
    if values.dtype == np.uint8:
        return values
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * 255
    if values.dtype == np.int8 or values.dtype.kind not in "iuf":
        raise BrokenImageError(f"{values.dtype} has no known full scale: give uint8, uint16, bool, or floats in 0 to 1")
    if np.issubdtype(values.dtype, np.floating):
        if not np.isfinite(values).all():
            raise BrokenImageError("values that are no finite numbers (no-data areas must hold a number)")
        return values.astype(np.float32) * 255
    if values.dtype != np.uint16 and (values.min() < 0 or values.max() > 65535):
        raise BrokenImageError("integers outside of 0 to 65535 have no known full scale: store 16-bit values or floats")
    return values.astype(np.float32) / 257


def _low_bytes(image: Image.Image, source: EncodedSource) -> Image.Image | None:
    """The low bytes of a PNG with opaque colors of 16 bits, as an image that is decoded when it is asked for."""
    tile = image.tile[0] if isinstance(image, PngImagePlugin.PngImageFile) and len(image.tile) == 1 else None
    if tile is None or tile.args != "RGB;16B" or _has_transparency(image):
        return None
    low = open_image(source, ("PNG",))
    assert isinstance(low, PngImagePlugin.PngImageFile)
    # Pillow keeps the first byte of each two of this kind, the second of that one.
    low.tile = [tile._replace(args="RGB;16L")]
    return low


def _read_file(path: Path) -> Path | bytes:
    """The bytes of an image file, opened once; of a TIFF its path, since a part of it may be enough."""
    with open_regular(path) as file:
        if is_tiff(file.peek(4)):
            return path
        return file.read(regular_size(os.fstat(file.fileno()), MAX_IMAGE_BYTES))


def _has_transparency(image: Image.Image) -> bool:
    return "A" in image.mode or "a" in image.mode or "transparency" in image.info


def error_reason(error: Exception) -> str:
    """One line on why an image cannot be read, without the path that the system adds."""
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
