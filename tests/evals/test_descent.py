"""The solver of logistic regression, against dense matrices."""

import pytest
import torch
from torch import Tensor

from capi.evals import logistic
from capi.evals.logistic import Curvature, Descent, History, LossAndGradient

PROBLEMS, CLASSES, WIDTH = 3, 4, 5
EVERYONE = torch.arange(PROBLEMS)
PENALTY = torch.tensor([0.01, 0.5, 20.0], dtype=torch.float64)


def positive(*shape: int, seed: int = 0) -> Tensor:
    """Symmetric matrices with positive eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(*shape, shape[-1] + 2, generator=generator, dtype=torch.float64)
    return root @ root.mT


def spreads(count: int = PROBLEMS, seed: int = 0) -> Tensor:
    """Covariances of classes, diag(p) - p p^T."""
    shares = torch.rand(count, CLASSES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(1)
    return torch.diag_embed(shares) - shares[:, :, None] * shares[:, None]


def vectors(count: int = PROBLEMS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, CLASSES, WIDTH + 1, generator=generator, dtype=torch.float64)


def dense_hessian(covariance: Tensor, spread: Tensor, penalty: float) -> Tensor:
    """The guess as one matrix over all weights of all classes, the intercept last."""
    features = torch.block_diag(covariance, torch.ones(1, 1, dtype=torch.float64))
    shifted = spread + spread.diagonal().mean() / CLASSES
    penalised = torch.cat([torch.full((WIDTH,), penalty, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    return torch.kron(shifted, features) + torch.diag(penalised.repeat(CLASSES))


def test__the_guess_is_the_inverse_of_a_kronecker_product_and_the_penalty() -> None:
    covariance, spread = positive(WIDTH), spreads()
    curvature = Curvature.of(covariance, PENALTY, CLASSES)
    curvature.refresh(spread, EVERYONE)
    vector = vectors()
    product, squared = curvature(vector, EVERYONE), curvature.squared(vector, EVERYONE)
    for number in range(PROBLEMS):
        hessian = dense_hessian(covariance, spread[number], float(PENALTY[number]))
        expected = torch.linalg.solve(hessian, vector[number].flatten())
        torch.testing.assert_close(product[number].flatten(), expected)
        torch.testing.assert_close(squared[number], expected @ vector[number].flatten())


def test__only_the_problems_that_are_named_are_refreshed_and_asked() -> None:
    curvature = Curvature.of(positive(WIDTH), PENALTY, CLASSES)
    whole = Curvature.of(positive(WIDTH), PENALTY, CLASSES)
    curvature.refresh(spreads(), EVERYONE)
    whole.refresh(spreads(), EVERYONE)
    which = torch.tensor([2, 0])
    curvature.refresh(spreads(2, seed=5), which)
    vector = vectors()
    assert torch.equal(curvature(vector[1:2], EVERYONE[1:2]), whole(vector[1:2], EVERYONE[1:2]))
    assert not torch.allclose(curvature(vector[which], which), whole(vector[which], which))


def test__directions_without_variance_do_not_divide_by_nothing() -> None:
    covariance = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    covariance[0, 0] = 4.0
    curvature = Curvature.of(covariance, torch.zeros(1, dtype=torch.float64), CLASSES)
    assert curvature(vectors(1), EVERYONE[:1]).isfinite().all()
    assert float(curvature.variances.min()) == pytest.approx(4.0 * 1e-10)


def dense_inverse(start: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The update of BFGS, written out."""
    inverse, identity = start, torch.eye(len(start), dtype=torch.float64)
    for step, change in pairs:
        rho = 1 / (step @ change)
        left = identity - rho * torch.outer(step, change)
        inverse = left @ inverse @ left.T + rho * torch.outer(step, step)
    return inverse


@pytest.mark.parametrize("pairs", [0, 1, 3, logistic._MEMORY, logistic._MEMORY + 4])
def test__directions_are_those_of_bfgs_with_the_last_pairs(pairs: int) -> None:
    curvature = Curvature.of(positive(WIDTH), PENALTY, CLASSES)
    curvature.refresh(spreads(), EVERYONE)
    history, remembered = History(vectors()), []
    matrix = positive(PROBLEMS, CLASSES * (WIDTH + 1), seed=7) / 10
    for number in range(pairs):
        step = vectors(seed=number + 20)
        change = (matrix @ step.flatten(1)[:, :, None]).view_as(step)
        history.add(EVERYONE, step, change, curvature)
        remembered.append((step, change))
    gradient = vectors(seed=99)
    direction = history.direction(gradient, EVERYONE, curvature)
    size = CLASSES * (WIDTH + 1)
    for problem in range(PROBLEMS):
        hessian = dense_hessian(positive(WIDTH), spreads()[problem], float(PENALTY[problem]))
        start = torch.linalg.inv(hessian)
        if remembered:
            step, change = (part[problem].flatten() for part in remembered[-1])
            start = start * (step @ change) / (change @ start @ change)
        last_pairs = [tuple(part[problem].flatten() for part in pair) for pair in remembered[-logistic._MEMORY :]]
        expected = -dense_inverse(start, last_pairs) @ gradient[problem].flatten()
        torch.testing.assert_close(direction[problem].flatten(), expected, rtol=1e-8, atol=1e-8 * size)


def test__a_pair_along_which_the_slope_falls_is_not_remembered() -> None:
    curvature, history = Curvature.of(positive(WIDTH), PENALTY, CLASSES), History(vectors())
    step = vectors(seed=1)
    history.add(EVERYONE, step, torch.stack([step[0], -step[1], torch.zeros_like(step[2])]), curvature)
    assert history.count.tolist() == [1, 0, 0]


class Bowl:
    """0.5 (w - lowest)^T A (w - lowest) + 1 for each problem; counts how often each is asked."""

    def __init__(self) -> None:
        size = CLASSES * (WIDTH + 1)
        self.matrix = positive(PROBLEMS, size, seed=3) + torch.eye(size, dtype=torch.float64)
        self.lowest = vectors(seed=4)
        self.asked = torch.zeros(PROBLEMS, dtype=torch.int64)

    def __call__(self, weights: Tensor, which: Tensor, spread: bool) -> LossAndGradient:
        self.asked[which] += 1
        away = (weights - self.lowest[which]).flatten(1)
        slope = (self.matrix[which] @ away[:, :, None])[..., 0]
        value = 1 + 0.5 * (away * slope).sum(1)
        return LossAndGradient(value, slope.view_as(weights), spreads()[which] if spread else None)


def descended(problem: Bowl, *, tolerance: float = 1e-16, most: int = 500) -> Descent:
    descent = Descent(torch.zeros_like(problem.lowest), Curvature.of(positive(WIDTH), PENALTY, CLASSES))
    descent.run(problem, tolerance, most, 1e-13)
    return descent


def test__the_lowest_point_of_every_problem_is_found() -> None:
    problem = Bowl()
    descent = descended(problem)
    assert descent.converged.all()
    torch.testing.assert_close(descent.value, torch.ones(PROBLEMS, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(descent.weights, problem.lowest, rtol=0, atol=1e-4)
    # The first look at all of them, then one for each trial.
    assert (problem.asked - 1).tolist() == descent.iterations.tolist()


def test__a_loose_tolerance_ends_earlier_and_says_that_it_is_met() -> None:
    loose, tight = descended(Bowl(), tolerance=1e-5), descended(Bowl())
    assert loose.converged.all()
    assert (loose.iterations < tight.iterations).all()
    assert ((loose.value - 1) < 0.2).all()


def test__the_goal_is_a_share_of_the_penalty_but_not_less_than_rounding_allows() -> None:
    class Raised(Bowl):
        """Where the value is large, a share of it says nothing."""

        def __call__(self, weights: Tensor, which: Tensor, spread: bool) -> LossAndGradient:
            value, gradient, covariance = super().__call__(weights, which, spread)
            return LossAndGradient(value + 1e6, gradient, covariance)

    low, high = descended(Bowl(), tolerance=1e-9), descended(Raised(), tolerance=1e-9)
    torch.testing.assert_close(high.weights, low.weights, rtol=0, atol=1e-3)
    rough = Descent(torch.zeros_like(low.weights), Curvature.of(positive(WIDTH), PENALTY, CLASSES))
    rough.run(Raised(), 1e-9, 500, 1e-13, least=1e-6)
    assert rough.converged.all()
    assert (rough.iterations < high.iterations).all()


def test__what_does_not_converge_in_time_ends_and_says_so() -> None:
    descent = descended(Bowl(), most=3)
    assert descent.iterations.tolist() == [3] * PROBLEMS
    assert not descent.converged.any()


def test__a_problem_does_not_depend_on_those_beside_it() -> None:
    whole, alone = Bowl(), Bowl()
    together = descended(whole)
    for number in range(PROBLEMS):
        part = slice(number, number + 1)
        alone.matrix, alone.lowest = whole.matrix[part], whole.lowest[part]

        def one_problem(weights: Tensor, which: Tensor, spread: bool, number: int = number) -> LossAndGradient:
            value, gradient, _ = alone(weights, which, False)
            return LossAndGradient(value, gradient, spreads()[which + number] if spread else None)

        single = Descent(torch.zeros_like(alone.lowest), Curvature.of(positive(WIDTH), PENALTY[part], CLASSES))
        single.run(one_problem, 1e-14, 500, 1e-13)
        torch.testing.assert_close(single.weights, together.weights[part], rtol=1e-6, atol=1e-5)


def test__a_step_that_is_too_long_is_shortened() -> None:
    class Steep(Bowl):
        """Far steeper than the guess says."""

        def __init__(self) -> None:
            super().__init__()
            self.matrix = self.matrix * 1e4

    values: list[Tensor] = []

    class Watched(Steep):
        def __call__(self, weights: Tensor, which: Tensor, spread: bool) -> LossAndGradient:
            point = super().__call__(weights, which, spread)
            values.append(point.value)
            return point

    point = descended(Watched())
    assert (values[1] > values[0]).all()
    torch.testing.assert_close(point.value, torch.ones(PROBLEMS, dtype=torch.float64), rtol=1e-6, atol=0)
