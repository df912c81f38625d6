"""Batches by number: any step can be asked for, by any worker, and is always the same.

Which images a step sees follows from an order that is computed, not stored; their crops, flips and masks follow from
the sample's key. So neither the number of workers nor a restart changes anything, and the position in the data is one
integer. An image that cannot be read is replaced by another, drawn from the same key.
"""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from capi.data.crops import color_changes, crop_draws, flips, random_box
from capi.data.decoding import BrokenImageError, Pixels
from capi.data.order import order_of
from capi.data.reader import ImageReader
from capi.errors import CapiError
from capi.runtime.randomness import Stream, sample_keys, uniforms
from capi.types import Int

# Images that are tried in place of a broken one, before the data set is given up.
REPLACEMENTS = 20
PREFETCHED = 2
MaskDraw = Callable[[Tensor], tuple[Tensor, Tensor]]
Item = TypeVar("Item")


class LoadedBatch(NamedTuple):
    """Pixels from 0 to 255 with their masks, and the images that could not be read, with the reason."""

    images: Tensor
    visible_index: Int[Tensor, "b v"]
    predict_index: Int[Tensor, "b p"]
    broken: dict[str, str]
    # Why no batch could be made, where that is so.
    failure: str | None = None
    # How colors change for the student, where they do.
    colors: Tensor | None = None


@dataclass(frozen=True)
class Cropping:
    """How training images are cut."""

    size: tuple[int, int]
    scale: tuple[float, float] = (0.6, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    color_jitter: float = 0.0


@dataclass(frozen=True)
class BatchShare:
    """The part of each global batch that one process makes, in so many micro-batches."""

    batch_size: int
    micro_batches: int = 1
    process: int = 0
    processes: int = 1

    @property
    def micro_size(self) -> int:
        return self.batch_size // (self.micro_batches * self.processes)

    def samples(self, micro_batch: int) -> Int[Tensor, " b"]:
        """Numbers within the global batch."""
        first = (micro_batch * self.processes + self.process) * self.micro_size
        return torch.arange(first, first + self.micro_size)


class TrainingBatches(Dataset[LoadedBatch]):
    """Item i is micro-batch i % micro_batches of step i // micro_batches."""

    def __init__(
        self,
        reader: ImageReader,
        *,
        cropping: Cropping,
        share: BatchShare,
        masks: MaskDraw,
        seed: int,
        window: int | None = None,
    ) -> None:
        self.reader, self.cropping, self.share, self.masks, self.seed = reader, cropping, share, masks, seed
        self.order = order_of(reader.source, seed, window)

    def __getitem__(self, item: int) -> LoadedBatch:
        step, micro_batch = divmod(item, self.share.micro_batches)
        samples = self.share.samples(micro_batch)
        keys = sample_keys(self.seed, step, samples)
        visible, predict = self.masks(keys)
        broken: dict[str, str] = {}
        try:
            images = self._images(step, samples, keys, broken)
        except (BrokenImageError, CapiError, MemoryError) as error:
            # As text, since an exception that crosses processes arrives as a traceback.
            return LoadedBatch(torch.empty(0), visible, predict, broken, failure=str(error) or "out of memory")
        jitter = self.cropping.color_jitter
        colors = color_changes(keys, jitter, images.shape[1]) if jitter else None
        return LoadedBatch(images, visible, predict, broken, colors=colors)

    def _images(self, step: int, samples: Tensor, keys: Tensor, broken: dict[str, str]) -> Tensor:
        positions = step * self.share.batch_size + samples
        candidates = map(self._candidates, self.order.images(positions).tolist(), positions, keys)
        rows = zip(candidates, crop_draws(keys), flips(keys), strict=True)
        images = np.stack([self._image(numbers, draws, flip, broken) for numbers, draws, flip in rows])
        return torch.from_numpy(images)

    def _candidates(self, number: int, position: Int[Tensor, ""], key: Int[Tensor, ""]) -> Iterator[int]:
        """The image at a position, and others that are drawn only when they are needed."""
        yield number
        draws = uniforms(key[None], Stream.REPLACEMENT, REPLACEMENTS)
        yield from self.order.instead(position[None], draws)[0].tolist()

    def _image(self, numbers: Iterator[int], draws: list[float], flip: bool, broken: dict[str, str]) -> Pixels:
        """The crop of the first of these images that can be read."""
        reason = ""
        for number in numbers:
            try:
                box = random_box(self.reader.size(number), draws, self.cropping.scale, self.cropping.aspect)
                pixels = self.reader.crop(number, box, self.cropping.size)
            except BrokenImageError as error:
                reason = f"{self.reader.source.name(number)}: {error}"
                broken[self.reader.source.name(number)] = str(error)
                continue
            return np.ascontiguousarray(pixels[:, :, ::-1] if flip and self.cropping.flip else pixels)
        raise BrokenImageError(
            f"none of {REPLACEMENTS + 1} images drawn one after the other could be read, the last was {reason}; `capi "
            "data check` says which can"
        )


def load_batches(
    batches: TrainingBatches, start: int, stop: int, *, workers: int, pin_memory: bool = False
) -> Iterator[list[LoadedBatch]]:
    """The micro-batches of each step from `start` on, made ahead by so many worker processes (0: none)."""
    micro = batches.share.micro_batches
    step: list[LoadedBatch] = []
    for loaded in made_ahead(batches, range(start * micro, stop * micro), workers=workers, pin_memory=pin_memory):
        step.append(loaded)
        if len(step) == micro:
            yield step
            step = []


def made_ahead(items: Dataset[Item], numbers: range, *, workers: int, pin_memory: bool = False) -> Iterator[Item]:
    """Items in order, made ahead by so many worker processes (0: none)."""
    options: dict[str, Any] = {"prefetch_factor": PREFETCHED, "worker_init_fn": _leave_signals} if workers else {}
    loader: DataLoader[Item] = DataLoader(
        items,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        collate_fn=_as_is,
        pin_memory=pin_memory,
        **options,
    )
    yield from loader


def _as_is(loaded: Any) -> Any:
    return loaded


def _leave_signals(_: int) -> None:
    """Signals may reach the whole process group; the main process ends its workers when it is ready."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)
