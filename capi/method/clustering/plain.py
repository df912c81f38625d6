"""The formulas of the online clustering (paper: online clustering, positional collapse).

The logits of a sample x, a teacher's token of length 1, are its products with the prototypes C: l = x C^T + bias. Their
kernel is K = exp((l - shift) / T_target), the shift being each prototype's largest logit among the samples. It keeps K
at most 1, and changes the result only through eps, since it is a factor of each prototype, which u takes up.
Sinkhorn-Knopp divides it in turns by its sums over samples + eps, for each prototype, and by its sums over prototypes
+ eps, for each sample. That leaves assignments of the form u K v, with a factor u for each prototype and v for each
sample, and only these are updated. The loss is the cross-entropy of softmax(l / T_prediction) to the assignments.

Arrays are (s b k): s groups that are balanced each by itself (positionwise: a group is a position), b samples and k
prototypes. u is (s 1 k), v is (s b 1). The first `own` samples of a group are of this batch; those after them come from
the queue of earlier tokens (`queue.py`) and have no part in the loss.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.method.clustering.precision import Precision, product
from capi.runtime.devices import is_accelerator
from capi.types import Float, Reduction

EPS = 1e-8
# So no factor exceeds 1e37. That of a sample whose kernel is 0 would become infinite, and its assignments NaN.
SMALLEST_DIVISOR = 1e-37


def normalized(tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Tokens as they are clustered: in float32, of length 1."""
    return F.normalize(tokens.float(), dim=-1, eps=1e-7)


def logits(
    samples: Float[Tensor, "s b d"],
    prototypes: Float[Tensor, "k d"],
    bias: Float[Tensor, " k"] | None,
    precision: Precision = "float32",
) -> Float[Tensor, "s b k"]:
    """l = x C^T + bias."""
    return product(samples.flatten(0, 1), prototypes.t(), precision, bias).unflatten(0, samples.shape[:2])


class Balanced(NamedTuple):
    """Of some groups: what rebuilds their assignments, the sum of their loss, and its gradient by l / T_prediction."""

    shift: Float[Tensor, "s 1 k"]
    u: Float[Tensor, "s 1 k"]
    v: Float[Tensor, "s b 1"]
    loss: Float[Tensor, ""]
    gradient: Float[Tensor, "s own k"]


def balance(
    logits: Float[Tensor, "s b k"],
    own: int,
    reduction: Reduction,
    *,
    iterations: int,
    target_temperature: float,
    prediction_temperature: float,
) -> Balanced:
    """Balance all samples together; the first `own` of each group make the loss. Overwrites the logits."""
    shift = reduction.max(logits.amax(1, keepdim=True))
    weights = kernel(logits, shift, target_temperature)
    u, v = sinkhorn(weights, iterations, reduction)
    assigned, totals = assignments(weights[:, :own], u, v[:, :own])
    return Balanced(shift, u, v, *cross_entropy(logits[:, :own], assigned, totals, prediction_temperature))


def kernel(
    logits: Float[Tensor, "s b k"], shift: Float[Tensor, "s_or_one b_or_one k"], temperature: float
) -> Float[Tensor, "s b k"]:
    """K = exp((l - shift) / T)."""
    return _exp((logits - shift).div_(temperature))


def sinkhorn(
    kernel: Float[Tensor, "s b k"], iterations: int, reduction: Reduction
) -> tuple[Float[Tensor, "s 1 k"], Float[Tensor, "s b 1"]]:
    """The factors after so many iterations. The last division by sums over prototypes is left to `assignments`.

    The reduction adds up the samples of all processes.
    """
    u, v = torch.ones_like(kernel[:, :1]), torch.ones_like(kernel[..., :1])
    for iteration in range(iterations):
        if iteration:
            v = divide(v, over_prototypes(kernel, u))
        u, v = moderate(divide(u, reduction.sum(over_samples(kernel, v))), v)
    return u, v


def assignments(
    kernel: Float[Tensor, "s b k"], u: Float[Tensor, "s_or_one 1 k"], v: Float[Tensor, "s b 1"]
) -> tuple[Float[Tensor, "s b k"], Float[Tensor, "s b 1"]]:
    """u K v after the last division, in place of the kernel; and its sums over prototypes: 1, less if K is near 0."""
    sums = over_prototypes(kernel, u)
    v = divide(v, sums)
    return kernel.mul_(u).mul_(v), sums * v


def over_samples(kernel: Float[Tensor, "s b k"], v: Float[Tensor, "s b 1"]) -> Float[Tensor, "s 1 k"]:
    """The sums of K v over samples."""
    # A compiler makes one kernel of product and sum, so the array of products is never stored.
    return (kernel * v).sum(1, keepdim=True) if torch.compiler.is_compiling() else v.mT @ kernel


def over_prototypes(kernel: Float[Tensor, "s b k"], u: Float[Tensor, "s_or_one 1 k"]) -> Float[Tensor, "s b 1"]:
    """The sums of u K over prototypes."""
    return (kernel * u).sum(-1, keepdim=True) if torch.compiler.is_compiling() else (u @ kernel.mT).mT


def divide(factor: Float[Tensor, "*factors"], sums: Float[Tensor, "*factors"]) -> Float[Tensor, "*factors"]:
    """factor / (factor * sums + eps): half an iteration."""
    return (sums + EPS / factor).clamp_min_(SMALLEST_DIVISOR).reciprocal_()


def moderate(
    u: Float[Tensor, "_ 1 k"], v: Float[Tensor, "s b 1"]
) -> tuple[Float[Tensor, "_ 1 k"], Float[Tensor, "s b 1"]]:
    """Scale u to mean 1, and v by the inverse, so that u K v stays the same.

    Without this, u grows and v shrinks with every iteration where samples are few.
    """
    mean = u.mean(-1, keepdim=True)
    return u / mean, v * mean


def cross_entropy(
    logits: Float[Tensor, "s b k"],
    assignments: Float[Tensor, "s b k"],
    totals: Float[Tensor, "s b 1"],
    temperature: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, "s b k"]]:
    """The cross-entropy of softmax(l / T) to assignments of these sums, added up over samples, and its gradient.

    The gradient by l / T is totals * softmax - assignments. It overwrites the logits, except in compiled code.
    """
    if torch.compiler.is_compiling():
        log_probabilities = torch.log_softmax(logits / temperature, dim=-1)
    else:
        log_probabilities = torch.log_softmax(logits.div_(temperature), dim=-1, out=logits)
    loss = -(assignments * log_probabilities).sum()
    return loss, _exp(log_probabilities).mul_(totals).sub_(assignments)


def _exp(exponents: Tensor) -> Tensor:
    """e^x in place."""
    if is_accelerator(exponents.device) or torch.compiler.is_compiling():
        return exponents.exp_()
    # A CPU computes powers of two several times as fast. Below 2^-120 they are 0 here, since floats near 2^-126 lose
    # their normal form, which makes all that follows slow.
    return F.threshold(exponents.mul_(1 / math.log(2)), -120.0, -torch.inf, inplace=True).exp2_()
