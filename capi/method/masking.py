"""Which patches are hidden from the student, and which of those it must predict (paper: masking strategy).

A mask is a function of a grid, a count and one random key per image, and hides exactly that count in every image. All
images of a batch are drawn at once. A new kind of mask is one function and one line in `MASKS`; arguments that it takes
beside these three are `masking.options`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capi.errors import CapiError, counted
from capi.runtime.plugins import check_options, look_up, register
from capi.runtime.randomness import Stream, uniforms
from capi.types import Bool, Float, Int

ASPECT_RANGE = (0.5, 2.0)
# Blocks of I-JEPA's targets: share of the grid, and height / width. So many are drawn, and as many used as are needed.
SEVERAL_SHARES, SEVERAL_ASPECTS, SEVERAL_DRAWN = (0.15, 0.2), (0.75, 1.5), 32
# Far more than the rounding of a block's sides, far less than a patch.
_ROUNDING = 1e-9


class PatchGrid(NamedTuple):
    """The patch grid of an image."""

    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns


class MaskIndex(NamedTuple):
    """Row-major patch indices, ascending within each image."""

    visible: Int[Tensor, "b v"]
    predict: Int[Tensor, "b p"]


def random_mask(grid: PatchGrid, count: int, keys: Int[Tensor, " b"]) -> Bool[Tensor, "b n"]:
    """`count` patches drawn uniformly."""
    return _lowest(uniforms(keys, Stream.MASK, grid.size), count)


def block_mask(grid: PatchGrid, count: int, keys: Int[Tensor, " b"]) -> Bool[Tensor, "b n"]:
    """One block of `count` patches: log-uniform aspect, uniform place, the excess cut at its lower right end."""
    block = rectangles(grid, block_boxes(grid, count, keys))
    return block & (block.cumsum(1) <= count)


def multi_block_mask(grid: PatchGrid, count: int, keys: Int[Tensor, " b"]) -> Bool[Tensor, "b n"]:
    """Blocks that may overlap, one after another until `count` patches are hidden, as BEiT does it.

    Their sizes and shapes are those of I-JEPA's target blocks. Of the last one, its upper left part is taken.
    """
    draws = uniforms(keys, Stream.MASK, 4 * SEVERAL_DRAWN).view(len(keys), SEVERAL_DRAWN, 4)
    share = SEVERAL_SHARES[0] + draws[..., 0] * (SEVERAL_SHARES[1] - SEVERAL_SHARES[0])
    low, high = torch.tensor(SEVERAL_ASPECTS, dtype=torch.float64).log()
    aspect, area = torch.exp(low + draws[..., 1] * (high - low)), share * grid.size
    height = (area * aspect).sqrt().round().long().clamp(1, grid.rows)
    width = (area / aspect).sqrt().round().long().clamp(1, grid.columns)
    top = (draws[..., 2] * (grid.rows - height + 1)).long()
    left = (draws[..., 3] * (grid.columns - width + 1)).long()
    covered = rectangles(grid, BlockBoxes(height.flatten(), width.flatten(), top.flatten(), left.flatten()))
    number = torch.arange(SEVERAL_DRAWN, dtype=torch.int8)[:, None]
    # The first block that covers a patch says when its turn comes; patches that none covers come last.
    turn = torch.where(covered.view(len(keys), SEVERAL_DRAWN, -1), number, SEVERAL_DRAWN).amin(1)
    return _lowest(turn.double() + torch.arange(grid.size, dtype=torch.float64) / grid.size, count)


def inverse_block_mask(grid: PatchGrid, count: int, keys: Int[Tensor, " b"]) -> Bool[Tensor, "b n"]:
    """Everything but a block of visible patches."""
    return ~block_mask(grid, grid.size - count, keys)


MASKS: dict[str, Callable[..., Tensor]] = {
    "random": random_mask,
    "block": block_mask,
    "inverse_block": inverse_block_mask,
    "multi_block": multi_block_mask,
}


def register_mask(name: str, mask: Callable[..., Tensor]) -> None:
    """Make a mask of your own known as `masking.kind=NAME` in this process."""
    register(MASKS, name, mask, "masking.kind")


class BlockBoxes(NamedTuple):
    """The rectangle of each image's block, in patches."""

    height: Int[Tensor, " b"]
    width: Int[Tensor, " b"]
    top: Int[Tensor, " b"]
    left: Int[Tensor, " b"]


def block_boxes(grid: PatchGrid, count: int, keys: Int[Tensor, " b"]) -> BlockBoxes:
    """Rectangles that hold at least `count` patches and fit the grid."""
    draw_aspect, draw_top, draw_left = uniforms(keys, Stream.MASK, 3).unbind(1)
    # height <= rows and width <= columns hold exactly for aspects in this interval, and it is never empty.
    fits = torch.tensor([count / grid.columns**2, grid.rows**2 / count], dtype=torch.float64).log()
    low, high = torch.tensor(ASPECT_RANGE, dtype=torch.float64).log().clamp(fits[0], fits[1])
    aspect = torch.exp(low + draw_aspect * (high - low))
    # At the ends of the interval sides are whole numbers, which rounding must not take for more.
    height = (count * aspect).sqrt().sub_(_ROUNDING).ceil().long()
    width = (count / aspect).sqrt().sub_(_ROUNDING).ceil().long()
    top = (draw_top * (grid.rows - height + 1)).long()
    left = (draw_left * (grid.columns - width + 1)).long()
    return BlockBoxes(height, width, top, left)


def rectangles(grid: PatchGrid, boxes: BlockBoxes) -> Bool[Tensor, "b n"]:
    """The patches of each rectangle."""
    height, width, top, left = boxes
    row, column = torch.arange(grid.rows), torch.arange(grid.columns)
    in_rows = (row >= top[:, None]) & (row < (top + height)[:, None])
    in_columns = (column >= left[:, None]) & (column < (left + width)[:, None])
    return (in_rows[:, :, None] & in_columns[:, None, :]).flatten(1)


def roll(grid: PatchGrid, mask: Bool[Tensor, "b n"], keys: Int[Tensor, " b"]) -> Bool[Tensor, "b n"]:
    """A uniform circular shift in both directions, so that every position is masked equally often."""
    size = torch.tensor(grid, dtype=torch.float64)
    shift = (uniforms(keys, Stream.ROLL, 2) * size).long()
    row = (torch.arange(grid.rows) - shift[:, :1]) % grid.rows
    column = (torch.arange(grid.columns) - shift[:, 1:]) % grid.columns
    source = row[:, :, None] * grid.columns + column[:, None, :]
    return mask.gather(1, source.flatten(1))


class MaskSampler:
    """Draws the mask of every image of a batch; the loader is given one and calls it in its workers."""

    def __init__(
        self, *, kind: str, ratio: float, roll: bool, predict: int | float, options: Mapping[str, Any] | None = None
    ) -> None:
        """`predict` is a count of patches (int) or a share of the masked ones (float)."""
        mask = look_up(MASKS, kind, "masking.kind")
        self.kind, self.options = kind, options or {}
        check_options(mask, self.options, "masking.options", given=("grid", "count", "keys"), name=kind)
        # The function itself, since spawned workers know only the package's own tables.
        self.draw: Callable[[PatchGrid, int, Tensor], Tensor] = partial(mask, **self.options)
        self.ratio = ratio
        self.roll = roll
        self.predict = predict

    def counts(self, grid: PatchGrid) -> tuple[int, int, int]:
        """How many patches are visible, masked and predicted: the same in every image of this grid."""
        masked = int(grid.size * self.ratio)
        if not 1 <= masked < grid.size:
            raise CapiError(
                f"a masking ratio of {self.ratio} hides {masked} of {counted(grid.size, 'patch')} "
                f"({grid.rows} x {grid.columns}), but at least one must be hidden and one visible: "
                "change masking.ratio, the image size or the patch size"
            )
        predicted = self.predict if isinstance(self.predict, int) else max(1, int(masked * self.predict))
        if not 1 <= predicted <= masked:
            raise CapiError(
                f"{predicted} patches to predict were asked for, but masking {grid.rows} x {grid.columns} patches at "
                f"{self.ratio} hides {masked}: set masking.predict between 1 and {masked}"
            )
        return grid.size - masked, masked, predicted

    def __call__(self, grid: PatchGrid, keys: Int[Tensor, " b"]) -> MaskIndex:
        visible, masked, predicted = self.counts(grid)
        mask = self.draw(grid, masked, keys)
        if self.roll:
            mask = roll(grid, mask, keys)
        # Visible patches score above every draw, so the lowest scores are masked ones in uniform order.
        scores = uniforms(keys, Stream.PREDICT, grid.size) + (~mask).double()
        return MaskIndex(
            visible=_positions(~mask, visible),
            predict=_positions(_lowest(scores, predicted), predicted),
        )


def _lowest(scores: Float[Tensor, "b n"], count: int) -> Bool[Tensor, "b n"]:
    chosen = scores.topk(count, dim=1, largest=False, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)


def _positions(selected: Bool[Tensor, "b n"], count: int) -> Int[Tensor, "b {count}"]:
    """The selected indices of each image, ascending; every image has `count` of them."""
    return selected.nonzero()[:, 1].view(-1, count)
