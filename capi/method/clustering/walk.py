"""The clustering in bounded memory: the b x n x k assignments never exist together.

Positions are walked over in slices that fit a memory budget, and the formulas of `plain.py` are applied to one slice
after the other. Each adds its share to the loss and to the prototypes' gradient

    (softmax(l / T_prediction) * totals - assignments)^T x / (T_prediction * tokens)

and leaves the factors from which the assignment of any of its patches is rebuilt. Positionwise each position is a group
of its own, so that one walk is enough. With standard Sinkhorn all patches are one group: one slice where they fit the
budget, as if they were images of a single position. Where they do not, each iteration is a walk, which computes the
logits again and keeps the factors alone.

Tokens of earlier batches (`queue.py`) may stand in a group behind the batch's own. They are balanced with them, but
have no part in loss and gradient.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from capi.errors import CapiError, counted
from capi.method.clustering import plain
from capi.method.clustering.precision import ProductPrecision, gradient_products, product
from capi.runtime.devices import is_accelerator
from capi.types import Bool, Float, Int, Reduction

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
    precision: ProductPrecision = "float32"

    def groups(self, positions: int) -> int:
        """How many groups of patches are balanced each by itself: every position, or one of all together."""
        return positions if self.sinkhorn == "positionwise" else 1

    @property
    def rounds_gradient(self) -> bool:
        """Whether the logits' gradient is held in bfloat16, or in float32 in place of the logits."""
        return gradient_products(self.precision) == "bfloat16"


class Slices(NamedTuple):
    """How many positions one matrix product handles, and how many of them are clustered at a time."""

    positions: int
    at_once: int


def plan_slices(
    balanced: int,
    positions: int,
    prototypes: int,
    width: int,
    settings: ClusteringSettings,
    *,
    accelerator: bool = False,
) -> Slices:
    """The largest slices within the budget, or smaller ones of equal size. So many images are balanced together.

    Standard Sinkhorn has one slice where there is room for all positions, and is streamed where there is not.
    """
    # Of a position: logits, and tokens in three stages (gathered, in float32, of L2 norm 1).
    held = 4 * balanced * (prototypes + 3 * width) + 2 * balanced * prototypes * settings.rounds_gradient
    # Where it is clustered: two more arrays (kernel and its product with a factor; assignments and probabilities), and
    # some vectors of prototypes.
    clustered = 4 * (2 * balanced + 6) * prototypes
    # The default makes room for one position, however large.
    default = max(ACCELERATOR_BYTES if accelerator else CPU_BYTES, held + clustered)
    budget = default if settings.chunk_bytes is None else settings.chunk_bytes
    at_once = min(budget // (held + clustered), positions)
    if at_once < 1:
        raise CapiError(
            f"clustering.chunk_mib = {budget / 2**20:g} is too little for one position of "
            f"{counted(balanced, 'image')}, whose "
            f"arrays need {(held + clustered) / 2**20:.3g} MiB: set more, or null"
        )
    if settings.sinkhorn == "standard" and at_once == positions:
        return Slices(positions, positions)
    largest = at_once
    if not accelerator:
        at_once = min(at_once, max(_CACHED_BYTES // clustered, 1))
        largest = min((budget - at_once * clustered) // held, positions)
    fewest = -(-positions // largest)
    # Up to half as many slices again, if that makes them equal: another size is compiled once more.
    number = next((n for n in range(fewest, 1 + fewest * 3 // 2) if positions % n == 0), fewest)
    size = -(-positions // number)
    return Slices(size, min(at_once, size))


class Factors(NamedTuple):
    """What rebuilds the assignment of any patch from its logits: `plain.assign` of the kernel K.

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
    factors: Factors


class ClusteredSlice(NamedTuple):
    """The factors of some groups, and the sum of their loss."""

    shift: Float[Tensor, "g 1 k"]
    u: Float[Tensor, "g 1 k"]
    v: Float[Tensor, "g b 1"]
    loss: Float[Tensor, ""]


def cluster_slice(
    logits: Float[Tensor, "g b k"],
    own_samples: int,
    settings: ClusteringSettings,
    reduction: Reduction,
    gradient_out: Float[Tensor, "g _ k"] | None = None,
) -> ClusteredSlice:
    """Balance all samples of each group; the first `own_samples` are of this batch and make the loss.

    The gradient by l / T_prediction is written to `gradient_out`, or takes the place of their logits. This is the
    function that is compiled.
    """
    shift = reduction.max(logits.amax(1, keepdim=True))
    kernel = plain.kernel_of(logits, shift, settings.target_temperature)
    u, v = plain.sinkhorn(kernel, settings.iterations, reduction)
    assignments, totals = plain.assign(kernel[:, :own_samples], u, v[:, :own_samples])
    own_logits = logits[:, :own_samples]
    if gradient_out is not None and torch.compiler.is_compiling():
        # Logits are overwritten below, and a compiler would write them back. A copy it never stores.
        own_logits = own_logits.clone()
    loss, gradient = plain.cross_entropy(own_logits, assignments, totals, settings.prediction_temperature)
    (own_logits if gradient_out is None else gradient_out).copy_(gradient)
    return ClusteredSlice(shift, u, v, loss)


def cluster(
    tokens: Float[Tensor, "b n d"],
    prototypes: Float[Tensor, "k d"],
    bias: Float[Tensor, " k"] | None,
    settings: ClusteringSettings,
    reduction: Reduction,
    earlier: Float[Tensor, "q n d"] | None = None,
    absent: Bool[Tensor, " q"] | None = None,
    cluster_slice: Callable[..., ClusteredSlice] = cluster_slice,
) -> Clustered:
    """Cluster all tokens. `earlier` ones are balanced with the batch, and add nothing to loss and gradient; those of
    `absent` images not even that.

    `cluster_slice` may be what a compiler made of it.
    """
    images, positions, width = tokens.shape
    balanced, accelerator = images + (0 if earlier is None else len(earlier)), is_accelerator(tokens.device)
    slices = plan_slices(balanced, positions, len(prototypes), width, settings, accelerator=accelerator)
    streamed = settings.sinkhorn == "standard" and slices.at_once < positions
    together = settings.sinkhorn == "standard" and not streamed
    if together:
        # One group, as if all patches were images of a single position: (b n, 1, d), image by image.
        tokens = tokens.flatten(0, 1)[:, None]
        earlier = None if earlier is None else earlier.flatten(0, 1)[:, None]
        absent = None if absent is None else absent.repeat_interleave(positions)
    bias = None if bias is None else bias.float()
    walk = _Walk(tokens, prototypes.float(), bias, settings, reduction, earlier, absent)
    if streamed:
        walk.balance_all_together(slices)
    else:
        walk.balance_each_group(slices, cluster_slice)
    shift, u = (factor[:, 0].expand(positions, -1) for factor in (walk.shift, walk.u))
    v = walk.v[:, : walk.own_samples, 0]
    count = images * positions
    scale = 1 / (settings.prediction_temperature * count)
    factors = Factors(shift, u, v.reshape(images, positions).t() if together else v)
    return Clustered(walk.loss / count, walk.gradient.t() * scale, walk.bias_gradient * scale, factors)


def rebuild(
    tokens: Float[Tensor, "m p d"],
    predict_index: Int[Tensor, "m p"],
    prototypes: Float[Tensor, "k d"],
    bias: Float[Tensor, " k"] | None,
    settings: ClusteringSettings,
    factors: Factors,
    first_image: int = 0,
) -> Float[Tensor, "m p k"]:
    """The assignments of the predicted patches of some images, whose first had this number when all were balanced.

    The sums over prototypes are of these logits, so that they cancel what a product of another shape rounds otherwise.
    """
    bias = None if bias is None else bias.float()
    # Each patch is a sample with factors of its own: rows (m p, 1, d), image by image.
    positions = predict_index.flatten()
    samples = plain.normalized(tokens).flatten(0, 1)[:, None]
    logits = plain.logits_of(samples, prototypes.float(), bias, settings.precision)
    kernel = plain.kernel_of(logits, factors.shift[positions, None], settings.target_temperature)
    v = factors.v[:, first_image : first_image + len(tokens)].t().gather(1, predict_index)
    assignments, _ = plain.assign(kernel, factors.u[positions, None], v.view(-1, 1, 1))
    return assignments.view(*predict_index.shape, -1)


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
        absent: Bool[Tensor, " q"] | None,
    ) -> None:
        self.tokens, self.earlier, self.absent = tokens, earlier, absent
        self.prototypes, self.bias = prototypes, bias
        self.settings, self.reduction = settings, reduction
        self.own_samples, positions, width = tokens.shape
        balanced, k = self.own_samples + (0 if earlier is None else len(earlier)), len(prototypes)
        groups = settings.groups(positions)
        self.shift, self.u = prototypes.new_empty(groups, 1, k), prototypes.new_ones(groups, 1, k)
        self.v = prototypes.new_ones(positions, balanced, 1)
        self.loss = prototypes.new_zeros(())
        self.gradient = prototypes.new_zeros(width, k)
        self.bias_gradient = prototypes.new_zeros(k)

    def balance_each_group(self, slices: Slices, cluster_slice: Callable[..., ClusteredSlice]) -> None:
        """Each group is balanced by itself: one walk."""
        for positions in self._slices(slices):
            self._cluster(positions, slices.at_once, cluster_slice)

    def balance_all_together(self, slices: Slices) -> None:
        """All positions are balanced together: a walk for the shift and the first sums, and one for each iteration.

        An iteration divides the prototypes, then walks to divide the samples; the last walk assigns instead.
        """
        self.shift.fill_(-torch.inf)
        sums = torch.zeros_like(self.u)
        for positions in self._slices(slices):
            sums = self._raise_shift(positions, slices.at_once, sums)
        # From the shift of this process to that of all.
        highest = self.reduction.max(self.shift)
        sums.mul_(plain.kernel_of(self.shift, highest, self.settings.target_temperature))
        self.shift = highest
        for iteration in range(1, self.settings.iterations + 1):
            self.u, self.v = plain.with_mean_one(plain.divided(self.u, self.reduction.sum(sums)), self.v)
            sums = torch.zeros_like(self.u)
            for positions in self._slices(slices):
                if iteration < self.settings.iterations:
                    sums += self._update_samples(positions, slices.at_once)
                else:
                    self._assign(positions, slices.at_once)

    def _cluster(self, positions: slice, at_once: int, cluster_slice: Callable[..., ClusteredSlice]) -> None:
        samples, logits = self._logits(positions)
        gradient, apart = logits[:, : self.own_samples], self.settings.rounds_gradient
        if apart:
            gradient = torch.empty_like(gradient, dtype=torch.bfloat16)
        factors = self.shift[positions], self.u[positions], self.v[positions]
        for part, of_part, shift, u, v in _parts(at_once, logits, gradient, *factors):
            out = of_part if apart else None
            clustered = cluster_slice(part, self.own_samples, self.settings, self.reduction, out)
            shift.copy_(clustered.shift)
            u.copy_(clustered.u)
            v.copy_(clustered.v)
            self.loss += clustered.loss
            self.bias_gradient += of_part.sum((0, 1), dtype=torch.float32)
        self._add_gradient(samples, gradient)

    def _raise_shift(self, positions: slice, at_once: int, sums: Float[Tensor, "1 1 k"]) -> Float[Tensor, "1 1 k"]:
        """Raise the shift to what a slice has, and add its kernel to sums that follow the shift."""
        temperature = self.settings.target_temperature
        for (part,) in _parts(at_once, self._logits(positions)[1]):
            raised = torch.maximum(self.shift, part.amax((0, 1), keepdim=True))
            kernel = plain.kernel_of(part, raised, temperature)
            sums = sums * plain.kernel_of(self.shift, raised, temperature) + kernel.flatten(0, 1).sum(0)
            self.shift = raised
        return sums

    def _update_samples(self, positions: slice, at_once: int) -> Float[Tensor, "1 1 k"]:
        """Update the factors v of a slice, and give the sums over its samples that the next u needs."""
        sums = torch.zeros_like(self.u)
        for part, v in _parts(at_once, self._logits(positions)[1], self.v[positions]):
            kernel = plain.kernel_of(part, self.shift, self.settings.target_temperature)
            v.copy_(plain.divided(v, (kernel * self.u).sum(-1, keepdim=True)))
            sums += (kernel * v).sum((0, 1))
        return sums

    def _assign(self, positions: slice, at_once: int) -> None:
        """Add a slice to loss and gradient."""
        samples, logits = self._logits(positions)
        for part, v in _parts(at_once, logits[:, : self.own_samples], self.v[positions, : self.own_samples]):
            kernel = plain.kernel_of(part, self.shift, self.settings.target_temperature)
            assigned, totals = plain.assign(kernel, self.u, v)
            loss, gradient = plain.cross_entropy(part, assigned, totals, self.settings.prediction_temperature)
            self.loss += loss
            self.bias_gradient += part.copy_(gradient).sum((0, 1))
        self._add_gradient(samples, logits[:, : self.own_samples])

    def _slices(self, slices: Slices) -> Iterator[slice]:
        positions = self.tokens.shape[1]
        for first in range(0, positions, slices.positions):
            yield slice(first, min(first + slices.positions, positions))

    def _logits(self, positions: slice) -> tuple[Float[Tensor, "g b d"], Float[Tensor, "g b k"]]:
        """The samples of a slice, and their logits."""
        samples = self.tokens[:, positions]
        if self.earlier is not None:
            samples = torch.cat([samples, self.earlier[:, positions]])
        # From (b g d) to (g b d): the samples of a group lie together, own ones before earlier ones.
        samples = plain.normalized(samples.transpose(0, 1)).contiguous()
        logits = plain.logits_of(samples, self.prototypes, self.bias, self.settings.precision)
        if self.absent is not None:
            # Their kernel is 0, so that no sum has them.
            logits[:, self.own_samples :].masked_fill_(self.absent[:, None], -torch.inf)
        return samples, logits

    def _add_gradient(self, samples: Float[Tensor, "g b d"], gradient: Float[Tensor, "g _ k"]) -> None:
        """The prototypes' gradient is that of the batch's own samples, times them."""
        # Rows of both position by position: (d, g b) @ (g b, k).
        own_samples = samples[:, : self.own_samples].flatten(0, 1)
        precision = gradient_products(self.settings.precision)
        product(own_samples.t(), gradient.flatten(0, 1), precision, self.gradient, out=self.gradient)


def _parts(at_once: int, *tensors: Float[Tensor, "g ..."]) -> Iterator[tuple[Tensor, ...]]:
    """What is balanced at a time."""
    return zip(*(tensor.split(at_once) for tensor in tensors), strict=True)
