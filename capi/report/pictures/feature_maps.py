"""Feature maps of images as pictures need them: at any resolution, in the image's own aspect, one after the other.

Every image is resized to the resolution that is asked for, also one of a single pixel. An image that cannot be read is
remembered with the reason, and the others continue.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from capi.data.crops import center_box, image_size_of
from capi.data.decoding import Box, BrokenImageError, Decoder
from capi.data.loader import made_ahead
from capi.data.reader import ImageReader
from capi.data.sources import ImageSource
from capi.errors import CapiError
from capi.evals.features import Encoding, encode
from capi.types import Float, VisionEncoder, statistics_of

# An image that is longer than this many times its short side is shown by its middle.
LONGEST_ASPECT = 4.0
# Feature maps that are kept from the pass that fits to the pass that draws.
MAP_CACHE_BYTES = 2**28
# A batch holds no more pixels than `batch_size` images of this side.
_USUAL_SIDE = 224
# Patches along the longer side that a picture needs to show shapes.
_PATCHES = 24


def picture_size(size: tuple[int, int], patch_size: int) -> tuple[int, int]:
    """The size of training, enlarged by a whole factor where it has few patches."""
    factor = max(_PATCHES // max(max(size) // patch_size, 1), 1)
    return size[0] * factor, size[1] * factor


def picture_side(encoder: VisionEncoder) -> int:
    """The short side of pictures where nobody asks for another; an encoder that was not trained here gets no more than
    the paper's size, since nothing says how large images it takes.
    """
    size = image_size_of(encoder)
    has_own = getattr(encoder, "image_size", None) is not None
    return min(picture_size(size, encoder.patch_size) if has_own else size)


@dataclass(frozen=True)
class PictureFrame:
    """What of an image is seen: the largest square in its middle, or all of it in its own aspect. Never squeezed."""

    resolution: int
    patch_size: int
    whole: bool = False
    shown: int | None = None
    """The short side of the picture, where that is for people instead of the encoder."""

    @property
    def side(self) -> int:
        """The multiple of the patch size that is nearest to the resolution."""
        return self._fitted(float(self.resolution))

    def size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Height and width that an image of this size gets."""
        height, width = self._grid_size(image_size)
        scale = 1.0 if self.shown is None else self.shown / self.side
        return max(round(height * scale), 1), max(round(width * scale), 1)

    def box(self, image_size: tuple[int, int]) -> Box:
        """The part of the image that fills this size; patches may leave out a strip at the edges."""
        return center_box(image_size, self._grid_size(image_size), share=1.0)

    def _grid_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        if not self.whole:
            return self.side, self.side
        height, width = image_size
        aspect = min(max(height, width) / min(height, width), LONGEST_ASPECT)
        long = max(self._fitted(aspect * self.resolution), self.side)
        return (long, self.side) if height > width else (self.side, long)

    def _fitted(self, length: float) -> int:
        return max(math.floor(length / self.patch_size + 0.5), 1) * self.patch_size


class SizedImage(NamedTuple):
    """Pixels from 0 to 255 of one image at a size of its own, or why there are none."""

    number: int
    pixels: Tensor
    failure: str | None = None


@dataclass(frozen=True)
class SizedImages(Dataset[SizedImage]):
    """Item i is the i-th image of a source, framed."""

    source: ImageSource
    frame: PictureFrame
    channels: int = 3

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> SizedImage:
        reader = ImageReader(self.source, Decoder(channels=self.channels))
        try:
            size = reader.size(number)
            pixels = reader.crop(number, self.frame.box(size), self.frame.size(size))
        except (BrokenImageError, CapiError, MemoryError) as error:
            return SizedImage(number, torch.empty(0), str(error) or "out of memory")
        return SizedImage(number, torch.from_numpy(pixels.copy()))


class NumberedMap(NamedTuple):
    """The feature map of one image of a source."""

    number: int
    feature_map: Float[Tensor, "rows columns d"]


@dataclass
class FeatureMaps:
    """The feature maps of a source's images by one encoder, in order, as often as they are asked for.

    The first ones are kept as long as there is room; the others are computed each time.
    """

    encoder: VisionEncoder
    source: ImageSource
    frame: PictureFrame
    encoding: Encoding
    what: str = "images"
    kept_bytes: int = MAP_CACHE_BYTES
    failed: dict[str, str] = field(default_factory=dict)
    _cached: list[NumberedMap] = field(default_factory=list, init=False)
    _room: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._room = self.kept_bytes

    def __iter__(self) -> Iterator[NumberedMap]:
        yield from self._cached
        first = self._cached[-1].number + 1 if self._cached else 0
        for numbered in self._encoded(first):
            self._keep(numbered)
            yield numbered

    def _keep(self, numbered: NumberedMap) -> None:
        """What is kept is a beginning without gaps: once there is no room, nothing more is."""
        self._room -= numbered.feature_map.nbytes
        if self._room >= 0:
            self._cached.append(numbered)
        else:
            self._room = -1

    def _encoded(self, first: int) -> Iterator[NumberedMap]:
        for group in self._groups(first):
            pixels = torch.stack([image.pixels for image in group])
            maps = encode(self.encoder, pixels, self.encoding).feature_map.cpu()
            # A view would keep the whole batch in memory.
            yield from (NumberedMap(image.number, part.clone()) for image, part in zip(group, maps, strict=True))
            self.encoding.progress(self.what, group[-1].number + 1, len(self.source))

    def _groups(self, first: int) -> Iterator[list[SizedImage]]:
        """Neighbors of one size, as many as make a batch."""
        group: list[SizedImage] = []
        for image in self._readable(first):
            if group:
                pixels = group[0].pixels
                size = self.encoding.batch_size
                # Fewer images where they are large, which bounds the memory.
                most = min(max(size * _USUAL_SIDE**2 // (pixels.shape[1] * pixels.shape[2]), 1), size)
                if len(group) >= most or (image.pixels.shape, image.pixels.dtype) != (pixels.shape, pixels.dtype):
                    yield group
                    group = []
            group.append(image)
        if group:
            yield group

    def _readable(self, first: int) -> Iterator[SizedImage]:
        images = SizedImages(self.source, self.frame, len(statistics_of(self.encoder).mean))
        for image in made_ahead(images, range(first, len(images)), workers=self.encoding.workers):
            if image.failure is None:
                yield image
            else:
                self.failed[self.source.name(image.number)] = image.failure


def none_readable(failed: Mapping[str, str]) -> CapiError:
    """The error where no image can be read; `failed` has the reasons by name."""
    name, reason = next(iter(failed.items()), ("none", "there are none"))
    return CapiError(f"none of the images can be read, for example {name} ({reason}): give others")


def photos(
    source: ImageSource, frame: PictureFrame, encoder: VisionEncoder, *, side: int, workers: int, failed: dict[str, str]
) -> Iterator[tuple[int, Tensor]]:
    """What the encoder is shown of each image, finer, and in colour also where the encoder sees grey."""
    channels = len(statistics_of(encoder).mean)
    images = SizedImages(source, replace(frame, shown=side), 3 if channels == 1 else channels)
    for image in made_ahead(images, range(len(images)), workers=workers):
        if image.failure is None:
            yield image.number, image.pixels
        else:
            failed[source.name(image.number)] = image.failure
