"""The formulas of the online clustering (paper: online clustering, positional collapse).

The logits of a sample x, a teacher's token of length 1, are its products with the prototypes C: l = x C^T + bias.
Sinkhorn-Knopp starts from the kernel K = exp((l - shift) / T_target), where the shift of a prototype is its largest
logit among the samples, so that K is at most 1. The first division of prototypes cancels the shift, up to eps. Each
iteration divides every prototype by its sum over samples + eps, then every sample by its sum over prototypes + eps. The
result is u K v, with a factor u of each prototype and a factor v of each sample, so only these vectors are updated:

    u <- u / (u sum over samples(K v) + eps)          v <- v / (v sum over prototypes(K u) + eps)

The assignments are u K v after the last division. The loss is the cross-entropy of softmax(l / T_prediction) to them,
summed over samples; `walk.py` averages. In the paper's letters assignments are a' and T_target is tau'; the softmax is
a, with tau.

Arrays are (g b k): g groups that are balanced each by itself (positionwise: a group is a position; standard: one group
of all patches), b samples and k prototypes. u is (g 1 k), v is (g b 1). `walk.py` cuts the tokens of a batch into such
arrays.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.method.clustering.precision import ProductPrecision, product
from capi.types import Float, Reduction

EPS = 1e-8
# The factor of a sample whose kernel is 0 grows by 1 / eps in each iteration; infinity times 0 would be NaN.
LARGEST_FACTOR = 1e37


def normalized(tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Tokens as they are clustered: in float32, of length 1."""
    return F.normalize(tokens.float(), dim=-1, eps=1e-7)


def logits_of(
    samples: Float[Tensor, "g b d"],
    prototypes: Float[Tensor, "k d"],
    bias: Float[Tensor, " k"] | None,
    precision: ProductPrecision = "float32",
) -> Float[Tensor, "g b k"]:
    """l = x C^T + bias."""
    return product(samples.flatten(0, 1), prototypes.t(), precision, bias).unflatten(0, samples.shape[:2])


def gibbs_kernel(
    logits: Float[Tensor, "g b k"], shift: Float[Tensor, "g_or_one b_or_one k"], temperature: float
) -> Float[Tensor, "g b k"]:
    """K = exp((l - shift) / T), by exp2, several times as fast as exp on a CPU."""
    exponents = (logits - shift).div_(temperature * math.log(2))
    # Cut to 0 below 2^-120: subnormal floats (below 2^-126) are slow.
    return F.threshold(exponents, -120.0, -torch.inf, inplace=True).exp2_()


def sinkhorn(
    kernel: Float[Tensor, "g b k"], iterations: int, reduction: Reduction
) -> tuple[Float[Tensor, "g 1 k"], Float[Tensor, "g b 1"]]:
    """u and v after so many iterations, without the last division of samples, which `assign` does.

    The reduction adds up the samples of all processes.
    """
    u, v = torch.ones_like(kernel[:, :1]), torch.ones_like(kernel[..., :1])
    for iteration in range(iterations):
        # In the first one v is still 1.
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
    """u with mean 1, and the same u K v. Otherwise u grows and v shrinks with every iteration where samples are few."""
    mean = u.mean(-1, keepdim=True)
    return u / mean, (v * mean).clamp_max(LARGEST_FACTOR)


def assign(
    kernel: Float[Tensor, "g b k"], u: Float[Tensor, "g_or_one 1 k"], v: Float[Tensor, "g b 1"]
) -> tuple[Float[Tensor, "g b k"], Float[Tensor, "g b 1"]]:
    """u K v divided by its sums over prototypes + eps, and what these assignments add up to: below 1 where eps matters.

    Overwrites the kernel. The sums are computed here, since targets are rebuilt later from logits that may round
    differently.
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
    # Not softmax - assignments: totals may be below 1.
    return loss, torch.softmax(logits, dim=-1).mul_(totals).sub_(assignments)
