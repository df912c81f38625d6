"""Images as evaluation reads them: decoded in full, framed by rule, in an order of their own; nothing is left out.

Classification keeps the middle of an image (resize the short side, cut a square), segmentation squeezes the whole of
it. Probes may be trained on random crops instead; those follow from (seed, step, sample) alone. A file that cannot be
read is an error: scores must cover every image.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from capi.data.crops import Frame, crop_draws, flips, random_box
from capi.data.decoding import Box, BrokenImageError, ChannelsError, Decoder, Pixels
from capi.data.loader import made_ahead
from capi.data.reader import ImageReader
from capi.data.sources import ImageSource
from capi.errors import CapiError
from capi.evals.tasks import MaskSource, place_of, place_of_mask
from capi.runtime.randomness import permuted, sample_keys
from capi.types import Int

# What RandomResizedCrop draws from by default.
CROP_SCALE, CROP_ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)


class ReadBatch(NamedTuple):
    """Pixels from 0 to 255, which images of the set they are, and their masks where there are any."""

    numbers: Int[Tensor, " b"]
    images: Tensor
    masks: Tensor | None = None
    # As text, since an exception that crosses processes arrives as a traceback.
    failure: str | None = None


@dataclass(frozen=True)
class StillBatches(Dataset[ReadBatch]):
    """Item i is the i-th batch of the images asked for, always framed alike."""

    source: ImageSource
    frame: Frame
    numbers: Int[Tensor, " s"]
    batch_size: int
    masks: MaskSource | None = None

    def __len__(self) -> int:
        return math.ceil(len(self.numbers) / self.batch_size)

    def __getitem__(self, item: int) -> ReadBatch:
        numbers = self.numbers[item * self.batch_size : (item + 1) * self.batch_size]
        # Masks are drawn on the pixels as they are stored, and have no EXIF tag of their own.
        decoder = Decoder(channels=self.frame.channels, turned=self.masks is None)
        reader = ImageReader(self.source, decoder)
        return _batch(numbers, (self._read(reader, number) for number in numbers.tolist()))

    def _read(self, reader: ImageReader, number: int) -> tuple[Pixels, Pixels | None]:
        size = image_size(reader, number)
        pixels = image_crop(reader, number, self.frame.box(size), self.frame.size)
        return pixels, None if self.masks is None else self._mask(self.masks, number, size)

    def _mask(self, masks: MaskSource, number: int, image_size: tuple[int, int]) -> Pixels:
        """Labels in the frame of the image, each the nearest one of the mask."""
        labels = masks.read(number)
        if labels.shape != image_size:
            mask, image = place_of_mask(masks, number), place_of(self.source, number)
            raise CapiError(
                f"the mask {mask} has {labels.shape[1]} x {labels.shape[0]} pixels, but its image {image} has "
                f"{image_size[1]} x {image_size[0]}: they must be of one size"
            )
        whole = Image.fromarray(np.ascontiguousarray(labels, dtype=np.int32))
        height, width = self.frame.size
        resized = whole.resize((width, height), Image.Resampling.NEAREST, box=self.frame.box(image_size))
        return np.asarray(resized)


@dataclass(frozen=True)
class AugmentedBatches(Dataset[ReadBatch]):
    """Item i is the batch of step i: random crops of shuffled images, half of them mirrored.

    With a `piece_size` items are pieces of batches, `pieces` of them a step: together they are the same images.
    """

    source: ImageSource
    frame: Frame
    numbers: Int[Tensor, " s"]
    batch_size: int
    seed: int
    piece_size: int | None = None

    @property
    def pieces(self) -> int:
        return math.ceil(self.batch_size / (self.piece_size or self.batch_size))

    def __getitem__(self, item: int) -> ReadBatch:
        step, piece = divmod(item, self.pieces)
        samples = torch.arange(self.batch_size).split(self.piece_size or self.batch_size)[piece]
        numbers = self.numbers[shuffled(step, self.batch_size, len(self.numbers), self.seed)[samples]]
        keys = sample_keys(self.seed, step, samples)
        reader = ImageReader(self.source, Decoder(channels=self.frame.channels, crop_first=True))
        rows = zip(numbers.tolist(), crop_draws(keys), flips(keys), strict=True)
        return _batch(numbers, ((self._read(reader, *row), None) for row in rows))

    def _read(self, reader: ImageReader, number: int, draws: Sequence[float], mirrored: bool) -> Pixels:
        box = random_box(image_size(reader, number), draws, CROP_SCALE, CROP_ASPECT)
        pixels = image_crop(reader, number, box, self.frame.size)
        return np.ascontiguousarray(pixels[:, :, ::-1]) if mirrored else pixels


def shuffled(step: int, batch_size: int, count: int, seed: int) -> Int[Tensor, " b"]:
    """Which of `count` samples a step sees: each once, in another order every time around."""
    position = step * batch_size + torch.arange(batch_size)
    return permuted(position % count, count, seed, position // count)


def read_in_order(batches: Dataset[ReadBatch], numbers: range, *, workers: int = 0) -> Iterator[ReadBatch]:
    """These batches, in order; a file that cannot be used ends it with an error that names it."""
    for batch in made_ahead(batches, numbers, workers=workers):
        if batch.failure:
            raise CapiError(batch.failure)
        yield batch


def _batch(numbers: Tensor, pairs: Iterable[tuple[Pixels, Pixels | None]]) -> ReadBatch:
    try:
        read = list(pairs)
    except (CapiError, MemoryError) as error:
        return ReadBatch(numbers, torch.empty(0), failure=str(error) or "out of memory")
    images = torch.from_numpy(np.stack([pixels for pixels, _ in read]))
    masks = [mask for _, mask in read if mask is not None]
    return ReadBatch(numbers, images, torch.from_numpy(np.stack(masks)) if masks else None)


def image_size(reader: ImageReader, number: int) -> tuple[int, int]:
    """Height and width of an image; one that cannot be read is an error that names it."""
    try:
        return reader.size(number)
    except BrokenImageError as error:
        raise _unreadable(reader, number, error) from error


def image_crop(reader: ImageReader, number: int, box: Box, size: tuple[int, int]) -> Pixels:
    """A crop resized to (height, width); an image that cannot be read is an error that names it."""
    try:
        return reader.crop(number, box, size)
    except BrokenImageError as error:
        raise _unreadable(reader, number, error) from error


def _unreadable(reader: ImageReader, number: int, error: BrokenImageError) -> CapiError:
    place = place_of(reader.source, number)
    if isinstance(place, Path) and not place.exists():
        return CapiError(f"there is no file {place}: put it there, or take it out of the data set")
    if isinstance(error, ChannelsError):
        wanted = reader.decoder.channels
        return CapiError(
            f"{place} has {error.channels} channels, and the model reads {wanted}: take a model that was trained on "
            f"{error.channels} (raw patches: pixels:16x{error.channels}), or write the {wanted} that it is to see "
            "to a file of their own"
        )
    return CapiError(f"{place} cannot be read ({error}): repair it or take it out")
