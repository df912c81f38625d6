"""How tokens know where they stand: rotary positions in every attention, or a learned table that is added once.

Positions are coordinates in [0, 1] x [0, 1], first row, then column, so that either kind reads any resolution.

Rotary (RoPE-2D as in EVA-02 and the paper) turns queries and keys, of patches and registers. Each attention head of
width w has w/4 frequencies; the angle of its channels is [a, a, c, c] with row angles a and column angles c. Two
variants differ only in which channels are paired.
"""

import math
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.types import Float

RopeVariant = Literal["axial", "released"]
# The head is seen as this many parts, each of two halves that are swapped.
_PARTS: dict[RopeVariant, int] = {"axial": 2, "released": 1}

HIGHEST_FREQUENCY = 7.0
FREQUENCY_RATIO = 10000.0


class RotaryTable(NamedTuple):
    """Cosines and signed sines for a sequence, computed once and used by every block.

    The sine carries the minus sign of the swap: rotated = x * cosine + swapped(x) * sine.
    """

    cosine: Float[Tensor, "s t 1 w"]
    sine: Float[Tensor, "s t 1 w"]
    parts: int

    def select(self, index: Tensor) -> "RotaryTable":
        """The tables of some images of the batch; a table shared by all images stays as it is."""
        if self.cosine.shape[0] == 1:
            return self
        return RotaryTable(self.cosine.index_select(0, index), self.sine.index_select(0, index), self.parts)


def frequencies(head_width: int, device: torch.device | str | None = None) -> Float[Tensor, " f"]:
    """Geometric from 7 down to 7e-4 cycles per image, in radians, always in float32: bf16 steps by 0.25 at 44 rad."""
    exponent = torch.linspace(0, 1, head_width // 4, device=device, dtype=torch.float32)
    return HIGHEST_FREQUENCY * FREQUENCY_RATIO**-exponent * 2 * math.pi


def rotary_table(coordinates: Float[Tensor, "s t 2"], head_width: int, variant: RopeVariant) -> RotaryTable:
    """The table of a sequence of positions; s is the batch, or 1 when all images share their positions."""
    # (s t 2 f) with f = w / 4: a for the row, c for the column. Cosines are [a, a, c, c] over the channels of a head.
    angles = coordinates.float()[..., None] * frequencies(head_width, coordinates.device)
    cosine = torch.cat([angles.cos()] * 2, dim=-1).flatten(-2)
    sine = angles.sin()
    # Signed sines: `axial` [-a, a, -c, c], which swaps within each half; `released` [-a, -a, c, c], which swaps the
    # halves.
    if variant == "axial":
        signed = torch.cat([-sine, sine], dim=-1)
    else:
        # Both quarters of the first half are negated: the halves [x1, x2] become [-x2, x1].
        signed = torch.stack([-sine[..., 0, :], sine[..., 1, :]], dim=-2).repeat(1, 1, 1, 2)
    return RotaryTable(cosine[:, :, None], signed.flatten(-2)[:, :, None], _PARTS[variant])


def rotate(x: Float[Tensor, "b t h w"], table: RotaryTable | None) -> Float[Tensor, "b t h w"]:
    """Apply the table to queries or keys; without one they stay as they are."""
    if table is None:
        return x
    cosine, sine = table.cosine.to(x.dtype), table.sine.to(x.dtype)
    if torch.compiler.is_exporting():
        # A graph for other runtimes has no writing in place, and they fuse what is written plainly.
        return x * cosine + _swapped(x, table.parts) * sine
    rotated: Tensor = _Rotate.apply(x, cosine, sine, table.parts)
    return rotated


class _Rotate(torch.autograd.Function):
    """x * cosine + swapped(x) * sine without materialising swapped(x), forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.parts = parts
        rotated = x * cosine
        _add_swapped_product(rotated, x, sine, parts)
        return rotated

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        # The swap is its own transpose, and it moves the factor along: swapped(gradient * sine).
        result = gradient * cosine
        _add_swapped_product(result, gradient, _swapped(sine, ctx.parts), ctx.parts)
        return result, None, None, None


def _halves(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    first, second = x.unflatten(-1, (parts, 2, -1)).unbind(-2)
    return first, second


def _swapped(x: Tensor, parts: int) -> Tensor:
    return x.unflatten(-1, (parts, 2, -1)).flip(-2).flatten(-3)


def _add_swapped_product(total: Tensor, x: Tensor, factor: Tensor, parts: int) -> None:
    """total += swapped(x) * factor, in place."""
    total_first, total_second = _halves(total, parts)
    x_first, x_second = _halves(x, parts)
    factor_first, factor_second = _halves(factor, parts)
    total_first.addcmul_(x_second, factor_first)
    total_second.addcmul_(x_first, factor_second)


def patch_coordinates(rows: int, columns: int, device: torch.device | str | None = None) -> Float[Tensor, "n 2"]:
    """Row-major coordinates of a patch grid, its corners at 0 and 1."""
    down, across = _from_zero_to_one(rows, device), _from_zero_to_one(columns, device)
    return torch.cartesian_prod(down, across).view(rows * columns, 2)


def _from_zero_to_one(count: int, device: torch.device | str | None) -> Float[Tensor, " n"]:
    if torch.compiler.is_exporting():
        # The count is a symbol then, and a translated linspace divides by zero where it turns out to be 1.
        index = torch.arange(count, device=device)
        return index / index[-1].clamp(min=1)
    return torch.linspace(0, 1, count, device=device, dtype=torch.float32)


def register_coordinates(visible: Float[Tensor, "s v 2"], count: int) -> Float[Tensor, "s {count} 2"]:
    """Registers spread evenly over the border of the visible patches' bounding box, per image.

    Register i stands i / count of the way around, in four sides of equal length; where count is a multiple of 4 each
    side holds count / 4 of them.
    """
    low, high = visible.amin(1, keepdim=True), visible.amax(1, keepdim=True)
    return low + _unit_border(count, visible.device) * (high - low)


def _unit_border(count: int, device: torch.device) -> Float[Tensor, "{count} 2"]:
    way = 4 * torch.arange(count, device=device)
    side, along = way // max(count, 1), (way % max(count, 1)).float() / max(count, 1)
    zero, ones = torch.zeros_like(along), torch.ones_like(along)
    row = torch.stack([along, ones, 1 - along, zero])
    column = torch.stack([zero, along, ones, 1 - along])
    return torch.stack([row, column], dim=-1)[side, torch.arange(count, device=device)]


GridSize = tuple[int, int]

INITIAL_TABLE_STD = 0.02


@runtime_checkable
class Positions(Protocol):
    """The contract: what a position adds to a token, and how it turns queries and keys."""

    kind: ClassVar[str]
    rotates: ClassVar[bool]
    """Whether attention turns queries and keys, and keeps tables for it."""
    has_table: ClassVar[bool]
    """Whether it has a vector for each patch of a native grid, which it is then built with."""
    in_released_layout: ClassVar[bool]
    """Whether the layout of the published weights has a place for it."""

    def __init__(self, *, width: int, head_width: int, grid: GridSize | None) -> None: ...

    @property
    def grid(self) -> GridSize | None:
        """The native grid; None where any grid is as good."""
        ...

    def place(self, tokens: Float[Tensor, "b t d"], coordinates: Float[Tensor, "s t 2"]) -> Float[Tensor, "b t d"]:
        """The patches or mask tokens at these coordinates, with what tells their place; s is b, or 1 for all alike."""
        ...

    def rotary(self, coordinates: Float[Tensor, "s t 2"]) -> RotaryTable | None:
        """How attention turns queries and keys of a whole sequence; None for not at all."""
        ...


class RotaryPositions:
    """Tokens stay as they are; attention turns them."""

    kind: ClassVar[str]
    rotates: ClassVar[bool] = True
    has_table: ClassVar[bool] = False
    in_released_layout: ClassVar[bool] = True
    grid: ClassVar[GridSize | None] = None
    variant: ClassVar[RopeVariant]

    def __init__(self, *, width: int, head_width: int, grid: GridSize | None) -> None:  # noqa: ARG002 - the contract
        self.head_width = head_width

    def place(self, tokens: Float[Tensor, "b t d"], coordinates: Float[Tensor, "s t 2"]) -> Float[Tensor, "b t d"]:  # noqa: ARG002 - the contract
        return tokens

    def rotary(self, coordinates: Float[Tensor, "s t 2"]) -> RotaryTable | None:
        return rotary_table(coordinates, self.head_width, self.variant)


class AxialPositions(RotaryPositions):
    """Rotary, swapping within each half of a head: every pair of channels shares one angle, so it is a rotation and q.k
    depends on the relative position alone. What the paper describes, and the default.
    """

    kind: ClassVar[str] = "axial"
    variant: ClassVar[RopeVariant] = "axial"


class ReleasedPositions(RotaryPositions):
    """Rotary, swapping the two halves of a head, which pairs a row angle with a column angle and is no rotation. The
    published weights were trained with it.
    """

    kind: ClassVar[str] = "released"
    variant: ClassVar[RopeVariant] = "released"


class LearnedPositions(nn.Module):
    """A vector for each patch of the native grid, added to the patch embeddings (ViT, ICLR 2021). The predictor's mask
    tokens have a table of their own, registers have none, and nothing is turned. Between the points of the table it is
    bicubic, corners on corners as for all coordinates here (ours).
    """

    kind: ClassVar[str] = "learned"
    rotates: ClassVar[bool] = False
    has_table: ClassVar[bool] = True
    in_released_layout: ClassVar[bool] = False

    def __init__(self, *, width: int, head_width: int, grid: GridSize | None) -> None:  # noqa: ARG002 - the contract
        super().__init__()
        assert grid is not None, "learned positions need the rows and columns of their table"
        self.table = nn.Parameter(torch.empty(*grid, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.table, std=INITIAL_TABLE_STD)

    @property
    def grid(self) -> GridSize:
        rows, columns, _ = self.table.shape
        return rows, columns

    def place(self, tokens: Float[Tensor, "b t d"], coordinates: Float[Tensor, "s t 2"]) -> Float[Tensor, "b t d"]:
        # Sampling wants coordinates from -1 to 1, the column first, and channels before rows.
        at = 2 * coordinates.flip(-1)[None] - 1
        # Coordinates are float32 also where the weights are not, and sampling wants both alike.
        table = self.table.float().permute(2, 0, 1)[None]
        sampled = F.grid_sample(table, at, mode="bicubic", padding_mode="border", align_corners=True)
        return tokens + sampled[0].permute(1, 2, 0).to(self.table.dtype)

    def rotary(self, coordinates: Float[Tensor, "s t 2"]) -> RotaryTable | None:  # noqa: ARG002 - the contract
        return None


POSITIONS: dict[str, type[Positions]] = {
    "axial": AxialPositions,
    "released": ReleasedPositions,
    "learned": LearnedPositions,
}
