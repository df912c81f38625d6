"""Sinkhorn-Knopp: balanced soft assignments of samples to prototypes (paper: online clustering, positional collapse).

With logits l and temperature T the kernel is K = exp((l - shift) / T), the shift being each prototype's maximum. Each
iteration divides the assignments by their sum over samples for each prototype, then by their sum over prototypes for
each sample. The assignments always have the form u K v with a factor u for each prototype and v for each sample, so
only the two vectors are updated:

    u /= u * (K^T v) + eps        v /= v * (K u) + eps

which is the same arithmetic, eps included, without rewriting the matrix. `positionwise` balances the images of a batch
separately at each position, which leaves no information about position in the assignments; `standard` balances all
patches of all images together. Across processes the sums and maxima over samples are those of the global batch.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from capi.types import Float, Reduction

SinkhornVariant = Literal["positionwise", "standard"]
EPS = 1e-8
# A sample that no prototype reaches has sums of 0, and its factor grows by 1 / eps each time; its assignments stay 0 as
# long as the factor stays finite. A sample that one reaches faintly needs a factor as large to be assigned in the end.
LARGEST_FACTOR = 1e37
# A kernel is 0 where the exponent of two is below this: near 2^-126 floats lose their normal form, and become several
# times slower. A sample that far from all prototypes is left unassigned, as eps leaves it for 3 iterations anyway.
SMALLEST_OCTAVE = -120.0
# Near the smallest normal float. A sample that gets no more than this is assigned to nothing.
SMALLEST_REACH = 1e-37


class OneProcess:
    """The reduction of a run with a single process: its batch is the global batch."""

    def sum(self, value: Tensor) -> Tensor:
        return value

    def max(self, value: Tensor) -> Tensor:
        return value


def update(factor: Tensor, sums: Tensor) -> Tensor:
    """One side of an iteration: `sums` are the kernel's products with the other side's factor."""
    divisor = (factor * sums).add_(EPS)
    return torch.div(factor, divisor, out=divisor).clamp_(max=LARGEST_FACTOR)


def first_update(sums: Tensor) -> Tensor:
    """The update of factors that are 1."""
    return (sums + EPS).reciprocal_()


class Balanced(NamedTuple):
    """The factors u and v of each group, and K u: what a sample gets before its own factor."""

    u: Float[Tensor, "g k"]
    v: Float[Tensor, "g s"]
    reached: Float[Tensor, "g s"]


def balance(kernel: Float[Tensor, "g s k"], iterations: int, reduction: Reduction) -> Balanced:
    """The factors of each group after so many iterations, at least one, for kernels held in memory."""
    u = first_update(reduction.sum(kernel.sum(1)))
    reached = over_prototypes(kernel, u)
    v = first_update(reached)
    for _ in range(iterations - 1):
        u, v = centred(update(u, reduction.sum(over_samples(kernel, v))), v)
        reached = over_prototypes(kernel, u)
        v = update(v, reached)
    return Balanced(u, v, reached)


def centred(u: Float[Tensor, "g k"], v: Float[Tensor, "g s"]) -> tuple[Float[Tensor, "g k"], Float[Tensor, "g s"]]:
    """The same assignments with factors of moderate size: otherwise u grows and v shrinks with every iteration."""
    mean = u.mean(1, keepdim=True)
    return u.div_(mean), (v * mean).clamp_(max=LARGEST_FACTOR)


def over_samples(kernel: Float[Tensor, "g s k"], v: Float[Tensor, "g s"]) -> Float[Tensor, "g k"]:
    """K^T v for each group."""
    return _products(kernel.transpose(1, 2), v)


def over_prototypes(kernel: Float[Tensor, "g s k"], u: Float[Tensor, "g k"]) -> Float[Tensor, "g s"]:
    """K u for each group."""
    return _products(kernel, u)


def _products(matrices: Float[Tensor, "g i j"], vectors: Float[Tensor, "g j"]) -> Float[Tensor, "g i"]:
    """A matrix-vector product for each group. On a CPU the batched product is several times slower than a loop."""
    if matrices.device.type != "cpu":
        return torch.bmm(matrices, vectors[..., None])[..., 0]
    products = [torch.mv(matrices[group], vectors[group]) for group in range(len(matrices))]
    return products[0][None] if len(products) == 1 else torch.stack(products)
