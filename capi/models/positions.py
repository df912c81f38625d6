"""How tokens know where they stand: rotary positions in every attention, or a learned table that is added once.

Positions are functions of coordinates in [0, 1] x [0, 1], row first, so that either kind reads any resolution.

- `axial` and `released` (capi/models/rope.py) turn queries and keys. RoPE-2D as in EVA-02 and the paper.
- `learned` (ViT, ICLR 2021): a table of vectors, one for each patch of the native grid, is added to the patch
  embeddings; the predictor's mask tokens have a table of their own, registers have none, and nothing is turned.
  Between the points of the table it is bicubic, corners on corners as for all coordinates here (ours).
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.models.rope import RopeVariant, RotaryTable, rotary_table
from capi.types import Float

PositionKind = Literal["axial", "released", "learned"]
Grid = tuple[int, int]

INITIAL_TABLE_STD = 0.02


@runtime_checkable
class Positions(Protocol):
    """The contract: what a position adds to a token, and how it turns queries and keys."""

    kind: PositionKind

    def place(self, tokens: Float[Tensor, "b t d"], coordinates: Float[Tensor, "s t 2"]) -> Float[Tensor, "b t d"]:
        """The patches or mask tokens at these coordinates, with what tells their place; s is b, or 1 for all alike."""
        ...

    def rotary(self, coordinates: Float[Tensor, "s t 2"]) -> RotaryTable | None:
        """How attention turns queries and keys of a whole sequence; None for not at all."""
        ...


class RotaryPositions:
    """Tokens stay as they are; attention turns them."""

    def __init__(self, variant: RopeVariant, *, width: int, head_width: int, grid: Grid | None) -> None:  # noqa: ARG002 - the contract
        self.kind: PositionKind = variant
        self.variant: RopeVariant = variant
        self.head_width = head_width

    def place(self, tokens: Float[Tensor, "b t d"], coordinates: Float[Tensor, "s t 2"]) -> Float[Tensor, "b t d"]:  # noqa: ARG002 - the contract
        return tokens

    def rotary(self, coordinates: Float[Tensor, "s t 2"]) -> RotaryTable | None:
        return rotary_table(coordinates, self.head_width, self.variant)


class LearnedPositions(nn.Module):
    """A vector for each patch of the native grid."""

    kind: PositionKind = "learned"

    def __init__(self, *, width: int, head_width: int, grid: Grid | None) -> None:  # noqa: ARG002 - the contract
        super().__init__()
        assert grid is not None, "learned positions need the rows and columns of their table"
        self.table = nn.Parameter(torch.empty(*grid, width))
        nn.init.trunc_normal_(self.table, std=INITIAL_TABLE_STD)

    def place(self, tokens: Float[Tensor, "b t d"], coordinates: Float[Tensor, "s t 2"]) -> Float[Tensor, "b t d"]:
        # Sampling wants coordinates from -1 to 1, the column first, and channels before rows.
        at = 2 * coordinates.flip(-1)[None] - 1
        # Coordinates are float32 also where the weights are not, and sampling wants both alike.
        table = self.table.float().permute(2, 0, 1)[None]
        sampled = F.grid_sample(table, at, mode="bicubic", padding_mode="border", align_corners=True)
        return tokens + sampled[0].permute(1, 2, 0).to(self.table.dtype)

    def rotary(self, coordinates: Float[Tensor, "s t 2"]) -> RotaryTable | None:  # noqa: ARG002 - the contract
        return None


POSITIONS: dict[PositionKind, Callable[..., Positions]] = {
    "axial": partial(RotaryPositions, "axial"),
    "released": partial(RotaryPositions, "released"),
    "learned": LearnedPositions,
}
