"""The clustering in bounded memory: the b x n x k assignments never exist together.

Tokens are walked over in chunks that fit a memory budget. Each chunk gives its share of the loss, of the prototypes'
gradient

    (softmax(l / T_prediction) - assignments)^T x / (T_prediction * tokens)

(the softmax times the sum of the assignments, where that is less than 1), and the targets of those of its patches that
the student predicts. Samples that are balanced together form a group (positionwise: all images at one position;
standard: everything). Groups that fit are balanced in memory. A group that does not is streamed once for each
iteration, and logits that do not fit either are computed anew each time. Tokens of earlier batches (`queue.py`) may
stand in the groups behind the batch's own: they are balanced with them, no more.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.method.chunks import ACCELERATOR_CHUNK_BYTES, CPU_CHUNK_BYTES, ROW_PADDING, GroupLayout, plan_chunks, ranges
from capi.method.sinkhorn import SinkhornVariant, balance, centred, over_prototypes, over_samples, update
from capi.types import Float, Int, Reduction

_NORMALIZE_EPS = 1e-7
# Exponentials are powers of two, which on a CPU are computed in nearly half the time of those of e.
_OCTAVES = math.log2(math.e)
# Exponents end here: near 2^-126 floats lose their normal form, and become several times slower. Samples this far from
# all prototypes are left without assignment by eps anyway: with 3 iterations, 64 images and 16384 prototypes none moves
# by more than 2e-8.
_SMALLEST_OCTAVE = -120.0
# Where exponentials end at half of that, a softmax made of them is exact as long as no row sums up to less than this:
# of 16384 prototypes they are 1.4e-6 of it at most.
_SMALLEST_SUM = 1e-8


@dataclass(frozen=True)
class ClusteringSettings:
    """The numbers of the clustering. `chunk_bytes` bounds the working memory; None chooses by device."""

    sinkhorn: SinkhornVariant = "positionwise"
    iterations: int = 3
    target_temperature: float = 0.06
    prediction_temperature: float = 0.12
    chunk_bytes: int | None = None


class Factors(NamedTuple):
    """What rebuilds the assignment of any patch from its token: exp(l / T_target + log_prototypes) * samples.

    One vector for each group of samples that are balanced together, and one number for each sample. Rows are in
    position-major order, and a group holds `group_size` of them.
    """

    log_prototypes: Float[Tensor, "g k"]
    samples: Float[Tensor, " rows"]
    group_size: int


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


def rebuild(
    tokens: Float[Tensor, "b n d"],
    predict_index: Int[Tensor, "b p"],
    prototypes: Float[Tensor, "k d"],
    factors: Factors,
    *,
    first_image: int,
    images: int,
    target_temperature: float,
) -> Float[Tensor, "b p k"]:
    """The targets of some of the images that were clustered together; the first of them had number `first_image`."""
    number = torch.arange(first_image, first_image + len(tokens), device=tokens.device)[:, None]
    row = (predict_index * images + number).flatten()
    chosen = tokens.gather(1, predict_index[..., None].expand(-1, -1, tokens.shape[2])).flatten(0, 1)
    targets = factors.log_prototypes[row // factors.group_size]
    targets.addmm_(_normalized(chosen), prototypes.float().t(), alpha=1 / target_temperature)
    return targets.exp_().mul_(factors.samples[row, None]).unflatten(0, predict_index.shape)


class _Softmax(NamedTuple):
    """Over prototypes at the prediction temperature: what is to be divided by its sums, and the log sums of exp(l)."""

    exponentials: Float[Tensor, "s k"]
    sums: Float[Tensor, " s"]
    log_sums: Float[Tensor, " s"]


class _Walk:
    """One walk over all tokens, adding up loss, gradient and wanted targets.

    Tokens are rows in position-major order, so that the images of one position lie together and any chunk is a range.
    Logits are kept divided by the prediction temperature; `sharpness` brings them to the target temperature.
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
        self.logits_buffer = prototypes.new_empty(self.plan.chunk_rows, len(prototypes) + ROW_PADDING)
        self.kernel_buffer = prototypes.new_empty(self.plan.piece_rows, len(prototypes))
        self.held: tuple[int, int] | None = None
        self.loss = prototypes.new_zeros(())
        self.prototype_gradient = torch.zeros_like(prototypes)
        self.bias_gradient = prototypes.new_zeros(len(prototypes))
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

    def in_memory(self) -> None:
        """Balance the groups of each piece at once."""
        own = self.layout.own
        for start, stop in ranges(0, self.num_rows, self.plan.chunk_rows):
            rows, logits = self._chunk(start, stop)
            for first, last in ranges(start, stop, self.plan.piece_rows):
                piece = logits[first - start : last - start]
                groups = piece.unflatten(0, (-1, self.layout.size))
                shift = self.reduction.max(groups.amax(1))
                kernel, root = self._kernel_and_root(groups, shift)
                u, v = balance(kernel, self.settings.iterations, self.reduction)
                factor = v[:, :own].flatten()
                self._keep_factors(first, shift, u, factor)
                scaled = kernel[:, :own].mul_(u[:, None]).flatten(0, 1)
                own_logits = self.layout.own_of(piece)
                softmax = None if root is None else self._softmax_of(root[:, :own], shift)
                self._absorb(start, first, own_logits, scaled, factor, softmax or self._softmax(own_logits))
            self._add_gradient(self.layout.own_of(rows))

    def streaming(self) -> None:
        """Balance groups that do not fit: each iteration walks over the group and keeps only the factors."""
        for begin, end in ranges(0, self.num_rows, self.layout.size):
            shift, sums = self._shift_and_sums(begin, end)
            u, v = centred(update(torch.ones_like(sums), sums), sums.new_ones(1, self.layout.size))
            for _ in range(self.settings.iterations - 1):
                u, v = centred(update(u, self.reduction.sum(self._update_samples(begin, end, shift, u, v))), v)
            self._absorb_group(begin, begin + self.layout.own, shift, u, v)

    def _keep_factors(self, start: int, shift: Tensor, u: Tensor, v: Float[Tensor, " s"]) -> None:
        """Note what rebuilds the assignments of a piece, shift and factor of a prototype in one number."""
        if self.factors is not None:
            group, sample = start // self.layout.size, self.layout.own_before(start)
            self.factors.log_prototypes[group : group + len(u)] = u.log() - shift * self.sharpness
            self.factors.samples[sample : sample + len(v)] = v

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
                factor = update(v[:, first - begin : last - begin], over_prototypes(kernel, u))
                self._keep_factors(first, shift, u, factor[0])
                self._absorb(start, first, piece, kernel[0].mul_(u), factor[0], self._softmax(piece))
            self._add_gradient(rows)

    def _shift_and_sums(self, begin: int, end: int) -> tuple[Float[Tensor, "1 k"], Float[Tensor, "1 k"]]:
        """Each prototype's maximum and the sum of its shifted exponentials, in one walk that rescales as it goes."""
        shift = self.prototypes.new_full((1, len(self.prototypes)), -torch.inf)
        sums = torch.zeros_like(shift)
        for start, stop in ranges(begin, end, self.plan.chunk_rows):
            for piece in self._chunk(start, stop)[1].split(self.plan.piece_rows):
                raised = torch.maximum(shift, piece.amax(0))
                sums = sums * torch.exp((shift - raised) * self.sharpness) + self._kernel(piece[None], raised).sum(1)
                shift = raised
        overall = self.reduction.max(shift)
        return overall, self.reduction.sum(sums * torch.exp((shift - overall) * self.sharpness))

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
            self.rows = _normalized(self._rows(start, stop))
            self.held = (start, stop)
            self._fill_logits(self.rows)
        return self.rows, self.logits_buffer[: stop - start, : len(self.prototypes)]

    def _fill_logits(self, rows: Float[Tensor, "s d"]) -> None:
        """Products with the prototypes. The bias comes later: balancing takes any constant of a prototype away."""
        logits = self.logits_buffer[: len(rows), : len(self.prototypes)]
        # With beta = 0 the first argument is not read.
        scale = 1 / self.settings.prediction_temperature
        torch.addmm(self.bias_gradient, rows, self.prototypes.t(), beta=0, alpha=scale, out=logits)

    def _kernel(self, logits: Float[Tensor, "g s k"], shift: Float[Tensor, "g k"]) -> Float[Tensor, "g s k"]:
        """exp((l - shift) / T_target), in the buffer of the piece."""
        kernel = self.kernel_buffer.flatten()[: logits.numel()].view(logits.shape)
        return self._exponential(logits, shift, self.sharpness, _SMALLEST_OCTAVE, kernel)

    def _kernel_and_root(
        self, logits: Float[Tensor, "g s k"], shift: Float[Tensor, "g k"]
    ) -> tuple[Float[Tensor, "g s k"], Float[Tensor, "g s k"] | None]:
        """The kernel, and where it is the square of exp(l - shift) also that, of which the softmax can be made.

        Whether it may be made of it must be looked at, for which an accelerator would have to be waited for.
        """
        if self.sharpness != 2 or logits.device.type != "cpu":
            return self._kernel(logits, shift), None
        kernel = self.kernel_buffer.flatten()[: logits.numel()].view(logits.shape)
        root = self._exponential(logits, shift, 1.0, _SMALLEST_OCTAVE / 2, torch.empty_like(kernel))
        return torch.mul(root, root, out=kernel), root

    def _exponential(self, logits: Tensor, shift: Tensor, sharpness: float, smallest: float, out: Tensor) -> Tensor:
        scale = sharpness * _OCTAVES
        torch.add(shift[:, None] * -scale, logits, alpha=scale, out=out)
        return out.clamp_min_(smallest).exp2_()

    def _softmax_of(self, root: Float[Tensor, "g s k"], shift: Float[Tensor, "g k"]) -> _Softmax | None:
        """From exp(l - shift), in its place; None where a row has next to nothing but what ended at the smallest."""
        weight = shift + self.offset
        highest = weight.amax(1, keepdim=True)
        sums = root.mul_(torch.exp(weight - highest)[:, None]).sum(2)
        if float(sums.min()) < _SMALLEST_SUM:
            return None
        return _Softmax(root.flatten(0, 1), sums.flatten(), (sums.log() + highest).flatten())

    def _softmax(self, logits: Float[Tensor, "s k"]) -> _Softmax:
        # In rows without padding, which softmax would otherwise make for itself.
        biased = logits + self.offset
        largest = biased.amax(1)
        probabilities = torch.softmax(biased, dim=1, out=biased)
        # log sum exp of a row from its largest entry, since softmax already did the work.
        log_sums = largest - probabilities.amax(1).log()
        return _Softmax(probabilities, torch.ones_like(log_sums), log_sums)

    def _absorb(
        self,
        chunk: int,
        start: int,
        logits: Float[Tensor, "s k"],
        scaled: Float[Tensor, "s k"],
        v: Float[Tensor, " s"],
        softmax: _Softmax,
    ) -> None:
        """Add the batch's rows of a piece to loss and targets, and leave softmax - assignments in place of logits.

        The assignments are the scaled kernel (K u) times v; they are not formed, which saves a pass. `start` is the
        first row of the piece, `chunk` that of the chunk it lies in.
        """
        row = self.layout.own_before(start)
        if self.targets is not None:
            low, high = bisect_left(self.wanted_rows, row), bisect_left(self.wanted_rows, row + len(logits))
            chosen = self.wanted[low:high] - row
            self.targets.flatten(0, 1)[self.order[low:high]] = scaled[chosen] * v[chosen, None]
        agreement = torch.linalg.vecdot(scaled, logits) + scaled.mv(self.offset)
        mass = v * scaled.sum(1)
        self.loss += torch.dot(mass, softmax.log_sums) - torch.dot(v, agreement)
        # A sample's assignments sum to 1, or to less where no prototype reaches it.
        probabilities = softmax.exponentials.mul_((mass / softmax.sums)[:, None])
        # The batch's rows move together at the front of the chunk, over logits that have had their turn.
        first = row - self.layout.own_before(chunk)
        difference = self.logits_buffer[first : first + len(logits), : len(self.prototypes)]
        torch.addcmul(probabilities, scaled, v[:, None], value=-1, out=difference)

    def _add_gradient(self, rows: Float[Tensor, "s d"]) -> None:
        """Of a chunk's own rows, whose differences stand where its logits were."""
        difference = self.logits_buffer[: len(rows), : len(self.prototypes)]
        self.prototype_gradient.addmm_(difference.t(), rows)
        self.bias_gradient += difference.sum(0)
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


def _position_major(tokens: Float[Tensor, "b n d"], start: int, stop: int) -> Float[Tensor, "s d"]:
    """A range of tokens, ordered by position and then by image."""
    images = len(tokens)
    first, last = start // images, -(-stop // images)
    offset = first * images
    return tokens[:, first:last].transpose(0, 1).flatten(0, 1)[start - offset : stop - offset]


def _normalized(rows: Float[Tensor, "s d"]) -> Float[Tensor, "s d"]:
    return F.normalize(rows.float(), dim=-1, eps=_NORMALIZE_EPS)
