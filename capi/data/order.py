"""The order of a run's images: which image stands at position t of an endless row.

Everything is computed from (seed, position), nothing is stored and nothing depends on workers or processes, so the
place in the data is one integer and every image comes exactly once in each pass.

- `Shuffle`: all images of a pass are shuffled together. Right for files that are found one by one.
- `WindowShuffle`: images that lie in blocks (shards, row groups). In each pass the blocks are shuffled, some
  consecutive ones make a window, and the images of a window are shuffled together, so that reads stay close together.
- `Interleaved`: several sources, each with an order and passes of its own, in given proportions.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from capi.data.sources import ImageSource
from capi.errors import CapiError
from capi.runtime.randomness import Stream, permuted, source_seed
from capi.types import Float, Int

Integers = npt.NDArray[np.int64]
# Products of two such numbers fit an integer of 64 bits.
LARGEST_TOTAL = 3_000_000_000
# What weights are rounded to: shares of this many.
WEIGHT_UNITS = 2**30
# The layout of a pass is some megabytes for a million blocks; a batch may lie across the border of two passes.
_KEPT_LAYOUTS = 3


@runtime_checkable
class Blocked(Protocol):
    """A source whose images lie together in blocks, which are cheaper to read one after the other."""

    @property
    def block_ends(self) -> Integers:
        """The number of the image after the last one of each block."""
        ...

    @property
    def usual_window(self) -> int:
        """How many images should be shuffled together, where nobody says otherwise."""
        ...


@runtime_checkable
class Order(Protocol):
    """Which image stands where."""

    def images(self, positions: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """The numbers of the images at these positions."""
        ...

    def instead(self, positions: Int[Tensor, " b"], draws: Float[Tensor, "b r"]) -> Int[Tensor, "b r"]:
        """Images that may take the place of one that cannot be read, chosen by numbers from 0 to 1."""
        ...


@runtime_checkable
class Mixed(Protocol):
    """A source made of several, numbered one after the other. Without weights each counts by its size."""

    parts: Sequence[ImageSource]
    weights: Sequence[float] | None


def order_of(source: ImageSource, seed: int, window: int | None = None) -> Order:
    """The order of a source's images; `window` is how many of those that lie in blocks are shuffled together."""
    if isinstance(source, Mixed):
        orders = [order_of(part, source_seed(seed, number), window) for number, part in enumerate(source.parts)]
        return Interleaved(orders, [len(part) for part in source.parts], source.weights)
    if isinstance(source, Blocked):
        return WindowShuffle(source.block_ends, seed, source.usual_window if window is None else window)
    return Shuffle(len(source), seed)


class Shuffle:
    """Every image once a pass, in an order of its own each time around."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def images(self, positions: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        return permuted(positions % self.size, self.size, self.seed, positions // self.size)

    def instead(self, positions: Int[Tensor, " b"], draws: Float[Tensor, "b r"]) -> Int[Tensor, "b r"]:
        del positions
        return (draws * self.size).long()


class _Layout(NamedTuple):
    """How the blocks lie in one pass: their shuffled numbers, and where each of them and each window ends."""

    blocks: Integers
    block_ends: Integers
    window_ends: Integers


class WindowShuffle:
    """Blocks in an order of their own each pass; the images of a window of blocks shuffled together."""

    def __init__(self, block_ends: Integers, seed: int, window: int) -> None:
        self.starts = np.concatenate([[0], block_ends[:-1]]).astype(np.int64)
        self.counts = block_ends - self.starts
        self.size, self.seed = int(block_ends[-1]), seed
        blocks = len(block_ends)
        at_once = min(max(-(-window * blocks // self.size), 1), blocks)
        # Spread evenly, so that the last window is not a poor remainder.
        windows = blocks // at_once
        self.window_blocks = np.arange(windows + 1, dtype=np.int64) * blocks // windows
        self._layouts: dict[int, _Layout] = {}

    def images(self, positions: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        result = np.empty(len(positions), dtype=np.int64)
        place = positions.numpy()
        passes, within = place // self.size, place % self.size
        for number in np.unique(passes):
            layout, chosen = self._layout(int(number)), np.flatnonzero(passes == number)
            windows = np.searchsorted(layout.window_ends, within[chosen], side="right")
            for window in np.unique(windows):
                rows = chosen[windows == window]
                result[rows] = self._within(layout, int(number), int(window), within[rows])
        return torch.from_numpy(result)

    def instead(self, positions: Int[Tensor, " b"], draws: Float[Tensor, "b r"]) -> Int[Tensor, "b r"]:
        """Other images of the same window, whose blocks are likely cached."""
        result = np.empty(tuple(draws.shape), dtype=np.int64)
        for row, position in enumerate(positions.tolist()):
            number, within = divmod(position, self.size)
            layout = self._layout(number)
            first, end = self._bounds(layout, int(np.searchsorted(layout.window_ends, within, side="right")))
            result[row] = self._numbers(layout, first + (draws[row].numpy() * (end - first)).astype(np.int64))
        return torch.from_numpy(result)

    def _within(self, layout: _Layout, number: int, window: int, positions: Integers) -> Integers:
        first, end = self._bounds(layout, window)
        # Each window of each pass has a shuffle of its own.
        epoch = torch.full((len(positions),), number * len(layout.window_ends) + window)
        moved = permuted(torch.from_numpy(positions - first), end - first, self.seed, epoch, stream=Stream.WINDOW)
        return self._numbers(layout, first + moved.numpy())

    def _numbers(self, layout: _Layout, places: Integers) -> Integers:
        """The numbers of the images at places within the row of shuffled blocks.

        Number = start of the block among all images + place - where the block begins in the row.
        """
        slots = np.searchsorted(layout.block_ends, places, side="right")
        blocks = layout.blocks[slots]
        return self.starts[blocks] + places - (layout.block_ends[slots] - self.counts[blocks])

    def _bounds(self, layout: _Layout, window: int) -> tuple[int, int]:
        first = int(layout.window_ends[window - 1]) if window else 0
        return first, int(layout.window_ends[window])

    def _layout(self, number: int) -> _Layout:
        if number not in self._layouts:
            while len(self._layouts) >= _KEPT_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            count = len(self.counts)
            slots, epoch = torch.arange(count), torch.full((count,), number)
            blocks = permuted(slots, count, self.seed, epoch, stream=Stream.BLOCKS).numpy()
            ends = np.cumsum(self.counts[blocks])
            self._layouts[number] = _Layout(blocks, ends, ends[self.window_blocks[1:] - 1])
        return self._layouts[number]


class Interleaved:
    """Several orders in fixed proportions, as evenly as whole numbers allow; each has passes of its own.

    Of every `total` positions in a row, which may be all images, a source of `units` gets exactly so many. The first
    source takes the positions where floor(t units / total) rises, the next one does so among those that are left, and
    so on; each thus meets its own positions in order, and one after the other.
    """

    def __init__(self, orders: Sequence[Order], sizes: Sequence[int], weights: Sequence[float] | None) -> None:
        self.orders = list(orders)
        self.starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self.units = (
            list(sizes)
            if weights is None
            else [max(round(weight / sum(weights) * WEIGHT_UNITS), 1) for weight in weights]
        )
        if sum(self.units) > LARGEST_TOTAL:
            raise CapiError(f"{sum(self.units)} images in several sources are too many to mix by size: give weights")

    def sources(self, positions: Integers) -> tuple[Integers, Integers]:
        """The source of each position, and the position within it."""
        chosen, own = np.full(len(positions), len(self.orders) - 1), positions.copy()
        rows, left, total = np.arange(len(positions)), positions, sum(self.units)
        for number, units in enumerate(self.units[:-1]):
            before, after = (_share(place, units, total) for place in (left, left + 1))
            taken = after > before
            chosen[rows[taken]], own[rows[taken]] = number, before[taken]
            rows, left, total = rows[~taken], (left - before)[~taken], total - units
        own[rows] = left
        return chosen, own

    def images(self, positions: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        chosen, own = self.sources(positions.numpy())
        result = np.empty(len(own), dtype=np.int64)
        for number in np.unique(chosen):
            rows = chosen == number
            result[rows] = self.orders[number].images(torch.from_numpy(own[rows])).numpy() + self.starts[number]
        return torch.from_numpy(result)

    def instead(self, positions: Int[Tensor, " b"], draws: Float[Tensor, "b r"]) -> Int[Tensor, "b r"]:
        """Other images of the same source, which keeps the proportions."""
        chosen, own = self.sources(positions.numpy())
        result = np.empty(tuple(draws.shape), dtype=np.int64)
        for number in np.unique(chosen):
            rows = chosen == number
            others = self.orders[number].instead(torch.from_numpy(own[rows]), draws[torch.from_numpy(rows)])
            result[rows] = others.numpy() + self.starts[number]
        return torch.from_numpy(result)


def _share(positions: Integers, units: int, total: int) -> Integers:
    """floor(p u / t) of positions p, units u and total t, without numbers beyond 64 bits."""
    # With p = a t + b it is a u + floor(b u / t), where b u < t u.
    return positions // total * units + positions % total * units // total
