"""Counter-based random numbers: a sample's draws depend on (seed, step, its index in the global batch) alone.

No generator has a state, so any process or worker can draw for any sample, in any order, and a resumed or resharded
run sees exactly what the uninterrupted one saw. A whole batch is drawn at once. The mixing function is the finaliser
of splitmix64 (Steele, Lea and Flood, 2014).
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from capi.types import Float, Int

_UINT64 = npt.NDArray[np.uint64]
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class Stream(IntEnum):
    """Each use of randomness has a stream of its own, so that adding one does not change the others."""

    MASK = 1
    ROLL = 2
    PREDICT = 3


def sample_keys(seed: int, step: int, sample_index: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """One key for each sample; `sample_index` counts within the global batch."""
    keys = np.full(sample_index.shape, seed % 2**64, dtype=np.uint64)
    keys = _absorb(keys, np.uint64(step % 2**64))
    keys = _absorb(keys, sample_index.numpy().astype(np.uint64))
    return torch.from_numpy(keys.view(np.int64))


def uniforms(keys: Int[Tensor, " b"], stream: Stream, count: int) -> Float[Tensor, "b {count}"]:
    """`count` float64 numbers in [0, 1) for each key."""
    streams = _absorb(keys.numpy().view(np.uint64), np.uint64(stream))
    bits = _absorb(streams[:, None], np.arange(count, dtype=np.uint64)[None, :])
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)


def _absorb(state: _UINT64, word: _UINT64 | np.uint64) -> _UINT64:
    """Mix a word into each state; unsigned arrays wrap around silently, as the mixing needs."""
    z = state * _GOLDEN_GAMMA + word + _GOLDEN_GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
