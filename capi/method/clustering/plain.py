"""The formulas of the online clustering (paper: online clustering, positional collapse).

The logits of a sample x, a teacher's token of L2 norm 1, are its products with the prototypes C: l = x C^T + bias. (The
released models have this bias, the paper's formula does not.)
Sinkhorn-Knopp starts from the kernel K = exp((l - shift) / T_target), where the shift of a prototype is its largest
logit among the samples, so that K is at most 1. The first division of prototypes cancels the shift, up to eps. Each
iteration divides the assignments to each prototype by their sum over samples + eps, then those of each sample by their
sum over prototypes + eps. The result is u K v, with a factor u of each prototype and a factor v of each sample, so only
these vectors are updated:

    u <- u / (u sum over samples(K v) + eps)          v <- v / (v sum over prototypes(K u) + eps)

The assignments are u K v after the last division. The loss is the cross-entropy of softmax(l / T_prediction) to them,
summed over samples; `walk.py` averages. In the paper's letters assignments are a' and T_target is tau'; the softmax is
a, with tau; the student's temperature is another one. What the paper calls p, the number of prototypes, is k here.

Arrays are (g b k): g groups that are balanced each by itself (positionwise: a group is a position; standard: one group
of all patches), b samples and k prototypes. u is (g 1 k), v is (g b 1); u and shift are (1 1 k) where one serves all
slices of a single group. `walk.py` cuts the tokens of a batch into such
arrays.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.method.clustering.precision import ProductPrecision, product
from capi.types import Float, Reduction

# Of the divisions of Sinkhorn-Knopp, and of the norm of a token, as the released code has them.
EPS, NORM_EPS = 1e-8, 1e-7
# The factor of a sample whose kernel is 0 for all prototypes (an absent one of the queue) grows by 1 / eps in each
# iteration. It stays below the largest float32, 3.4e38, since infinity times 0 would be NaN.
LARGEST_FACTOR = 1e37


def normalized(tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Tokens as they are clustered: in float32, of L2 norm 1."""
    return F.normalize(tokens.float(), dim=-1, eps=NORM_EPS)


def logits_of(
    samples: Float[Tensor, "g b d"],
    prototypes: Float[Tensor, "k d"],
    bias: Float[Tensor, " k"] | None,
    precision: ProductPrecision = "float32",
) -> Float[Tensor, "g b k"]:
    """l = x C^T + bias."""
    return product(samples.flatten(0, 1), prototypes.t(), precision, bias).unflatten(0, samples.shape[:2])


def kernel_of(
    logits: Float[Tensor, "g b k"], shift: Float[Tensor, "g_or_one 1 k"], temperature: float
) -> Float[Tensor, "g b k"]:
    """K = exp(x / T) = 2^(x / (T ln 2)) with x = l - shift: exp2 is several times as fast as exp on a CPU."""
    exponents = (logits - shift).div_(temperature * math.log(2))
    # 0 below 2^-120, with some room above 2^-126, where floats are subnormal and slow.
    return F.threshold(exponents, -120.0, -torch.inf, inplace=True).exp2_()


def sinkhorn(
    kernel: Float[Tensor, "g b k"], iterations: int, reduction: Reduction
) -> tuple[Float[Tensor, "g 1 k"], Float[Tensor, "g b 1"]]:
    """u and v after so many iterations, without the last division of samples, which `assign` does.

    The reduction adds up the samples of all processes.
    """
    u, v = torch.ones_like(kernel[:, :1]), torch.ones_like(kernel[..., :1])
    for iteration in range(iterations):
        # The division of samples that ends the iteration before; `assign` makes the last one.
        if iteration > 0:
            v = divided(v, (kernel * u).sum(-1, keepdim=True))
        u = divided(u, reduction.sum((kernel * v).sum(1, keepdim=True)))
        u, v = with_mean_one(u, v)
    return u, v


def divided(factor: Float[Tensor, "*factors"], sums: Float[Tensor, "*factors"]) -> Float[Tensor, "*factors"]:
    """u or v after its division; `sums` are of the kernel times the other factor."""
    return (factor / (factor * sums + EPS)).clamp_max(LARGEST_FACTOR)


def with_mean_one(
    u: Float[Tensor, "g_or_one 1 k"], v: Float[Tensor, "g b 1"]
) -> tuple[Float[Tensor, "g_or_one 1 k"], Float[Tensor, "g b 1"]]:
    """u with mean 1, and the same u K v.

    The divisions make all assignments add up to k and to b in turn, so that otherwise u grows, and v shrinks, by k / b
    in every iteration.
    """
    mean = u.mean(-1, keepdim=True)
    return u / mean, (v * mean).clamp_max(LARGEST_FACTOR)


def assign(
    kernel: Float[Tensor, "g b k"], u: Float[Tensor, "g_or_one 1 k"], v: Float[Tensor, "g b 1"]
) -> tuple[Float[Tensor, "g b k"], Float[Tensor, "g b 1"]]:
    """u K v divided by its sums over prototypes + eps, and what these assignments add up to: below 1 where eps matters.

    Overwrites the kernel. `sinkhorn` leaves this division to here: `walk.rebuild` computes logits again, and where they
    round differently their own sums cancel it.
    """
    scaled = kernel.mul_(u).mul_(v)
    sums = scaled.sum(-1, keepdim=True)
    return scaled.div_(sums + EPS), sums / (sums + EPS)


def cross_entropy(
    logits: Float[Tensor, "g b k"],
    assignments: Float[Tensor, "g b k"],
    totals: Float[Tensor, "g b 1"],
    temperature: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, "g b k"]]:
    """- sum of assignments log softmax(l / T), and its gradient by l / T. `totals` are what assignments add up to.

    Overwrites the logits with l / T.
    """
    logits.div_(temperature)
    loss = -torch.log_softmax(logits, dim=-1).mul_(assignments).sum()
    # The softmax times totals, since assignments add up to these, and not always to 1.
    return loss, torch.softmax(logits, dim=-1).mul_(totals).sub_(assignments)
