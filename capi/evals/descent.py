"""L-BFGS for many logistic regressions side by side, each with a penalty of its own.

The first guess of the Hessian is a Kronecker product: the covariance of the features times that of the classes under
the model. That is exact at zero weights, and takes tens of iterations where plain L-BFGS takes hundreds.

    g problems   a problems of a call, numbered by `which`   c classes   d features   e features and the intercept
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from capi.types import Bool, Float, Int

# Pairs of steps and changes of the gradient that L-BFGS remembers.
_MEMORY = 10
# Trial steps along one direction before the search gives up.
_MAX_TRIALS = 12
# Directions with less than this share of the largest variance are treated as having that much: their gradient is mostly
# rounding, and dividing by almost nothing would let it through.
_LEAST_VARIANCE = 1e-10


class Evaluation(NamedTuple):
    """Objective over the number of samples, its gradient, and the covariance of the classes where asked for."""

    value: Float[Tensor, " a"]
    gradient: Float[Tensor, "a c e"]
    spread: Float[Tensor, "a c c"] | None


# From one point for each of the problems `which` to what is there; the last says whether the covariance is wanted.
Problem = Callable[[Tensor, Tensor, bool], Evaluation]


@dataclass
class Curvature:
    """A guess of the inverse Hessian: covariance of the classes times that of the features, plus the penalty."""

    variances: Float[Tensor, " d"]
    axes: Float[Tensor, "d d"]
    penalty: Float[Tensor, " g"]
    class_variances: Float[Tensor, "g c"]
    class_axes: Float[Tensor, "g c c"]

    @classmethod
    def of(cls, covariance: Float[Tensor, "d d"], penalty: Float[Tensor, " g"], classes: int) -> "Curvature":
        penalty = penalty.to(covariance.device)
        variances, axes = torch.linalg.eigh(covariance)
        least = (variances[-1] * _LEAST_VARIANCE).clamp_min(torch.finfo(torch.float64).tiny)
        class_axes = torch.eye(classes, dtype=torch.float64, device=axes.device).expand(len(penalty), -1, -1).clone()
        return cls(variances.clamp_min(least), axes, penalty, torch.ones_like(class_axes[..., 0]), class_axes)

    def refresh(self, spread: Float[Tensor, "a c c"], which: Int[Tensor, " a"]) -> None:
        """Take the classes' covariance at a new point."""
        typical = spread.diagonal(dim1=1, dim2=2).mean(1)
        # A common shift of all classes changes nothing; given some curvature it does no harm to the inverse.
        variances, axes = torch.linalg.eigh(spread + typical[:, None, None] / spread.shape[1])
        floor = (typical[:, None] * 1e-6).clamp_min(torch.finfo(torch.float64).tiny)
        self.class_variances[which], self.class_axes[which] = variances.maximum(floor), axes

    def __call__(self, vector: Float[Tensor, "a c e"], which: Int[Tensor, " a"]) -> Float[Tensor, "a c e"]:
        """The guess times a vector, for each of the problems `which`."""
        rotated = self._rotated(vector, which) / self._diagonal(which)
        weights = rotated[..., :-1] @ self.axes.T
        return self.class_axes[which] @ torch.cat([weights, rotated[..., -1:]], 2)

    def squared(self, vector: Float[Tensor, "a c e"], which: Int[Tensor, " a"]) -> Float[Tensor, " a"]:
        """The vector times the guess times the vector."""
        return (self._rotated(vector, which).square() / self._diagonal(which)).sum((1, 2))

    def _rotated(self, vector: Float[Tensor, "a c e"], which: Int[Tensor, " a"]) -> Float[Tensor, "a c e"]:
        rotated = self.class_axes[which].transpose(1, 2) @ vector
        return torch.cat([rotated[..., :-1] @ self.axes, rotated[..., -1:]], 2)

    def _diagonal(self, which: Int[Tensor, " a"]) -> Float[Tensor, "a c e"]:
        # An intercept is a feature of variance one without a penalty.
        variances, penalty = torch.cat([self.variances, self.variances.new_ones(1)]), self.penalty[which, None, None]
        diagonal = self.class_variances[which][..., None] * variances
        diagonal[..., :-1] += penalty
        return diagonal


class History:
    """The last steps of each problem and the changes of its gradient: what L-BFGS knows of the Hessian."""

    def __init__(self, weights: Float[Tensor, "g c e"]) -> None:
        self.steps, self.changes = (weights.new_zeros(_MEMORY, *weights.shape) for _ in range(2))
        # One over the product of step and change; zero where there is none, which makes the pair count nothing.
        self.inverse = weights.new_zeros(_MEMORY, len(weights))
        self.scaling = weights.new_ones(len(weights))
        self.count = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)

    def add(self, which: Int[Tensor, " a"], step: Tensor, change: Tensor, curvature: Curvature) -> None:
        """Remember the pairs of the problems `which`, and by how much the guess was off along them."""
        product = _dot(step, change)
        which, step, change, product = (part[product > 0] for part in (which, step, change, product))
        slot = self.count[which] % _MEMORY
        self.steps[slot, which], self.changes[slot, which], self.inverse[slot, which] = step, change, 1 / product
        self.count[which] += 1
        self.scaling[which] = product / curvature.squared(change, which)

    def direction(
        self, gradient: Float[Tensor, "a c e"], which: Int[Tensor, " a"], curvature: Curvature
    ) -> Float[Tensor, "a c e"]:
        """Minus the inverse Hessian times the gradient, by the two-loop recursion, for the problems `which`."""
        count, result, taken = self.count[which], gradient.clone(), []
        slots = [(count - age) % _MEMORY for age in range(1, min(_MEMORY, int(self.count.max())) + 1)]
        for slot in slots:
            amount = self.inverse[slot, which] * _dot(self.steps[slot, which], result)
            result -= amount[:, None, None] * self.changes[slot, which]
            taken.append(amount)
        result = self.scaling[which, None, None] * curvature(result, which)
        for slot, amount in zip(reversed(slots), reversed(taken), strict=True):
            missing = amount - self.inverse[slot, which] * _dot(self.changes[slot, which], result)
            result += missing[:, None, None] * self.steps[slot, which]
        return -result


def _dot(left: Float[Tensor, "a c e"], right: Float[Tensor, "a c e"]) -> Float[Tensor, " a"]:
    return (left * right).sum((1, 2))


class Descent:
    """L-BFGS on several problems side by side. A round is one trial step of each that is not finished."""

    def __init__(self, weights: Float[Tensor, "g c e"], curvature: Curvature) -> None:
        self.weights, self.curvature, self.history = weights, curvature, History(weights)
        self.iterations = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)

    def run(self, problem: Problem, tolerance: float, max_iterations: int, slack: float, least: float = 0.0) -> None:
        """Go on from where the weights are until every problem has converged, is stuck or has used its iterations.

        Converged: what is still to be gained is at most `tolerance` times the penalty 0.5 * p * |weights|^2. The
        objective is at least as curved as its penalty, so the weights are then wrong by at most sqrt(tolerance) of
        their norm, however small the penalty is beside the loss. `least` is a share of the objective below which
        rounding hides all gains.
        """
        everyone = torch.arange(len(self.weights), device=self.weights.device)
        self.value, self.gradient, spread = problem(self.weights, everyone, True)
        assert spread is not None
        self.curvature.refresh(spread, everyone)
        self.ahead, self.slope = torch.zeros_like(self.weights), torch.zeros_like(self.value)
        self.length, self.trials = torch.ones_like(self.value), torch.zeros_like(self.iterations)
        self._turn(everyone)
        rounds = 0
        while len(active := self._active(tolerance, max_iterations, least).nonzero()[:, 0]):
            rounds += 1
            # The classes' covariance changes fast at first and slowly later.
            self._round(problem, active, slack, spread=rounds & (rounds - 1) == 0)

    def _active(self, tolerance: float, max_iterations: int, least: float) -> Bool[Tensor, " g"]:
        """Which problems go on. Half the slope is what a step of Newton would gain."""
        penalty = 0.5 * self.curvature.penalty * self.weights[..., :-1].square().sum((1, 2))
        self.converged = -self.slope / 2 <= torch.maximum(tolerance * penalty, least * self.value)
        return ~self.converged & (self.iterations < max_iterations) & (self.trials < _MAX_TRIALS)

    def _round(self, problem: Problem, active: Int[Tensor, " a"], slack: float, spread: bool) -> None:
        step = self.length[active, None, None] * self.ahead[active]
        trial = problem(self.weights[active] + step, active, spread)
        gain = self.length[active] * self.slope[active]
        enough = trial.value <= self.value[active] + 1e-4 * gain + slack * self.value[active]
        self._shorten(active[~enough], trial.value[~enough], gain[~enough])
        moved = active[enough]
        change = trial.gradient[enough] - self.gradient[moved]
        self.weights[moved] += step[enough]
        self.value[moved], self.gradient[moved] = trial.value[enough], trial.gradient[enough]
        if trial.spread is not None:
            self.curvature.refresh(trial.spread[enough], moved)
        self.history.add(moved, step[enough], change, self.curvature)
        self._turn(moved)
        self.iterations[active] += 1

    def _turn(self, which: Int[Tensor, " a"]) -> None:
        """Choose new directions."""
        gradient = self.gradient[which]
        ahead = self.history.direction(gradient, which, self.curvature)
        self.ahead[which], self.slope[which] = ahead, _dot(gradient, ahead)
        self.length[which], self.trials[which] = 1.0, 0

    def _shorten(self, which: Int[Tensor, " a"], value: Float[Tensor, " a"], gain: Float[Tensor, " a"]) -> None:
        """Aim for the lowest point of the parabola through what is known along the direction."""
        share = -gain / (2 * (value - self.value[which] - gain))
        self.length[which] *= share.nan_to_num(0.0).clamp(0.1, 0.5)
        self.trials[which] += 1
