"""Crops of a source's images, with a cache of decoded images that is filled as long as there is room.

It holds the image at the factor it was decoded with, so a crop is the same from the cache and from the file. Nothing is
ever evicted: a data set is passed through in turns, where the oldest image is the one that comes next. Images that
cannot be read are counted: each is named once, and too many stop the run.
"""

import logging
from pathlib import Path

from PIL import Image

from capi.data.decoding import (
    Box,
    BrokenImageError,
    Decoded,
    Decoder,
    ImageShape,
    OpenedImage,
    Pixels,
    crop_decoded,
    error_reason,
)
from capi.data.sources import ImageSource
from capi.errors import CapiError, counted
from capi.runtime.image_files import read_image
from capi.runtime.retry import retry

_LOG = logging.getLogger("capi")


class ImageReader:
    """Sizes and crops of images by number. `cache_bytes` bounds the decoded images in the cache."""

    def __init__(self, source: ImageSource, decoder: Decoder, cache_bytes: int = 0) -> None:
        self.source, self.decoder, self.cache_bytes = source, decoder, cache_bytes
        self.used = 0
        self._shapes: dict[int, ImageShape] = {}
        self._cache: dict[tuple[int, int], Decoded] = {}
        self._opened: tuple[int, OpenedImage] | None = None

    def size(self, index: int) -> tuple[int, int]:
        """Height and width as the image is seen."""
        shape = self._shape(index)
        return shape.height, shape.width

    def crop(self, index: int, box: Box, size: tuple[int, int]) -> Pixels:
        """A crop resized to (height, width), as (channels, height, width)."""
        shape = self._shape(index)
        if shape.in_parts:
            return self._open(index).crop(box, size)
        factor = shape.factor(box, size)
        decoded = self._decoded(index, factor, shape)
        return crop_decoded(decoded, factor, box, size, self.decoder)

    def _shape(self, index: int) -> ImageShape:
        return self._shapes.get(index) or self._open(index).shape

    def _decoded(self, index: int, factor: int, shape: ImageShape) -> Decoded:
        cached = self._cache.get((index, factor))
        if cached is not None:
            return cached
        decoded = self._open(index).load(factor)
        # A decoded picture stays at its factor; for another one the file is opened again.
        self._opened = None
        needed = _bytes_of(decoded)
        if self.used + needed <= self.cache_bytes:
            self.used += needed
            self._shapes[index], self._cache[index, factor] = shape, decoded
        return decoded

    def _open(self, index: int) -> OpenedImage:
        """The image's header, read once for its size and its crop."""
        if self._opened is None or self._opened[0] != index:
            try:
                content = retry(lambda: self.source.read(index))
            except OSError as error:
                raise BrokenImageError(error_reason(error)) from error
            self._opened = index, self.decoder.open(content)
        return self._opened[1]


def read_bytes(source: ImageSource, index: int) -> bytes:
    """The bytes of an image's file, wherever it lies."""

    def read() -> bytes:
        content = source.read(index)
        return read_image(content) if isinstance(content, Path) else content

    return retry(read)


def _bytes_of(decoded: Decoded) -> int:
    if not isinstance(decoded, Image.Image):
        return decoded.nbytes
    # Pillow keeps three bytes of colour in four.
    return decoded.width * decoded.height * (1 if decoded.mode == "L" else 4)


class BrokenImages:
    """The broken images of a run; at most `limit` of all its images may be."""

    def __init__(self, total: int, limit: float, reasons: dict[str, str] | None = None) -> None:
        self.total, self.limit = total, limit
        self.reasons = dict(reasons or {})

    def note(self, broken: dict[str, str]) -> None:
        """Remember what is new, and stop the run when the limit is passed."""
        for name, reason in broken.items():
            if name not in self.reasons:
                self.reasons[name] = reason
                _LOG.warning("%s is left out: %s", name, reason)
        if len(self.reasons) > self.limit * self.total:
            raise CapiError(
                f"{len(self.reasons)} of {counted(self.total, 'image')} cannot be read, more than data.broken_limit = "
                f"{self.limit:g} allows; {self.examples()}: repair them, or raise the limit"
            )

    def examples(self, most: int = 3) -> str:
        some = [f"{name} ({reason})" for name, reason in list(self.reasons.items())[:most]]
        return f"for example {', '.join(some)}" if some else ""
