"""The clustering in bounded memory: the b x n x k assignments never exist together.

Tokens are walked over in chunks that fit a memory budget. Each chunk gives its share of the loss, of the prototypes'
gradient

    (softmax(l / T_prediction) - assignments)^T x / (T_prediction * tokens)

and the targets of those of its patches that the student predicts. Samples that are balanced together form a group
(positionwise: all images at one position; standard: everything). Groups that fit are balanced in memory. A group that
does not is streamed once for each iteration, and its logits are computed anew each time.

A chunk is what one matrix product handles and wants to be large; within it a piece of a few groups is worked on at a
time, small enough to stay in the cache of a CPU.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.method.sinkhorn import SinkhornVariant, balance, over_prototypes, over_samples, update
from capi.types import Float, Int, Reduction

CPU_CHUNK_BYTES = 96 * 2**20
ACCELERATOR_CHUNK_BYTES = 2**30
# A piece needs three buffers (kernel turned assignments, probabilities, a product) of this share of the budget each.
_PIECE_BUFFERS = 3
_PIECE_SHARE = 1 / 8
# Rows of 2^n floats would all fall into the same cache sets; a little padding makes the products 5 to 15 % faster.
_ROW_PADDING = 16
_NORMALIZE_EPS = 1e-7
# exp of less than this is taken as 0: near 1e-38 floats lose their normal form, and exp becomes five times slower. A
# sample this far from all prototypes is left without assignment by eps: with 3 iterations none moves by more than 2e-8.
_SMALLEST_EXPONENT = -83.0


@dataclass(frozen=True)
class ClusteringSettings:
    """The numbers of the clustering. `chunk_bytes` bounds the working memory; None chooses by device."""

    sinkhorn: SinkhornVariant = "positionwise"
    iterations: int = 3
    target_temperature: float = 0.06
    prediction_temperature: float = 0.12
    chunk_bytes: int | None = None


class Totals(NamedTuple):
    """What the chunks add up to."""

    loss: Float[Tensor, ""]
    prototype_gradient: Float[Tensor, "k d"]
    bias_gradient: Float[Tensor, " k"]
    targets: Float[Tensor, "b p k"]


def cluster(
    tokens: Float[Tensor, "b n d"],
    predict_index: Int[Tensor, "b p"],
    prototypes: Float[Tensor, "k d"],
    bias: Float[Tensor, " k"] | None,
    settings: ClusteringSettings,
    reduction: Reduction,
) -> Totals:
    """Loss, its gradient and the targets of the predicted patches."""
    images, positions, _ = tokens.shape
    # Position-major, so that the images of one position lie together and any chunk is a range of rows.
    rows = F.normalize(tokens.float().transpose(0, 1), dim=-1, eps=_NORMALIZE_EPS).flatten(0, 1)
    group_size = images if settings.sinkhorn == "positionwise" else images * positions
    image = torch.arange(images, device=tokens.device)[:, None]
    bias = None if bias is None else bias.float()
    walk = _Walk(rows, prototypes.float(), bias, predict_index * images + image, settings, reduction, group_size)
    if walk.plan.streamed:
        walk.streaming()
    else:
        walk.in_memory()
    return walk.totals(predict_index.shape)


class ChunkPlan(NamedTuple):
    """How many rows are handled at a time."""

    chunk_rows: int
    piece_rows: int
    streamed: bool


def plan_chunks(rows: int, group_size: int, prototypes: int, chunk_bytes: int) -> ChunkPlan:
    """The largest chunk and piece within the budget: whole groups where a group fits, else as many rows as do."""
    affordable = chunk_bytes // (4 * (prototypes + _ROW_PADDING))
    streamed = affordable < group_size * (1 + _PIECE_BUFFERS)
    unit = 1 if streamed else group_size
    piece = max(int(affordable * _PIECE_SHARE) // unit, 1) * unit
    chunk = max((affordable - _PIECE_BUFFERS * piece) // unit, 1) * unit
    return ChunkPlan(min(chunk, rows), min(piece, rows), streamed)


class _Walk:
    """One walk over all rows, adding up loss, gradient and wanted targets.

    Logits are kept divided by the prediction temperature; `sharpness` brings them to the target temperature.
    """

    def __init__(
        self,
        rows: Float[Tensor, "rows d"],
        prototypes: Float[Tensor, "k d"],
        bias: Float[Tensor, " k"] | None,
        wanted: Int[Tensor, "b p"],
        settings: ClusteringSettings,
        reduction: Reduction,
        group_size: int,
    ) -> None:
        self.rows, self.prototypes, self.bias = rows, prototypes, bias
        self.settings, self.reduction, self.group_size = settings, reduction, group_size
        self.sharpness = settings.prediction_temperature / settings.target_temperature
        default = CPU_CHUNK_BYTES if rows.device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
        chunk_bytes = default if settings.chunk_bytes is None else settings.chunk_bytes
        self.plan = plan_chunks(len(rows), group_size, len(prototypes), chunk_bytes)
        self.logits_buffer = rows.new_empty(self.plan.chunk_rows, len(prototypes) + _ROW_PADDING)
        self.kernel_buffer = rows.new_empty(self.plan.piece_rows, len(prototypes))
        self.loss = rows.new_zeros(())
        self.prototype_gradient = torch.zeros_like(prototypes)
        self.bias_gradient = rows.new_zeros(len(prototypes))
        self.targets = rows.new_empty(wanted.numel(), len(prototypes))
        self.wanted, self.order = wanted.flatten().sort()
        # On the host, so that finding a piece's share needs no synchronisation with the device.
        self.wanted_rows: list[int] = self.wanted.tolist()

    def in_memory(self) -> None:
        """Balance the groups of each piece at once."""
        for start, stop in _ranges(0, len(self.rows), self.plan.chunk_rows):
            logits = self._logits(start, stop)
            for first, last in _ranges(start, stop, self.plan.piece_rows):
                piece = logits[first - start : last - start]
                groups = piece.unflatten(0, (-1, self.group_size))
                kernel = self._kernel(groups, self.reduction.max(groups.amax(1)))
                u, v = balance(kernel, self.settings.iterations, self.reduction)
                self._absorb(first, piece, kernel.mul_(u[:, None]).mul_(v[..., None]).flatten(0, 1))
            self._add_gradient(start, stop, logits)

    def streaming(self) -> None:
        """Balance groups that do not fit: each iteration walks over the group and keeps only the factors."""
        for begin, end in _ranges(0, len(self.rows), self.group_size):
            shift, sums = self._shift_and_sums(begin, end)
            u, v = update(torch.ones_like(sums), sums), self.rows.new_ones(1, self.group_size)
            for _ in range(self.settings.iterations - 1):
                u = update(u, self.reduction.sum(self._update_samples(begin, end, shift, u, v)))
            self._absorb_group(begin, end, shift, u, v)

    def _update_samples(self, begin: int, end: int, shift: Tensor, u: Tensor, v: Tensor) -> Float[Tensor, "1 k"]:
        """Update the factors v of a group in place; the sums over its samples that the next u needs."""
        sums = torch.zeros_like(u)
        for start, stop in _ranges(begin, end, self.plan.chunk_rows):
            logits = self._logits(start, stop)
            for first, last in _ranges(start, stop, self.plan.piece_rows):
                kernel = self._kernel(logits[None, first - start : last - start], shift)
                factor = v[:, first - begin : last - begin]
                factor.copy_(update(factor, over_prototypes(kernel, u)))
                sums += over_samples(kernel, factor)
        return sums

    def _absorb_group(self, begin: int, end: int, shift: Tensor, u: Tensor, v: Tensor) -> None:
        """The last walk over a group: the final factors, and with them assignments, loss and gradient."""
        for start, stop in _ranges(begin, end, self.plan.chunk_rows):
            logits = self._logits(start, stop)
            for first, last in _ranges(start, stop, self.plan.piece_rows):
                piece = logits[first - start : last - start]
                kernel = self._kernel(piece[None], shift)
                factor = update(v[:, first - begin : last - begin], over_prototypes(kernel, u))
                self._absorb(first, piece, kernel[0].mul_(u).mul_(factor[0, :, None]))
            self._add_gradient(start, stop, logits)

    def _shift_and_sums(self, begin: int, end: int) -> tuple[Float[Tensor, "1 k"], Float[Tensor, "1 k"]]:
        """Each prototype's maximum and the sum of its shifted exponentials, in one walk that rescales as it goes."""
        shift = self.rows.new_full((1, len(self.prototypes)), -torch.inf)
        sums = torch.zeros_like(shift)
        for start, stop in _ranges(begin, end, self.plan.chunk_rows):
            for piece in self._logits(start, stop).split(self.plan.piece_rows):
                raised = torch.maximum(shift, piece.amax(0))
                sums = sums * torch.exp((shift - raised) * self.sharpness) + self._kernel(piece[None], raised).sum(1)
                shift = raised
        overall = self.reduction.max(shift)
        return overall, self.reduction.sum(sums * torch.exp((shift - overall) * self.sharpness))

    def _logits(self, start: int, stop: int) -> Float[Tensor, "s k"]:
        rows = self.rows[start:stop] / self.settings.prediction_temperature
        logits = self.logits_buffer[: len(rows), : len(self.prototypes)]
        if self.bias is None:
            return torch.mm(rows, self.prototypes.t(), out=logits)
        return torch.addmm(self.bias / self.settings.prediction_temperature, rows, self.prototypes.t(), out=logits)

    def _kernel(self, logits: Float[Tensor, "g s k"], shift: Float[Tensor, "g k"]) -> Float[Tensor, "g s k"]:
        """exp((l - shift) / T_target), in the buffer of the piece."""
        kernel = self.kernel_buffer.flatten()[: logits.numel()].view(logits.shape)
        torch.add(shift[:, None] * -self.sharpness, logits, alpha=self.sharpness, out=kernel)
        kernel.clamp_min_(_SMALLEST_EXPONENT).exp_()
        return torch.threshold_(kernel, math.exp(_SMALLEST_EXPONENT) * 1.001, 0.0)

    def _absorb(self, start: int, logits: Float[Tensor, "s k"], assignments: Float[Tensor, "s k"]) -> None:
        """Add a piece to loss and targets, and leave softmax - assignments in place of its logits."""
        low, high = bisect_left(self.wanted_rows, start), bisect_left(self.wanted_rows, start + len(logits))
        self.targets[self.order[low:high]] = assignments[self.wanted[low:high] - start]
        largest = logits.amax(1)
        agreement = torch.linalg.vecdot(assignments, logits)
        probabilities = torch.softmax(logits, dim=1)
        # log sum exp of a row from its largest entry, since softmax already did the work.
        log_sum = largest - probabilities.amax(1).log()
        self.loss += torch.dot(assignments.sum(1), log_sum) - agreement.sum()
        torch.sub(probabilities, assignments, out=logits)

    def _add_gradient(self, start: int, stop: int, difference: Float[Tensor, "s k"]) -> None:
        self.prototype_gradient.addmm_(difference.t(), self.rows[start:stop])
        self.bias_gradient += difference.sum(0)

    def totals(self, wanted_shape: torch.Size) -> Totals:
        scale = 1 / (self.settings.prediction_temperature * len(self.rows))
        return Totals(
            loss=self.loss / len(self.rows),
            prototype_gradient=self.prototype_gradient.mul_(scale),
            bias_gradient=self.bias_gradient.mul_(scale),
            targets=self.targets.view(*wanted_shape, -1),
        )


def _ranges(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, end)) for start in range(begin, end, step))
