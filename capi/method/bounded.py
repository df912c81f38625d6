"""The clustering in bounded memory: the b x n x k assignments never exist together.

Tokens are walked over in chunks that fit a memory budget. Each chunk gives its share of the loss, of the prototypes'
gradient

    (softmax(l / T_prediction) - assignments)^T x / (T_prediction * tokens)

(the softmax times the sum of the assignments, where that is less than 1), and the targets of those of its patches that
the student predicts. What belongs to a whole row is multiplied into x, which is far smaller than the assignments.

Samples that are balanced together form a group (positionwise: all images at one position; standard: everything).
Groups that fit are balanced in memory; on a CPU by `compiled.py` if they are large, one process has them all and the
library for it is installed. A group that does not fit is streamed once for each iteration, and logits that do not fit
either are computed anew each time. Tokens of earlier batches (`queue.py`) may stand in the groups behind the batch's
own: they are balanced with them, no more.
"""

import importlib.util
import logging
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.method.chunks import (
    ACCELERATOR_CHUNK_BYTES,
    CPU_CHUNK_BYTES,
    ROW_PADDING,
    GroupLayout,
    plan_chunks,
    ranges,
)
from capi.method.factors import OCTAVE, Factors, normalized
from capi.method.sinkhorn import (
    SMALLEST_OCTAVE,
    SMALLEST_REACH,
    OneProcess,
    SinkhornVariant,
    balance,
    centred,
    over_prototypes,
    over_samples,
    update,
)
from capi.types import Float, Int, Reduction

if TYPE_CHECKING:
    from capi.method.compiled import Scratch

_LOG = logging.getLogger("capi")
# Compiling takes some three seconds, and saves some fifty milliseconds in a step of this many assignments.
_WORTH_COMPILING = 2**24


@dataclass(frozen=True)
class ClusteringSettings:
    """The numbers of the clustering. `chunk_bytes` bounds the working memory; None chooses by device."""

    sinkhorn: SinkhornVariant = "positionwise"
    iterations: int = 3
    target_temperature: float = 0.06
    prediction_temperature: float = 0.12
    chunk_bytes: int | None = None


class Totals(NamedTuple):
    """What the chunks add up to; targets where they were asked for, else the factors that rebuild them."""

    loss: Float[Tensor, ""]
    prototype_gradient: Float[Tensor, "k d"]
    bias_gradient: Float[Tensor, " k"]
    targets: Float[Tensor, "b p k"] | None
    factors: Factors | None


def cluster(
    tokens: Float[Tensor, "b n d"],
    predict_index: Int[Tensor, "b p"] | None,
    prototypes: Float[Tensor, "k d"],
    bias: Float[Tensor, " k"] | None,
    settings: ClusteringSettings,
    reduction: Reduction,
    earlier: Float[Tensor, "q n d"] | None = None,
) -> Totals:
    """Loss, its gradient and the targets of the predicted patches; without those, what rebuilds any target later.

    `earlier` tokens are balanced together with the batch and add nothing to loss and gradient.
    """
    bias = None if bias is None else bias.float()
    walk = _Walk(tokens, predict_index, prototypes.float(), bias, settings, reduction, earlier)
    if walk.plan.streamed:
        walk.streaming()
    else:
        walk.in_memory()
    return walk.totals()


class _Walk:
    """One walk over all tokens, adding up loss, gradient and wanted targets.

    Tokens are rows in position-major order, so that the images of one position lie together and any chunk is a range.
    Logits are kept divided by the prediction temperature and in octaves; `sharpness` brings them to the target
    temperature. Biases come late: balancing takes any constant of a prototype away.
    """

    def __init__(
        self,
        tokens: Float[Tensor, "b n d"],
        predict_index: Int[Tensor, "b p"] | None,
        prototypes: Float[Tensor, "k d"],
        bias: Float[Tensor, " k"] | None,
        settings: ClusteringSettings,
        reduction: Reduction,
        earlier: Float[Tensor, "q n d"] | None = None,
    ) -> None:
        self.tokens, self.earlier, self.prototypes, self.bias = tokens, earlier, prototypes, bias
        self.settings, self.reduction = settings, reduction
        self.scale = 1 / (settings.prediction_temperature * OCTAVE)
        nothing = prototypes.new_zeros(len(prototypes))
        self.offset = nothing if bias is None else bias / settings.prediction_temperature
        self.sharpness = settings.prediction_temperature / settings.target_temperature
        self.images, positions, width = tokens.shape
        self.own_rows = self.images * positions
        together = 1 if settings.sinkhorn == "positionwise" else positions
        self.layout = GroupLayout(self.images * together, 0 if earlier is None else len(earlier) * together)
        self.num_rows = self.layout.size * positions // together
        default = CPU_CHUNK_BYTES if tokens.device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
        chunk_bytes = default if settings.chunk_bytes is None else settings.chunk_bytes
        self.plan = plan_chunks(self.num_rows, self.layout.size, len(prototypes), width, chunk_bytes)
        self.scratch = self._scratch()
        self.logits_buffer = prototypes.new_empty(self.plan.chunk_rows, len(prototypes) + ROW_PADDING)
        self.kernel_buffer = prototypes.new_empty(0 if self.scratch else self.plan.piece_rows, len(prototypes))
        self.weights = prototypes.new_empty(self.plan.chunk_rows)
        self.held: tuple[int, int] | None = None
        self.loss = prototypes.new_zeros(())
        self.prototype_gradient = torch.zeros_like(prototypes)
        self.bias_gradient = prototypes.new_zeros(len(prototypes))
        self.wanted = self.order = torch.empty(0, dtype=torch.int64)
        self.wanted_rows: list[int] = []
        self.targets: Tensor | None = None
        self.factors: Factors | None = None
        if predict_index is None:
            groups = self.num_rows // self.layout.size
            self.factors = Factors(
                prototypes.new_empty(groups, len(prototypes)), prototypes.new_empty(self.own_rows), self.layout.own
            )
        else:
            self._note_wanted(predict_index)

    def _note_wanted(self, predict_index: Int[Tensor, "b p"]) -> None:
        """Sort the rows whose targets are wanted."""
        image = torch.arange(self.images, device=predict_index.device)[:, None]
        self.wanted, self.order = (predict_index * self.images + image).flatten().sort()
        # One wait for the device here; finding each piece's share then needs none.
        self.wanted_rows = self.wanted.tolist()
        self.targets = self.prototypes.new_empty(*predict_index.shape, len(self.prototypes))

    def _scratch(self) -> "list[Scratch]":
        """What the threads of the compiled way work in; none where it cannot go or would not be worth its start.

        It has no more memory than the pieces of the other way, and needs most of the threads to be faster.
        """
        possible = self.prototypes.device.type == "cpu" and isinstance(self.reduction, OneProcess)
        simple = not self.plan.streamed and not self.layout.earlier
        if not (possible and simple and self.num_rows * len(self.prototypes) >= _WORTH_COMPILING):
            return []
        compiled, groups = _compiled(), self.plan.chunk_rows // self.layout.size
        threads = min(torch.get_num_threads(), groups, self.plan.threads_of_a_piece(self.layout.size))
        if compiled is None or 2 * threads < torch.get_num_threads():
            return []
        # All threads get equally many groups of a chunk.
        self.plan = self.plan._replace(chunk_rows=groups // threads * threads * self.layout.size)
        return [compiled.make_scratch(self.layout.size, len(self.prototypes)) for _ in range(threads)]

    def in_memory(self) -> None:
        """Balance groups at once: those of a chunk in compiled code, or those of one piece after the other."""
        for start, stop in ranges(0, self.num_rows, self.plan.chunk_rows):
            rows, logits = self._chunk(start, stop)
            if self.scratch:
                self._absorb_compiled(start, stop)
            else:
                for first, last in ranges(start, stop, self.plan.piece_rows):
                    self._absorb_piece(start, first, logits[first - start : last - start])
            self._add_gradient(self.layout.own_of(rows))

    def _absorb_piece(self, chunk: int, start: int, piece: Float[Tensor, "s k"]) -> None:
        """Balance the groups of a piece and add them up."""
        own = self.layout.own
        groups = piece.unflatten(0, (-1, self.layout.size))
        shift = self.reduction.max(groups.amax(1))
        kernel = self._kernel(groups, shift)
        u, v, reached = balance(kernel, self.settings.iterations, self.reduction)
        factor, reached = v[:, :own].flatten(), reached[:, :own].flatten()
        self._keep_factors(start, shift, u, factor, reached)
        scaled = kernel[:, :own].mul_(u[:, None]).flatten(0, 1)
        self._absorb(chunk, start, self.layout.own_of(piece), scaled, factor, reached)

    def _absorb_compiled(self, start: int, stop: int) -> None:
        """Balance the groups of a chunk and add them up."""
        compiled = _compiled()
        assert compiled is not None
        nothing = self.prototypes.new_empty(0, len(self.prototypes))
        low, high = bisect_left(self.wanted_rows, start), bisect_left(self.wanted_rows, stop)
        rows, factors = torch.arange(start, stop + 1), self.factors
        loss = compiled.absorb_groups(
            self.logits_buffer,
            self.offset / OCTAVE,
            self.scratch,
            targets=nothing if self.targets is None else self.targets.flatten(0, 1),
            places=self.order[low:high],
            starts=torch.searchsorted(self.wanted[low:high], rows),
            weights=self.weights,
            v=nothing.new_empty(stop - start) if factors is None else factors.samples[start:stop],
            log_prototypes=nothing if factors is None else factors.log_prototypes[start // self.layout.size :],
            sharpness=self.sharpness,
            iterations=self.settings.iterations,
        )
        self.loss += loss * OCTAVE

    def streaming(self) -> None:
        """Balance groups that do not fit: each iteration walks over the group and keeps only the factors."""
        for begin, end in ranges(0, self.num_rows, self.layout.size):
            shift, sums = self._shift_and_sums(begin, end)
            u, v = centred(update(torch.ones_like(sums), sums), sums.new_ones(1, self.layout.size))
            for _ in range(self.settings.iterations - 1):
                u, v = centred(update(u, self.reduction.sum(self._update_samples(begin, end, shift, u, v))), v)
            self._absorb_group(begin, begin + self.layout.own, shift, u, v)

    def _keep_factors(
        self, start: int, shift: Tensor, u: Tensor, v: Float[Tensor, " s"], reached: Float[Tensor, " s"]
    ) -> None:
        """Note what rebuilds the assignments of a piece, shift and factor of a prototype in one number.

        Where the kernel is 0 for all prototypes nothing is assigned, and nothing may be rebuilt.
        """
        if self.factors is not None:
            group, sample = start // self.layout.size, self.layout.own_before(start)
            self.factors.log_prototypes[group : group + len(u)] = u.log2() - shift * self.sharpness
            self.factors.samples[sample : sample + len(v)] = v.masked_fill(reached == 0, 0)

    def _update_samples(self, begin: int, end: int, shift: Tensor, u: Tensor, v: Tensor) -> Float[Tensor, "1 k"]:
        """Update the factors v of a group in place; the sums over its samples that the next u needs."""
        sums = torch.zeros_like(u)
        for start, stop in ranges(begin, end, self.plan.chunk_rows):
            _, logits = self._chunk(start, stop)
            for first, last in ranges(start, stop, self.plan.piece_rows):
                kernel = self._kernel(logits[None, first - start : last - start], shift)
                factor = v[:, first - begin : last - begin]
                factor.copy_(update(factor, over_prototypes(kernel, u)))
                sums += over_samples(kernel, factor)
        return sums

    def _absorb_group(self, begin: int, end: int, shift: Tensor, u: Tensor, v: Tensor) -> None:
        """The last walk, over the batch's rows: the final factors, and with them assignments, loss and gradient."""
        for start, stop in ranges(begin, end, self.plan.chunk_rows):
            rows, logits = self._chunk(start, stop)
            for first, last in ranges(start, stop, self.plan.piece_rows):
                piece = logits[first - start : last - start]
                kernel = self._kernel(piece[None], shift)
                reached = over_prototypes(kernel, u)
                factor = update(v[:, first - begin : last - begin], reached)
                self._keep_factors(first, shift, u, factor[0], reached[0])
                self._absorb(start, first, piece, kernel[0].mul_(u), factor[0], reached[0])
            self._add_gradient(rows)

    def _shift_and_sums(self, begin: int, end: int) -> tuple[Float[Tensor, "1 k"], Float[Tensor, "1 k"]]:
        """Each prototype's maximum and the sum of its shifted exponentials, in one walk that rescales as it goes."""
        shift = self.prototypes.new_full((1, len(self.prototypes)), -torch.inf)
        sums = torch.zeros_like(shift)
        for start, stop in ranges(begin, end, self.plan.chunk_rows):
            for piece in self._chunk(start, stop)[1].split(self.plan.piece_rows):
                raised = torch.maximum(shift, piece.amax(0))
                sums = sums * torch.exp2((shift - raised) * self.sharpness) + self._kernel(piece[None], raised).sum(1)
                shift = raised
        overall = self.reduction.max(shift)
        return overall, self.reduction.sum(sums * torch.exp2((shift - overall) * self.sharpness))

    def _rows(self, start: int, stop: int) -> Float[Tensor, "s d"]:
        """A range of rows, several whole groups or a part of one."""
        low, high = self.layout.own_before(start), self.layout.own_before(stop)
        own = _position_major(self.tokens, low, high)
        if self.earlier is None:
            return own
        earlier = _position_major(self.earlier, start - low, stop - high)
        groups = max((stop - start) // self.layout.size, 1)
        return torch.cat([part.unflatten(0, (groups, -1)) for part in (own, earlier)], 1).flatten(0, 1)

    def _chunk(self, start: int, stop: int) -> tuple[Float[Tensor, "s d"], Float[Tensor, "s k"]]:
        """Rows, L2-normalised, and logits of a chunk, not computed anew while the buffer still holds them."""
        if self.held != (start, stop):
            self.rows = normalized(self._rows(start, stop))
            self.held = (start, stop)
            self._fill_logits(self.rows)
        return self.rows, self.logits_buffer[: stop - start, : len(self.prototypes)]

    def _fill_logits(self, rows: Float[Tensor, "s d"]) -> None:
        """Products with the prototypes."""
        logits = self.logits_buffer[: len(rows), : len(self.prototypes)]
        # With beta = 0 the first argument is not read.
        torch.addmm(self.bias_gradient, rows, self.prototypes.t(), beta=0, alpha=self.scale, out=logits)

    def _kernel(self, logits: Float[Tensor, "g s k"], shift: Float[Tensor, "g k"]) -> Float[Tensor, "g s k"]:
        """2^(sharpness (l - shift)), in the buffer of the piece."""
        kernel = self.kernel_buffer.flatten()[: logits.numel()].view(logits.shape)
        torch.add(shift[:, None] * -self.sharpness, logits, alpha=self.sharpness, out=kernel)
        return F.threshold(kernel, SMALLEST_OCTAVE, -torch.inf, inplace=True).exp2_()

    def _absorb(
        self,
        chunk: int,
        start: int,
        logits: Float[Tensor, "s k"],
        scaled: Float[Tensor, "s k"],
        v: Float[Tensor, " s"],
        reached: Float[Tensor, " s"],
    ) -> None:
        """Add the batch's rows of a piece to loss and targets, and leave softmax - assignments in place of logits.

        The assignments are the scaled kernel (K u) times v; they are not formed, which saves a pass. They sum to 1, or
        to less where no prototype reaches a sample: that mass is a factor of the whole difference, and the weight of
        the row. `start` is the first row of the piece, `chunk` that of the chunk it lies in.
        """
        row = self.layout.own_before(start)
        if self.targets is not None:
            low, high = bisect_left(self.wanted_rows, row), bisect_left(self.wanted_rows, row + len(logits))
            chosen = self.wanted[low:high] - row
            self.targets.flatten(0, 1)[self.order[low:high]] = scaled[chosen] * v[chosen, None]
        mass = v * reached
        biased = torch.add(self.offset, logits, alpha=OCTAVE)
        largest, agreement = biased.amax(1), torch.linalg.vecdot(scaled, biased)
        probabilities = torch.softmax(biased, dim=1, out=biased)
        # log sum exp of a row from its largest entry, since softmax already did the work.
        self.loss += torch.dot(mass, largest - probabilities.amax(1).log()) - torch.dot(v, agreement)
        # The batch's rows move together at the front of the chunk, over logits that have had their turn.
        first = row - self.layout.own_before(chunk)
        self.weights[first : first + len(logits)] = mass
        difference = self.logits_buffer[first : first + len(logits), : len(self.prototypes)]
        share = reached.clamp_min(SMALLEST_REACH).reciprocal_()
        torch.addcmul(probabilities, scaled, share[:, None], value=-1, out=difference)

    def _add_gradient(self, rows: Float[Tensor, "s d"]) -> None:
        """Of a chunk's own rows, whose differences stand where its logits were."""
        difference, weights = self.logits_buffer[: len(rows), : len(self.prototypes)], self.weights[: len(rows)]
        self.prototype_gradient.addmm_(difference.t(), rows * weights[:, None])
        self.bias_gradient.addmv_(difference.t(), weights)
        self.held = None

    def totals(self) -> Totals:
        scale = 1 / (self.settings.prediction_temperature * self.own_rows)
        return Totals(
            loss=self.loss / self.own_rows,
            prototype_gradient=self.prototype_gradient.mul_(scale),
            bias_gradient=self.bias_gradient.mul_(scale),
            targets=self.targets,
            factors=self.factors,
        )


@cache
def _compiled() -> ModuleType | None:
    """The compiled way, where its library is installed and works."""
    try:
        return importlib.import_module("capi.method.compiled")
    except ImportError as error:
        # Not every release of numba knows every release of numpy.
        if importlib.util.find_spec("numba"):
            _LOG.warning("the clustering is slower than it could be: numba cannot be imported (%s)", error)
        return None


def _position_major(tokens: Float[Tensor, "b n d"], start: int, stop: int) -> Float[Tensor, "s d"]:
    """A range of tokens, ordered by position and then by image."""
    images = len(tokens)
    first, last = start // images, -(-stop // images)
    offset = first * images
    return tokens[:, first:last].transpose(0, 1).flatten(0, 1)[start - offset : stop - offset]
