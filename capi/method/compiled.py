"""The groups of the clustering in one compiled function, for CPUs (extra `cpu`).

`bounded.py` says the same in steps, each of which walks over the whole kernel of a group. Here a row is worked on for
as long as it is in the cache, and every thread has groups of its own, so that no group's result depends on how many
threads there are. Logits are in octaves, as there.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from capi.method.sinkhorn import EPS, LARGEST_FACTOR, SMALLEST_OCTAVE, SMALLEST_REACH
from capi.types import Float, Int

# Sums may be added up in any order, which vector instructions need. What is infinite or no number stays so.
_compiled = numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_EPS, _LARGEST_FACTOR = np.float32(EPS), np.float32(LARGEST_FACTOR)
_SMALLEST_OCTAVE, _SMALLEST_REACH = np.float32(SMALLEST_OCTAVE), np.float32(SMALLEST_REACH)
# How many numbers are compared side by side.
_LANES = 1024
# Taylor's coefficients of 2^x: for |x| <= 1/2 the next term is 5e-9.
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(math.log(2) ** n / math.factorial(n)) for n in range(1, 8))
_EXPONENT_BIAS, _MANTISSA_SIZE = np.float32(127), np.float32(2**23)


Array = npt.NDArray[Any]


class Scratch(NamedTuple):
    """What one thread works in: a group's kernel (samples x prototypes), and vectors of prototypes and of lanes."""

    kernel: Array
    shift: Array
    u: Array
    sums: Array
    lanes: Array


class _Wanted(NamedTuple):
    """Where targets are to go: those of row r to places[starts[r]] ... places[starts[r + 1] - 1]."""

    targets: Array
    places: Array
    starts: Array


class _Results(NamedTuple):
    """A loss for each group, a number of each kind for each row, and factors of prototypes where they have room."""

    losses: Array
    weights: Array
    v: Array
    reached: Array
    log_prototypes: Array


@_compiled
@no_type_check
def _power(x):
    """2^x for x from -126 to 0: the bits of a float with that exponent, times a polynomial of what is left."""
    whole = np.float32(np.int32(x - _HALF))
    rest = x - whole
    high = _C4 + rest * (_C5 + rest * (_C6 + rest * _C7))
    near_one = _ONE + rest * (_C1 + rest * (_C2 + rest * (_C3 + rest * high)))
    return near_one * np.int32((whole + _EXPONENT_BIAS) * _MANTISSA_SIZE).view(np.float32)


@_compiled
@no_type_check
def _at_least(x, smallest):
    """Written so that what is no number stays so."""
    return smallest if x < smallest else x


@_compiled
@no_type_check
def _updated(factor, sums):
    return min(factor / (factor * sums + _EPS), _LARGEST_FACTOR)


@_compiled
@no_type_check
def _make_kernel(logits, sharpness, kernel, shift, sums):
    """2^(sharpness (l - shift)) and its sums over samples, the shift being each prototype's largest logit."""
    samples, prototypes = kernel.shape
    for k in range(prototypes):
        shift[k] = logits[0, k]
        sums[k] = _ZERO
    for i in range(1, samples):
        for k in range(prototypes):
            shift[k] = np.maximum(logits[i, k], shift[k])
    for i in range(samples):
        for k in range(prototypes):
            exponent = sharpness * (logits[i, k] - shift[k])
            power = _ZERO if exponent < _SMALLEST_OCTAVE else _power(_at_least(exponent, _SMALLEST_OCTAVE))
            kernel[i, k] = power
            sums[k] += power


@_compiled
@no_type_check
def _balance(kernel, iterations, u, sums, v, reached):
    """The factors of `sinkhorn.balance`; u is what the first sums make it."""
    samples, prototypes = kernel.shape
    for k in range(prototypes):
        u[k] = _ONE / (sums[k] + _EPS)
    for i in range(samples):
        v[i] = _ONE
    for iteration in range(1, iterations + 1):
        for k in range(prototypes):
            sums[k] = _ZERO
        for i in range(samples):
            total = _ZERO
            for k in range(prototypes):
                total += kernel[i, k] * u[k]
            reached[i] = total
            factor = _updated(v[i], total)
            v[i] = factor
            if iteration < iterations:
                for k in range(prototypes):
                    sums[k] += factor * kernel[i, k]
        if iteration < iterations:
            _update_prototypes(u, sums, v)


@_compiled
@no_type_check
def _update_prototypes(u, sums, v):
    """The next u, of mean 1; v takes the mean over."""
    mean = _ZERO
    for k in range(len(u)):
        u[k] = _updated(u[k], sums[k])
        mean += u[k]
    mean /= np.float32(len(u))
    for k in range(len(u)):
        u[k] /= mean
    for i in range(len(v)):
        v[i] = min(v[i] * mean, _LARGEST_FACTOR)


@_compiled
@no_type_check
def _largest(logits, offset, lanes):
    """The largest biased logit of a row, side by side in lanes."""
    lanes[:] = np.float32(-np.inf)
    for start in range(0, len(offset), _LANES):
        bias, some = offset[start : start + _LANES], logits[start : start + _LANES]
        for lane in range(len(bias)):
            lanes[lane] = np.maximum(lanes[lane], some[lane] + bias[lane])
    largest = lanes[0]
    for lane in range(1, _LANES):
        largest = np.maximum(largest, lanes[lane])
    return largest


@_compiled
@no_type_check
def _absorb_row(logits, kernel, offset, u, v, reached, lanes):
    """Leave the difference in place of the logits and K u in place of the kernel; the row's weight and loss."""
    largest = _largest(logits, offset, lanes)
    total, agreement = _ZERO, _ZERO
    for k in range(len(u)):
        logit = logits[k] + offset[k] - largest
        scaled = kernel[k] * u[k]
        power = _power(_at_least(logit, _SMALLEST_OCTAVE))
        agreement += scaled * logit
        total += power
        kernel[k] = scaled
        logits[k] = power
    share = total / _at_least(reached, _SMALLEST_REACH)
    for k in range(len(u)):
        logits[k] -= share * kernel[k]
    mass = v * reached
    return mass / total, mass * np.float32(math.log2(total)) - v * agreement


@_compiled
@no_type_check
def _absorb(logits, offset, wanted, results, sharpness, iterations, groups, step, scratch, first):
    """Every `step`th group from the first on."""
    kernel, shift, u, sums, lanes = scratch
    samples, prototypes = kernel.shape
    for group in range(first, groups, step):
        begin, end = group * samples, (group + 1) * samples
        v, reached = results.v[begin:end], results.reached[begin:end]
        _make_kernel(logits[begin:end], sharpness, kernel, shift, sums)
        _balance(kernel, iterations, u, sums, v, reached)
        loss = _ZERO
        for i in range(samples):
            row = begin + i
            weight, own = _absorb_row(logits[row], kernel[i], offset, u, v[i], reached[i], lanes)
            results.weights[row] = weight
            loss += own
            if reached[i] == _ZERO:
                v[i] = _ZERO
            for place in wanted.places[wanted.starts[row] : wanted.starts[row + 1]]:
                for k in range(prototypes):
                    wanted.targets[place, k] = v[i] * kernel[i, k]
        results.losses[group] = loss
        if len(results.log_prototypes):
            for k in range(prototypes):
                results.log_prototypes[group, k] = np.log2(u[k]) - shift[k] * sharpness


def make_scratch(samples: int, prototypes: int) -> Scratch:
    """For one thread, whose groups have so many samples."""
    kernel, shift, u, sums, lanes = (
        torch.empty(shape).numpy() for shape in ((samples, prototypes), prototypes, prototypes, prototypes, _LANES)
    )
    return Scratch(kernel, shift, u, sums, lanes)


def absorb_groups(
    logits: Float[Tensor, "rows padded"],
    offset: Float[Tensor, " k"],
    scratch: Sequence[Scratch],
    *,
    targets: Float[Tensor, "places k"],
    places: Int[Tensor, " w"],
    starts: Int[Tensor, " own_and_one"],
    weights: Float[Tensor, " rows"],
    v: Float[Tensor, " own"],
    log_prototypes: Float[Tensor, "groups_or_none k"],
    sharpness: float,
    iterations: int,
) -> float:
    """The loss of whole groups, one after the other in each thread; softmax - assignments stay in place of logits.

    There are as many rows as places for their factors v. Row r has its targets copied to places[starts[r]] and on, up
    to those of the next row. Factors of prototypes are kept where `log_prototypes` has rows for them.
    """
    groups = len(v) // len(scratch[0].kernel)
    results = _Results(
        np.empty(groups), weights.numpy(), v.numpy(), np.empty(len(v), np.float32), log_prototypes.numpy()
    )
    work = partial(
        _absorb,
        logits.numpy(),
        offset.numpy(),
        _Wanted(targets.numpy(), places.numpy(), starts.numpy()),
        results,
        np.float32(sharpness),
        iterations,
        groups,
        len(scratch),
    )
    with ThreadPoolExecutor(len(scratch)) as pool:
        list(pool.map(work, scratch, range(len(scratch))))
    return float(results.losses.sum())
