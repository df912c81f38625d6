"""Multinomial logistic regression for a whole grid of penalties at once.

All penalties share every product with the features, each descends on its own, and one that has arrived costs nothing
more. The features are read in chunks of rows and standardised on the way, so that a memory-mapped set of millions of
rows needs little memory.

The solver is L-BFGS for many regressions side by side, each with a penalty of its own. It begins with a good guess of
the Hessian, a Kronecker product: the covariance of the features times that of the classes under the model. That is
exact at zero weights, and takes tens of iterations where plain L-BFGS takes hundreds.

    g problems   a problems of a call, numbered by `which`   c classes   d features   e features and the intercept
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.runtime.devices import float32_products
from capi.types import Bool, Float, Int

# Pairs of steps and changes of the gradient that L-BFGS remembers.
_MEMORY = 10
# Trial steps along one direction before the search gives up.
_MAX_TRIALS = 12
# Directions with less than this share of the largest variance are treated as having that much: their gradient is mostly
# rounding, and dividing by almost nothing would let it through.
_LEAST_VARIANCE = 1e-10


class LossAndGradient(NamedTuple):
    """Objective over the number of samples, its gradient, and the covariance of the classes where asked for."""

    value: Float[Tensor, " a"]
    gradient: Float[Tensor, "a c e"]
    spread: Float[Tensor, "a c c"] | None


# From one point for each of the problems `which` to what is there; the last says whether the covariance is wanted.
Problem = Callable[[Tensor, Tensor, bool], LossAndGradient]


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
        """Continue from the weights as they are until every problem has converged, is stuck or has used its iterations.

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
        """Which problems continue. Half the slope is what a step of Newton would gain."""
        penalty = 0.5 * self.curvature.penalty * self.weights[..., :-1].square().sum((1, 2))
        self.converged = -self.slope / 2 <= torch.maximum(tolerance * penalty, least * self.value)
        return ~self.converged & (self.iterations < max_iterations) & (self.trials < _MAX_TRIALS)

    def _round(self, problem: Problem, active: Int[Tensor, " a"], slack: float, spread: bool) -> None:
        step = self.length[active, None, None] * self.ahead[active]
        trial = problem(self.weights[active] + step, active, spread)
        gain = self.length[active] * self.slope[active]
        enough = trial.value <= self.value[active] + 1e-4 * gain + slack * self.value[active]
        # The others aim for the lowest point of the parabola through what is known along the direction.
        missed, value, missing = active[~enough], trial.value[~enough], gain[~enough]
        share = -missing / (2 * (value - self.value[missed] - missing))
        self.length[missed] *= share.nan_to_num(0.0).clamp(0.1, 0.5)
        self.trials[missed] += 1
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


_logger = logging.getLogger("capi")

# Gains below this share of the objective are not looked for: float32 sees little but its own rounding there, and hands
# over to float64.
_LEAST_GAIN = {torch.float32: 1e-6, torch.float64: 1e-14}
# Rounding of the objective, relative, that the line search must not take for an increase.
_SLACK = {torch.float32: 1e-7, torch.float64: 1e-13}


class LogisticRegression:
    """Logistic regression with an L2 penalty, for every strength C in `strengths`, in the manner of scikit-learn.

    Minimises C * (sum of log losses) + 0.5 * |weights|^2 over the standardised features, intercept free; with two
    classes there is one weight vector w, as there, held as -w/2 and w/2. A fit ends when the gain still to be
    expected is less than `tolerance` times 0.5 * |weights|^2, its penalty: beside a weak penalty the loss is so large
    that a share of the whole objective would leave the weights of rare classes unfinished. With `dtype` float32 it runs
    in float32 until that gains nothing more, and ends in float64; with float64 it runs in float64 throughout.

    `chunk_bytes` bounds what is on the device at a time (default: 32 MiB on the CPU, 1 GiB elsewhere). A prepared
    copy of the features is kept where it takes no more than `cache_bytes`.

    Fitted: `coef_` (g, c, d) and `intercept_` (g, c) apply to standardised features; `decision_function`, `predict`
    and `predict_proba` take features as they are and standardise them. `classes_` are the labels seen, ascending: a
    class without training samples is never predicted. `objective_`, `n_iter_` (trial steps) and `converged_` have one
    entry for each strength; a fit that has not converged is also a warning in the log.
    """

    def __init__(
        self,
        strengths: Sequence[float] = (1.0,),
        *,
        tolerance: float = 1e-10,
        max_iterations: int = 1000,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        chunk_bytes: int | None = None,
        cache_bytes: int = 2**30,
    ) -> None:
        self.strengths, self.tolerance, self.max_iterations = strengths, tolerance, max_iterations
        self.dtype, self.device, self.chunk_bytes, self.cache_bytes = dtype, device, chunk_bytes, cache_bytes

    @torch.no_grad()
    @float32_products("highest")
    def fit(
        self,
        features: Float[Tensor, "s d"],
        labels: Int[Tensor, " s"],
        *,
        mean: Float[Tensor, " d"] | None = None,
        scale: Float[Tensor, " d"] | None = None,
    ) -> "LogisticRegression":
        """Features count as (features - mean) / scale; a scale of zero counts as one."""
        self._check_settings()
        self.classes_, targets = _class_numbers(labels)
        self.mean_, self.scale_ = _standard(features.shape[1], mean, scale)
        rows = self._rows(features, targets)
        curvature = Curvature.of(_covariance(rows), self._penalty(len(labels)), len(self.classes_))
        descent = Descent(_first_weights(targets, len(self.strengths), rows), curvature)
        for dtype in [torch.float64] if self.dtype == torch.float64 else [torch.float32, torch.float64]:
            chunks = rows.chunks(dtype, self.cache_bytes)
            problem = _Problem(chunks, len(rows.targets), dtype, descent.curvature.penalty)
            descent.run(problem, self.tolerance, self.max_iterations, _SLACK[dtype], _LEAST_GAIN[dtype])
        self._keep(descent, len(labels))
        self._warn()
        return self

    def decision_function(self, features: Float[Tensor, "s d"], which: int = 0) -> Float[Tensor, "s c"]:
        """Scores of the classes under the strength of that number."""
        return torch.cat(list(self._scores(features, which)))

    def predict_proba(self, features: Float[Tensor, "s d"], which: int = 0) -> Float[Tensor, "s c"]:
        return torch.cat([scores.softmax(1) for scores in self._scores(features, which)])

    def predict(self, features: Float[Tensor, "s d"], which: int = 0) -> Int[Tensor, " s"]:
        """The label of the highest score, the lowest of those that are equal."""
        best = torch.cat([scores.argmax(1) for scores in self._scores(features, which)])
        return self.classes_.to(best.device)[best]

    def _check_settings(self) -> None:
        if not self.strengths or not all(0 < strength < float("inf") for strength in self.strengths):
            raise CapiError(f"strengths must be positive numbers, at least one, not {list(self.strengths)}")
        if self.dtype not in _SLACK:
            raise CapiError(f"dtype must be torch.float32 or torch.float64, not {self.dtype}")

    def _penalty(self, samples: int) -> Float[Tensor, " g"]:
        """The weight of 0.5 |weights|^2 beside the mean loss."""
        # With weights -w/2 and w/2, twice their squares make |w|^2.
        doubled = 2 if len(self.classes_) == 2 else 1
        return doubled / (torch.tensor(list(self.strengths), dtype=torch.float64) * samples)

    def _chunk_rows(self, width: int, problems: int) -> int:
        """How many rows fit the bytes allowed: features before and after, logits and what they become, in float64."""
        room = self.chunk_bytes or (2**25 if torch.device(self.device).type == "cpu" else 2**30)
        return max(1, room // (8 * (2 * width + 3 * problems * len(self.classes_))))

    def _rows(self, features: Tensor, targets: Tensor) -> "_StandardizedRows":
        device, size = torch.device(self.device), self._chunk_rows(features.shape[1], len(self.strengths))
        # Whatever mean is given, the solver centres: weights and intercepts then hardly meet in the Hessian.
        self.center_ = _mean(features, size)
        return _StandardizedRows(features, targets, self.center_, self.scale_, self.dtype, device, size)

    def _keep(self, descent: Descent, samples: int) -> None:
        weights = descent.weights.cpu()
        self.coef_ = weights[..., :-1]
        self.intercept_ = weights[..., -1] + self.coef_ @ ((self.mean_ - self.center_) / self.scale_)
        self.n_iter_, self.converged_ = descent.iterations.cpu(), descent.converged.cpu()
        self.objective_ = descent.value.cpu() * samples * torch.tensor(list(self.strengths), dtype=torch.float64)

    def _warn(self) -> None:
        for strength, iterations, converged in zip(self.strengths, self.n_iter_, self.converged_, strict=True):
            if not converged:
                _logger.warning(
                    "logistic regression with C = %g has not converged in %d iterations: allow more with "
                    "max_iterations, ask for less with tolerance, or standardise the features",
                    strength,
                    iterations,
                )

    def _scores(self, features: Tensor, which: int) -> Iterator[Tensor]:
        """Scores of chunks of rows, on the device of the features."""
        if not hasattr(self, "coef_"):
            raise CapiError("this logistic regression has not been fitted: call fit first")
        if features.shape[1] != self.coef_.shape[2]:
            raise CapiError(
                f"the features have {features.shape[1]} channels, but {self.coef_.shape[2]} were fitted: "
                "use features of the same encoder"
            )
        if not -len(self.coef_) <= which < len(self.coef_):
            raise CapiError(f"which = {which} counts strengths, of which there are {len(self.coef_)}")
        coef = self.coef_[which] / self.scale_
        # Centred, so that a large mean does not eat the digits of float32.
        center = self.center_.to(self.dtype)
        intercept = self.intercept_[which] + coef @ (center.double() - self.mean_)
        center, coef, intercept = (part.to(self.device, self.dtype) for part in (center, coef, intercept))
        for part in features.split(self._chunk_rows(features.shape[1], 1)):
            with float32_products("highest"):
                scores = torch.addmm(intercept, part.to(self.device, self.dtype) - center, coef.T)
            if not torch.isfinite(scores).all():
                raise CapiError("the features hold values that are no finite numbers: leave those rows out")
            yield scores.to(features.device)


@dataclass(frozen=True)
class _StandardizedRows:
    """Chunks of (features - centre) / scale and their classes, made as they are asked for."""

    features: Float[Tensor, "s d"]
    targets: Int[Tensor, " s"]
    center: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]
    dtype: torch.dtype
    device: torch.device
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        center, scale = self.center.to(self.device, self.dtype), self.scale.to(self.device, self.dtype)
        for features, targets in zip(self.features.split(self.size), self.targets.split(self.size), strict=True):
            yield (features.to(self.device, self.dtype) - center).div_(scale), targets.to(self.device)

    def chunks(self, dtype: torch.dtype, cache_bytes: int) -> Iterable[tuple[Tensor, Tensor]]:
        """The chunks in another precision, kept where they take few bytes."""
        rows = replace(self, dtype=dtype, device=_device_of(dtype, self.device))
        return list(rows) if self.features.numel() * dtype.itemsize <= cache_bytes else rows


def _device_of(dtype: torch.dtype, device: torch.device) -> torch.device:
    """The device where numbers of that type are computed: Apple's devices have no float64."""
    return torch.device("cpu") if device.type == "mps" and dtype == torch.float64 else device


def _class_numbers(labels: Int[Tensor, " s"]) -> tuple[Int[Tensor, " c"], Int[Tensor, " s"]]:
    """The labels that occur, ascending, and the place of each sample's label among them."""
    if not len(labels):
        raise CapiError("logistic regression got no samples: check that the training split is not empty")
    classes, targets = labels.unique(return_inverse=True)
    if len(classes) == 1:
        raise CapiError(
            f"all {len(labels)} labels are {int(classes)}, but logistic regression tells at least two classes apart: "
            "use more training data"
        )
    return classes.cpu(), targets


def _standard(
    width: int, mean: Float[Tensor, " d"] | None, scale: Float[Tensor, " d"] | None
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """The mean and scale to use, in float64."""
    mean = torch.zeros(width, dtype=torch.float64) if mean is None else mean.double().cpu()
    scale = torch.ones(width, dtype=torch.float64) if scale is None else scale.double().cpu()
    if not (torch.isfinite(mean).all() and torch.isfinite(scale).all() and (scale >= 0).all()):
        raise CapiError("mean and scale must be finite and no scale negative: compute them from finite features")
    return mean, torch.where(scale == 0, 1.0, scale)


def _mean(features: Float[Tensor, "s d"], size: int) -> Float[Tensor, " d"]:
    total = torch.zeros(features.shape[1], dtype=torch.float64)
    for part in features.split(size):
        total += part.sum(0, dtype=torch.float64).cpu()
    return total / len(features)


def _covariance(rows: _StandardizedRows) -> Float[Tensor, "d d"]:
    """Mean products of the standardised features, which are checked on the way."""
    width = rows.features.shape[1]
    total = torch.zeros(width, width, dtype=torch.float64, device=_device_of(torch.float64, rows.device))
    for features, _ in rows:
        if not torch.isfinite(features).all():
            raise CapiError("the features hold values that are no finite numbers: leave those rows out")
        total += (features.T @ features).to(total.device)
    if not torch.isfinite(total).all():
        raise CapiError(f"the squares of the features are too large for {rows.dtype}: standardise the features")
    return total / len(rows.features)


def _first_weights(targets: Int[Tensor, " s"], problems: int, rows: _StandardizedRows) -> Float[Tensor, "g c e"]:
    """No weights, and intercepts that predict each class as often as it occurs."""
    frequency = targets.bincount().double().log()
    weights = torch.zeros(problems, len(frequency), rows.features.shape[1] + 1, dtype=torch.float64)
    weights[..., -1] = frequency - frequency.mean()
    return weights.to(_device_of(torch.float64, rows.device))


@dataclass(frozen=True)
class _Problem:
    """The objectives of several penalties over the same rows. The last weight of a class is its intercept."""

    chunks: Iterable[tuple[Tensor, Tensor]]
    samples: int
    dtype: torch.dtype
    penalty: Float[Tensor, " g"]

    def __call__(self, weights: Float[Tensor, "a c e"], which: Int[Tensor, " a"], spread: bool) -> LossAndGradient:
        """The objectives at one point for each of the penalties `which`."""
        value, gradient = weights.new_zeros(len(weights)), torch.zeros_like(weights)
        products = weights.new_zeros(*weights.shape[:2], weights.shape[1])
        for features, targets in self.chunks:
            # Samples last: sums over a few classes then run along contiguous memory.
            flat = weights.flatten(0, 1).to(features.device, self.dtype)
            logits = torch.addmm(flat[:, -1:], flat[:, :-1], features.T)
            losses, probabilities, missed = _cross_entropy(logits.view(*weights.shape[:2], -1), targets)
            value += losses.to(value.device).sum(1, dtype=torch.float64)
            if spread:
                products += (probabilities @ probabilities.transpose(1, 2)).to(products.device)
            # The probability of the right class less one, without the cancellation of computing it so.
            residuals = probabilities.scatter_(1, targets.expand(len(weights), 1, -1), -missed)
            gradient[..., :-1] += (residuals.flatten(0, 1) @ features).view(*weights.shape[:2], -1).to(gradient.device)
            gradient[..., -1] += residuals.sum(2).to(gradient.device)
        penalty = self.penalty[which]
        value = value / self.samples + 0.5 * penalty * weights[..., :-1].square().sum((1, 2))
        gradient /= self.samples
        gradient[..., :-1] += penalty[:, None, None] * weights[..., :-1]
        return LossAndGradient(value, gradient, _covariance_of_classes(products / self.samples) if spread else None)


def _cross_entropy(
    logits: Float[Tensor, "a c s"], targets: Int[Tensor, " s"]
) -> tuple[Float[Tensor, "a s"], Float[Tensor, "a c s"], Float[Tensor, "a 1 s"]]:
    """Losses, probabilities (in the place of the logits) and the probability of all wrong classes together.

    Exact to the last digits for losses near zero too, of which separable data with a weak penalty have nothing else.
    """
    index, highest = targets.expand(len(logits), 1, -1), logits.amax(1, keepdim=True)
    behind = highest - logits.gather(1, index)
    shares = logits.sub_(highest).exp_()
    right = shares.gather(1, index)
    wrong = shares.scatter_(1, index, 0).sum(1, keepdim=True)
    losses = behind + torch.log1p(wrong + (right - 1))
    total = wrong + right
    shares.scatter_(1, index, right).div_(total)
    return losses[:, 0], shares, wrong / total


def _covariance_of_classes(products: Float[Tensor, "a c c"]) -> Float[Tensor, "a c c"]:
    """Mean of diag(p) - p p^T from that of p p^T. Rows sum to zero, which gives the diagonal without cancellation."""
    others = products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))
    return torch.diag_embed(others.sum(2)) - others
