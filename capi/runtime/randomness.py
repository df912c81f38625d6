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
    CROP = 4
    FLIP = 5
    REPLACEMENT = 6
    ORDER = 7
    STEP = 8
    BLOCKS = 9
    WINDOW = 10
    SOURCE = 11
    PACKING = 12
    COLOR = 13


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


def permuted(
    positions: Int[Tensor, " b"],
    size: int,
    seed: int,
    epoch: Int[Tensor, " b"],
    *,
    stream: Stream = Stream.ORDER,
    rounds: int = 6,
) -> Int[Tensor, " b"]:
    """Where a shuffle of range(size), another one for each epoch, puts these positions; nothing is stored.

    A Feistel network permutes the next power of 4; what it leads outside of the range is sent through again, which
    ends within the range because a permutation walks in cycles.
    """
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    low = np.uint64(2 ** int(half) - 1)
    keys = _absorb(np.full(epoch.shape, seed % 2**64, dtype=np.uint64), np.uint64(stream))
    keys = _absorb(keys, epoch.numpy().astype(np.uint64))
    result = positions.numpy().astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & low
        for number in range(rounds):
            mixed = _absorb(_absorb(keys[outside], np.uint64(number)), right)
            left, right = right, left ^ (mixed & low)
        result[outside] = (left << half) | right
        outside = result >= size
    return torch.from_numpy(result.astype(np.int64))


def source_seed(seed: int, number: int) -> int:
    """The seed of one of several sources, so that two of the same size are not shuffled alike."""
    state = _absorb(np.array([seed % 2**64], dtype=np.uint64), np.uint64(Stream.SOURCE))
    return int(_absorb(state, np.uint64(number))[0])


def step_seed(seed: int, step: int, process: int = 0) -> int:
    """The seed of what torch itself draws within a step (stochastic depth), so that resuming needs no state."""
    state = np.array([seed % 2**64], dtype=np.uint64)
    for word in (Stream.STEP, step, process):
        state = _absorb(state, np.uint64(word))
    return int(state[0] >> np.uint64(1))


def _absorb(state: _UINT64, word: _UINT64 | np.uint64) -> _UINT64:
    """Mix a word into each state; unsigned arrays wrap around silently, as the mixing needs."""
    z = state * _GOLDEN_GAMMA + word + _GOLDEN_GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
