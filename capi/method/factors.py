"""What is kept of a clustering to rebuild the assignment of any patch later, from its token.

Sinkhorn's assignments are a kernel times one factor for each prototype and one for each sample, so that two vectors say
all of them. Micro-batches that were balanced together have their targets made when their turn comes.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.types import Float, Int

_NORMALIZE_EPS = 1e-7
# Logits are in octaves, exponents of two: on a CPU those are computed in nearly half the time of exponents of e.
OCTAVE = math.log(2)


class Factors(NamedTuple):
    """What rebuilds the assignment of any patch from its token: exp(l / T_target) * 2^log_prototypes * samples.

    One vector for each group of samples that are balanced together, and one number for each sample. Rows are in
    position-major order, and a group holds `group_size` of them.
    """

    log_prototypes: Float[Tensor, "g k"]
    samples: Float[Tensor, " rows"]
    group_size: int


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
    targets.addmm_(normalized(chosen), prototypes.float().t(), alpha=1 / (target_temperature * OCTAVE))
    return targets.exp2_().mul_(factors.samples[row, None]).unflatten(0, predict_index.shape)


def normalized(rows: Float[Tensor, "s d"]) -> Float[Tensor, "s d"]:
    """Tokens as they are clustered: in float32, of length 1."""
    return F.normalize(rows.float(), dim=-1, eps=_NORMALIZE_EPS)
