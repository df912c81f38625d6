"""The clustering in bounded memory: the b x n x k assignments never exist together.

Positions are walked over in slices that fit a memory budget, and the formulas of `plain.py` are applied to one slice
after the other. Each adds its share to the loss and to the prototypes' gradient

    (softmax(l / T_prediction) - assignments)^T x / (T_prediction * tokens)

and leaves the factors from which the assignment of any of its patches is rebuilt. Positionwise each position is a group
of its own, so that one walk is enough. With standard Sinkhorn all patches are one group: each iteration is a walk,
which computes the logits anew and keeps the factors alone.

Tokens of earlier batches (`queue.py`) may stand in a group behind the batch's own, only to be balanced with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.method.clustering import plain
from capi.method.clustering.precision import Precision, product
from capi.runtime.devices import is_accelerator
from capi.types import Float, Int, Reduction

SinkhornVariant = Literal["positionwise", "standard"]
CPU_BYTES = 96 * 2**20
ACCELERATOR_BYTES = 4 * 2**30
# On a CPU so much of a slice is balanced at a time, since it stays in the cache.
_CACHED_BYTES = 8 * 2**20


@dataclass(frozen=True)
class ClusteringSettings:
    """The numbers of the clustering. `chunk_bytes` bounds the working memory; None chooses by device."""

    sinkhorn: SinkhornVariant = "positionwise"
    iterations: int = 3
    target_temperature: float = 0.06
    prediction_temperature: float = 0.12
    chunk_bytes: int | None = None
    precision: Precision = "float32"


class Slices(NamedTuple):
    """How many positions one matrix product handles, how many of them are balanced at a time, and their bytes."""

    positions: int
    balanced: int
    bytes: int


def plan_slices(
    images: int, positions: int, prototypes: int, width: int, *, chunk_bytes: int | None, accelerator: bool = False
) -> Slices:
    """The largest slices within the budget, of nearly equal size. `images` are those that are balanced together."""
    # Of a position: logits, and tokens in three stages (gathered, in float32, of length 1).
    held = 4 * images * (prototypes + 3 * width)
    # Where it is balanced: kernel, its product with log probabilities, and some vectors of prototypes.
    balanced = 4 * (2 * images + 6) * prototypes
    default = ACCELERATOR_BYTES if accelerator else CPU_BYTES
    # The default makes room for one position, however large.
    budget = max(default, held + balanced) if chunk_bytes is None else chunk_bytes
    fitting = min(budget // (held + balanced), positions)
    if fitting < 1:
        raise CapiError(
            f"clustering.chunk_mib = {budget / 2**20:g} is too little for one position of {images} images, whose "
            f"arrays need {(held + balanced) / 2**20:.3g} MiB: set more, or null"
        )
    if not accelerator:
        fitting = min(fitting, max(_CACHED_BYTES // balanced, 1))
    most = fitting if accelerator else min((budget - fitting * balanced) // held, positions)
    number = -(-positions // most)
    size = -(-positions // number)
    at_once = min(fitting, size)
    return Slices(size, at_once, size * held + at_once * balanced)


class Balance(NamedTuple):
    """What rebuilds the assignment of any patch from its logits: u K v, with K = kernel(l, shift).

    With standard Sinkhorn shift and u are those of every position, in the memory of one.
    """

    shift: Float[Tensor, "n k"]
    u: Float[Tensor, "n k"]
    v: Float[Tensor, "n b"]


class Clustered(NamedTuple):
    """Loss, gradients, and what rebuilds any target."""

    loss: Float[Tensor, ""]
    prototype_gradient: Float[Tensor, "k d"]
    bias_gradient: Float[Tensor, " k"]
    balance: Balance


def cluster(
    tokens: Float[Tensor, "b n d"],
    prototypes: Float[Tensor, "k d"],
    bias: Float[Tensor, " k"] | None,
    settings: ClusteringSettings,
    reduction: Reduction,
    earlier: Float[Tensor, "q n d"] | None = None,
) -> Clustered:
    """Balance all tokens. `earlier` ones are balanced with the batch, and add nothing to loss and gradient."""
    bias = None if bias is None else bias.float()
    walk = _Walk(tokens, prototypes.float(), bias, settings, reduction, earlier)
    if settings.sinkhorn == "positionwise":
        walk.positionwise()
    else:
        walk.standard()
    count = tokens.shape[0] * tokens.shape[1]
    scale = 1 / (settings.prediction_temperature * count)
    return Clustered(walk.loss / count, walk.gradient.t() * scale, walk.bias_gradient * scale, walk.balance)


def rebuild(
    tokens: Float[Tensor, "m p d"],
    predict_index: Int[Tensor, "m p"],
    prototypes: Float[Tensor, "k d"],
    bias: Float[Tensor, " k"] | None,
    settings: ClusteringSettings,
    balance: Balance,
    first_image: int = 0,
) -> Float[Tensor, "m p k"]:
    """The assignments of the predicted patches of some images, whose first had this number when all were balanced."""
    bias = None if bias is None else bias.float()
    logits = plain.logits(plain.normalized(tokens), prototypes.float(), bias, settings.precision)
    kernel = plain.kernel(logits, balance.shift[predict_index], settings.target_temperature)
    v = balance.v[:, first_image : first_image + len(tokens)].t().gather(1, predict_index)
    return kernel.mul_(balance.u[predict_index]).mul_(v[..., None])


class _Walk:
    """Walks over all positions, which add up loss and gradient and fill in the factors.

    What belongs to one slice lies in variables of one method, so that it is freed before the next one comes.
    """

    def __init__(
        self,
        tokens: Float[Tensor, "b n d"],
        prototypes: Float[Tensor, "k d"],
        bias: Float[Tensor, " k"] | None,
        settings: ClusteringSettings,
        reduction: Reduction,
        earlier: Float[Tensor, "q n d"] | None,
    ) -> None:
        self.tokens, self.earlier, self.prototypes, self.bias = tokens, earlier, prototypes, bias
        self.settings, self.reduction = settings, reduction
        self.own, positions, width = tokens.shape
        images = self.own + (0 if earlier is None else len(earlier))
        accelerator, k = is_accelerator(tokens.device), len(prototypes)
        self.planned = plan_slices(
            images, positions, k, width, chunk_bytes=settings.chunk_bytes, accelerator=accelerator
        )
        size = self.planned.positions
        self.slices = [slice(first, min(first + size, positions)) for first in range(0, positions, size)]
        groups = positions if settings.sinkhorn == "positionwise" else 1
        self.shift, self.u = prototypes.new_empty(groups, 1, k), prototypes.new_ones(groups, 1, k)
        self.v = prototypes.new_ones(positions, images, 1)
        self.loss = prototypes.new_zeros(())
        self.gradient = prototypes.new_zeros(width, k)
        self.bias_gradient = prototypes.new_zeros(k)

    @property
    def balance(self) -> Balance:
        positions = len(self.v)
        shift, u = (factor[:, 0].expand(positions, -1) for factor in (self.shift, self.u))
        return Balance(shift, u, self.v[:, : self.own, 0])

    def positionwise(self) -> None:
        """Each position is balanced by itself: one walk."""
        for positions in self.slices:
            self._balance(positions)

    def standard(self) -> None:
        """All positions are balanced together: a walk for the shift and the first sums, and one for each iteration."""
        self.shift.fill_(-torch.inf)
        sums = torch.zeros_like(self.u)
        for positions in self.slices:
            sums = self._raise_shift(positions, sums)
        highest = self.reduction.max(self.shift)
        sums.mul_(plain.kernel(self.shift, highest, self.settings.target_temperature))
        self.shift = highest
        for iteration in range(1, self.settings.iterations + 1):
            self.u, self.v = plain.moderate(plain.divide(self.u, self.reduction.sum(sums)), self.v)
            is_last = iteration == self.settings.iterations
            sums = torch.zeros_like(self.u)
            for positions in self.slices:
                sums += self._update_samples(positions, is_last=is_last)

    def _balance(self, positions: slice) -> None:
        samples, logits = self._logits(positions)
        factors = self.shift[positions], self.u[positions], self.v[positions]
        for part, shift, u, v in self._parts(logits, *factors):
            shift.copy_(self.reduction.max(part.amax(1, keepdim=True)))
            kernel = plain.kernel(part, shift, self.settings.target_temperature)
            factor_u, factor_v = plain.sinkhorn(kernel, self.settings.iterations, self.reduction)
            u.copy_(factor_u)
            v.copy_(factor_v)
            self._leave_difference(part, kernel.mul_(u).mul_(v))
        self._add_gradient(samples, logits)

    def _raise_shift(self, positions: slice, sums: Float[Tensor, "1 1 k"]) -> Float[Tensor, "1 1 k"]:
        """Raise the shift to what a slice has, and add its kernel to sums that follow the shift."""
        temperature = self.settings.target_temperature
        for (part,) in self._parts(self._logits(positions)[1]):
            raised = torch.maximum(self.shift, part.amax((0, 1), keepdim=True))
            kernel = plain.kernel(part, raised, temperature)
            sums = sums * plain.kernel(self.shift, raised, temperature) + kernel.flatten(0, 1).sum(0)
            self.shift = raised
        return sums

    def _update_samples(self, positions: slice, *, is_last: bool) -> Float[Tensor, " k"]:
        """Update the factors v of a slice; the sums over its samples that the next u needs, or loss and gradient."""
        samples, logits = self._logits(positions)
        sums = torch.zeros_like(self.bias_gradient)
        for part, v in self._parts(logits, self.v[positions]):
            kernel = plain.kernel(part, self.shift, self.settings.target_temperature)
            v.copy_(plain.divide(v, (self.u @ kernel.mT).mT))
            if is_last:
                self._leave_difference(part, kernel.mul_(self.u).mul_(v))
            else:
                sums += (v.mT @ kernel).sum((0, 1))
        if is_last:
            self._add_gradient(samples, logits)
        return sums

    def _logits(self, positions: slice) -> tuple[Float[Tensor, "s b d"], Float[Tensor, "s b k"]]:
        """The samples of a slice, and their logits."""
        samples = self.tokens[:, positions]
        if self.earlier is not None:
            samples = torch.cat([samples, self.earlier[:, positions]])
        samples = plain.normalized(samples.transpose(0, 1)).contiguous()
        return samples, plain.logits(samples, self.prototypes, self.bias, self.settings.precision)

    def _parts(self, *tensors: Float[Tensor, "s ..."]) -> Iterator[tuple[Tensor, ...]]:
        """What is balanced at a time."""
        return zip(*(tensor.split(self.planned.balanced) for tensor in tensors), strict=True)

    def _leave_difference(self, logits: Float[Tensor, "s b k"], assignments: Float[Tensor, "s b k"]) -> None:
        """Add the batch's own samples to the loss, and leave softmax - assignments in place of their logits."""
        own, temperature = slice(self.own), self.settings.prediction_temperature
        self.loss += plain.cross_entropy(logits[:, own], assignments[:, own], temperature)[0]

    def _add_gradient(self, samples: Float[Tensor, "s b d"], difference: Float[Tensor, "s b k"]) -> None:
        """Of the batch's own samples."""
        samples, difference = (value[:, : self.own].flatten(0, 1) for value in (samples, difference))
        product(samples.t(), difference, self.settings.precision, self.gradient)
        self.bias_gradient += difference.sum(0)
