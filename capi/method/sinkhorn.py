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

from typing import Literal

import torch
from torch import Tensor

from capi.types import Float, Reduction

SinkhornVariant = Literal["positionwise", "standard"]
EPS = 1e-8
# A sample that no prototype reaches has sums of 0, and its factor grows by 1 / eps each time; its assignments stay 0 as
# long as the factor stays finite.
_LARGEST_FACTOR = 1e30


class OneProcess:
    """The reduction of a run with a single process: its batch is the global batch."""

    def sum(self, value: Tensor) -> Tensor:
        return value

    def max(self, value: Tensor) -> Tensor:
        return value


def update(factor: Tensor, sums: Tensor) -> Tensor:
    """One side of an iteration: `sums` are the kernel's products with the other side's factor."""
    return (factor / (factor * sums + EPS)).clamp_(max=_LARGEST_FACTOR)


def balance(
    kernel: Float[Tensor, "g s k"], iterations: int, reduction: Reduction
) -> tuple[Float[Tensor, "g k"], Float[Tensor, "g s"]]:
    """The factors (u, v) of each group after so many iterations, for kernels held in memory."""
    groups, samples, prototypes = kernel.shape
    u, v = kernel.new_ones(groups, prototypes), kernel.new_ones(groups, samples)
    for _ in range(iterations):
        u, v = centred(update(u, reduction.sum(over_samples(kernel, v))), v)
        v = update(v, over_prototypes(kernel, u))
    return u, v


def centred(u: Float[Tensor, "g k"], v: Float[Tensor, "g s"]) -> tuple[Float[Tensor, "g k"], Float[Tensor, "g s"]]:
    """The same assignments with factors of moderate size: otherwise u grows and v shrinks with every iteration."""
    mean = u.log().mean(1, keepdim=True).exp()
    return u / mean, (v * mean).clamp_(max=_LARGEST_FACTOR)


def over_samples(kernel: Float[Tensor, "g s k"], v: Float[Tensor, "g s"]) -> Float[Tensor, "g k"]:
    """K^T v for each group."""
    return _products(kernel.transpose(1, 2), v)


def over_prototypes(kernel: Float[Tensor, "g s k"], u: Float[Tensor, "g k"]) -> Float[Tensor, "g s"]:
    """K u for each group."""
    return _products(kernel, u)


def _products(matrices: Float[Tensor, "g i j"], vectors: Float[Tensor, "g j"]) -> Float[Tensor, "g i"]:
    """A matrix-vector product for each group. On a CPU the batched product is several times slower than a loop."""
    if matrices.device.type == "cpu":
        return torch.stack([matrix.mv(vector) for matrix, vector in zip(matrices, vectors, strict=True)])
    return torch.bmm(matrices, vectors[..., None])[..., 0]
