"""How the rows of the clustering are walked over: in chunks, and those in pieces.

A chunk is what one matrix product handles and wants to be large; within it a piece of a few groups is worked on at a
time, small enough to stay in the cache of a CPU.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from capi.types import Float

CPU_CHUNK_BYTES = 96 * 2**20
ACCELERATOR_CHUNK_BYTES = 2**30
# A piece needs three buffers of its rows (kernel turned assignments, probabilities, a product) and some four vectors
# for each of its groups (shift, factor, sums, a temporary). It may take this share of the budget.
_PIECE_BUFFERS, _GROUP_VECTORS = 3, 4
_PIECE_SHARE = 1 / 8
# A chunk needs its logits, and its tokens in three stages: gathered, squared for their norm, normalised.
_TOKEN_BUFFERS = 3
# Rows of 2^n floats would all fall into the same cache sets; a little padding made most products faster.
ROW_PADDING = 16


class ChunkPlan(NamedTuple):
    """How many rows are handled at a time."""

    chunk_rows: int
    piece_rows: int
    streamed: bool

    def threads_of_a_piece(self, group_size: int) -> int:
        """How many threads of compiled code have room in a piece, each with one buffer of a group and its vectors."""
        groups = self.piece_rows / group_size
        buffers = _PIECE_BUFFERS * group_size + _GROUP_VECTORS
        return int(groups * buffers / (group_size + _GROUP_VECTORS))


def plan_chunks(rows: int, group_size: int, prototypes: int, width: int, chunk_bytes: int) -> ChunkPlan:
    """The largest chunk and piece within the budget: whole groups where a group fits, else as many rows as do."""
    budget = chunk_bytes // 4
    chunk_row = prototypes + ROW_PADDING + _TOKEN_BUFFERS * width
    piece_row = prototypes * (_PIECE_BUFFERS + _GROUP_VECTORS / group_size)
    streamed = budget < group_size * (chunk_row + piece_row)
    unit = 1 if streamed else group_size
    piece = max(int(budget * _PIECE_SHARE / piece_row) // unit, 1) * unit
    chunk = max(int((budget - piece * piece_row) / chunk_row) // unit, 1) * unit
    return ChunkPlan(min(chunk, rows), min(piece, chunk, rows), streamed)


class GroupLayout(NamedTuple):
    """The rows of a group: so many of the batch, then so many of earlier ones. Rows are numbered group by group."""

    own: int
    earlier: int

    @property
    def size(self) -> int:
        return self.own + self.earlier

    def own_before(self, row: int) -> int:
        """How many of the rows before this one are the batch's."""
        group, offset = divmod(row, self.size)
        return group * self.own + min(offset, self.own)

    def own_of(self, rows: Float[Tensor, "s w"]) -> Float[Tensor, "o w"]:
        """The batch's among the rows of whole groups; the same memory where there are no others."""
        return rows.unflatten(0, (-1, self.size))[:, : self.own].flatten(0, 1)


def ranges(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of the steps from one number to another."""
    return ((start, min(start + step, end)) for start in range(begin, end, step))
