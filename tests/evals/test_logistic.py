import logging
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression as ScikitLearn
from torch import Tensor

from capi.errors import CapiError
from capi.evals import logistic
from capi.evals.logistic import LogisticRegression
from capi.evals.metrics import SegmentationScore
from capi.runtime.protocol import PAPER_ITERATIONS, PAPER_TOLERANCE

STRENGTHS = np.logspace(-6, 5, 8).tolist()


class Problem(NamedTuple):
    features: Tensor
    labels: Tensor
    held_out: Tensor


def problem(name: str) -> Problem:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    classes, width, samples = (2 if name == "two classes" else 4), 7, 240
    distance = {"separable": 6.0, "noisy": 0.7, "unbalanced": 0.7}.get(name, 1.5)
    shares = torch.tensor([0.85, 0.09, 0.04, 0.02] if name == "unbalanced" else [1.0] * classes)
    labels = torch.multinomial(shares, samples, replacement=True, generator=generator)
    centers = distance * normal(classes, width)
    mixing = normal(width, width)
    features = torch.cat([centers[labels] + normal(samples, width), distance * normal(100, width)]) @ mixing
    if name == "badly scaled":
        features = features * 10.0 ** torch.linspace(-2, 2, width) + 30 * torch.arange(width)
    if name == "constant channel":
        features[:, 2] = 4.7
    return Problem(features[:samples], labels, features[samples:])


PROBLEMS = ["separable", "noisy", "unbalanced", "badly scaled", "constant channel", "two classes"]


def scikit_learn(features: Tensor, labels: Tensor, strength: float, solver: str) -> ScikitLearn:
    """At a tolerance it cannot reach, so that it ends where it finds nothing lower."""
    steps = 60 if solver == "newton-cholesky" else 20_000
    model = ScikitLearn(C=strength, tol=1e-15, max_iter=steps, solver=solver)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.fit(features.double().numpy(), labels.numpy())


def objective(model: ScikitLearn, features: Tensor, labels: Tensor) -> float:
    """Written out: C times the losses and half the squared weights, which are one vector for two classes."""
    weights, intercept = torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)
    scores = features.double() @ weights.T + intercept
    if scores.shape[1] == 1:
        scores = torch.cat([torch.zeros_like(scores), scores], 1)
    losses = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
    return float(model.C * losses + 0.5 * weights.square().sum())


@pytest.fixture
def noisy() -> Problem:
    return problem("noisy")


def assert_same_minimum(ours: LogisticRegression, data: Problem, solver: str) -> None:
    for number, strength in enumerate(ours.strengths):
        theirs = scikit_learn(data.features, data.labels, strength, solver)
        expected = objective(theirs, data.features, data.labels)
        assert float(ours.objective_[number]) == pytest.approx(expected, rel=1e-6)
        held_out = data.held_out.double().numpy()
        assert ours.predict(data.held_out, number).tolist() == theirs.predict(held_out).tolist()
        np.testing.assert_allclose(ours.predict_proba(data.held_out, number), theirs.predict_proba(held_out), atol=1e-2)


# L-BFGS of scikit-learn ends early where weights are large or features differ in scale; Newton's method does not.
@pytest.mark.parametrize("name", PROBLEMS)
def test__objectives_and_predictions_are_those_of_exact_newton(name: str) -> None:
    data = problem(name)
    ours = LogisticRegression(STRENGTHS).fit(data.features, data.labels)
    assert ours.converged_.all()
    assert_same_minimum(ours, data, "newton-cholesky")


@pytest.mark.parametrize("name", ["noisy", "two classes"])
def test__objectives_and_predictions_are_those_of_scikit_learn(name: str) -> None:
    data = problem(name)
    assert_same_minimum(LogisticRegression(STRENGTHS).fit(data.features, data.labels), data, "lbfgs")


def test__float64_alone_ends_where_both_precisions_do() -> None:
    data = problem("badly scaled")
    both, alone = (LogisticRegression(STRENGTHS, dtype=dtype) for dtype in (torch.float32, torch.float64))
    for model in (both, alone):
        model.fit(data.features, data.labels)
    torch.testing.assert_close(alone.objective_, both.objective_, rtol=1e-8, atol=0)


def test__objectives_of_separable_data_are_never_above_those_of_scikit_learn() -> None:
    data = problem("separable")
    ours = LogisticRegression(STRENGTHS[-2:]).fit(data.features, data.labels)
    for number, strength in enumerate(ours.strengths):
        theirs = scikit_learn(data.features, data.labels, strength, "lbfgs")
        assert float(ours.objective_[number]) <= objective(theirs, data.features, data.labels) * (1 + 1e-6)


@pytest.mark.parametrize("seed", [1, 2])
def test__rare_classes_are_fitted_to_the_end_beside_a_weak_penalty(seed: int) -> None:
    """Rare classes are almost separable, common ones overlap: what is left to gain is tiny beside the loss."""
    generator = torch.Generator().manual_seed(seed)
    classes, width, samples = 10, 16, 1500
    labels = torch.multinomial(torch.arange(1, classes + 1) ** -1.5, samples + 4000, True, generator=generator)
    centers = 0.3 * torch.randn(classes, width, generator=generator)
    latent = torch.randn(samples + 4000, width, generator=generator) + centers[labels]
    axes = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    features = (latent / torch.arange(1, width + 1).sqrt()) @ axes
    features = (features - features[:samples].mean(0)) / features[:samples].std(0)
    (train, held_out), (labels, truth) = features.split((samples, 4000)), labels.split((samples, 4000))
    ours = LogisticRegression([STRENGTHS[-1]], tolerance=PAPER_TOLERANCE, max_iterations=PAPER_ITERATIONS)
    ours.fit(train, labels)
    assert ours.converged_.all()
    theirs = scikit_learn(train, labels, STRENGTHS[-1], "lbfgs")
    penalty = 0.5 * float(np.square(theirs.coef_).sum())
    assert float(ours.objective_) - objective(theirs, train, labels) < 1e-4 * penalty
    predicted, expected = ours.predict(held_out), torch.from_numpy(theirs.predict(held_out.double().numpy()))
    assert torch.equal(predicted, expected)
    scores = [SegmentationScore(range(classes), []) for _ in range(2)]
    for score, labeled in zip(scores, (predicted, expected), strict=True):
        score.update(truth, labeled)
    assert scores[0].mean_iou() == scores[1].mean_iou()


def test__the_objective_is_that_of_the_weights(noisy: Problem) -> None:
    ours = LogisticRegression([0.3, 20.0]).fit(noisy.features, noisy.labels)
    for number, strength in enumerate(ours.strengths):
        scores = noisy.features.double() @ ours.coef_[number].T + ours.intercept_[number]
        losses = torch.nn.functional.cross_entropy(scores, noisy.labels, reduction="sum")
        expected = strength * losses + 0.5 * ours.coef_[number].square().sum()
        torch.testing.assert_close(ours.objective_[number], expected, rtol=1e-10, atol=0)


def test__a_loose_tolerance_is_kept_and_saves_iterations(noisy: Problem) -> None:
    exact, loose = (LogisticRegression(STRENGTHS, tolerance=t).fit(noisy.features, noisy.labels) for t in (1e-10, 1e-4))
    assert (loose.n_iter_ <= exact.n_iter_).all()
    assert loose.n_iter_.sum() < exact.n_iter_.sum()
    above = loose.objective_ / exact.objective_ - 1
    assert 1e-8 < above.max() < 1e-3


@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test__chunks_do_not_change_the_result(noisy: Problem, cache_bytes: int) -> None:
    whole = LogisticRegression(STRENGTHS, chunk_bytes=2**30).fit(noisy.features, noisy.labels)
    # A chunk of 23 rows: their 7 features twice and 3 x 8 x 4 numbers for the classes, in float64.
    chunked = LogisticRegression(STRENGTHS, chunk_bytes=23 * 8 * (2 * 7 + 3 * 8 * 4), cache_bytes=cache_bytes)
    chunked.fit(noisy.features, noisy.labels)
    torch.testing.assert_close(chunked.objective_, whole.objective_, rtol=1e-9, atol=0)
    torch.testing.assert_close(chunked.coef_, whole.coef_, rtol=1e-3, atol=1e-5)
    scores, expected = (model.decision_function(noisy.held_out, 3) for model in (chunked, whole))
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-4)


def test__no_more_than_a_chunk_is_prepared_at_a_time(noisy: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    plain = logistic._cross_entropy

    def recorded(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes.append(logits.shape[2])
        return plain(logits, targets)

    monkeypatch.setattr(logistic, "_cross_entropy", recorded)
    LogisticRegression([1.0], chunk_bytes=100 * 8 * (2 * 7 + 3 * 4), cache_bytes=0).fit(noisy.features, noisy.labels)
    assert sizes[:3] == [100, 100, 40]
    assert max(sizes) == 100


def test__strengths_fitted_together_are_those_fitted_alone(noisy: Problem) -> None:
    together = LogisticRegression(STRENGTHS).fit(noisy.features, noisy.labels)
    for number, strength in enumerate(STRENGTHS):
        alone = LogisticRegression([strength]).fit(noisy.features, noisy.labels)
        torch.testing.assert_close(alone.objective_[0], together.objective_[number], rtol=1e-9, atol=0)
        torch.testing.assert_close(alone.coef_[0], together.coef_[number], rtol=1e-3, atol=1e-5)
        assert abs(int(alone.n_iter_[0]) - int(together.n_iter_[number])) <= 2


def test__a_problem_that_has_converged_costs_nothing_more(noisy: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = []
    plain = logistic._cross_entropy

    def recorded(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        evaluated.append(len(logits))
        return plain(logits, targets)

    monkeypatch.setattr(logistic, "_cross_entropy", recorded)
    ours = LogisticRegression([1e-6, 1e-4, 1e4], dtype=torch.float64).fit(noisy.features, noisy.labels)
    # All at the start, and then every trial step once.
    assert sum(evaluated) == 3 + int(ours.n_iter_.sum())
    assert evaluated[-1] == 1


def test__features_may_be_mapped_from_a_file(noisy: Problem, tmp_path: Path) -> None:
    path = tmp_path / "features.bin"
    noisy.features.contiguous().numpy().tofile(path)
    mapped = torch.from_file(str(path), size=noisy.features.numel()).view(noisy.features.shape)
    ours = LogisticRegression([0.1, 10.0], cache_bytes=0, chunk_bytes=2**12).fit(mapped, noisy.labels)
    expected = LogisticRegression([0.1, 10.0], cache_bytes=0, chunk_bytes=2**12).fit(noisy.features, noisy.labels)
    assert torch.equal(ours.coef_, expected.coef_)
    assert torch.equal(ours.predict(mapped, 1), expected.predict(noisy.features, 1))
    assert np.fromfile(path, dtype=np.float32).tolist() == noisy.features.flatten().tolist()


@pytest.mark.parametrize("name", ["badly scaled", "constant channel"])
@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test__standardising_on_the_way_is_standardising_before(name: str, cache_bytes: int) -> None:
    features, labels, held_out = problem(name)
    mean, scale = features.double().mean(0), features.double().std(0, correction=0)
    scale[features.amin(0) == features.amax(0)] = 0.0
    divisor = torch.where(scale == 0, 1.0, scale)
    before = LogisticRegression(STRENGTHS).fit((features.double() - mean) / divisor, labels)
    on_the_way = LogisticRegression(STRENGTHS, cache_bytes=cache_bytes).fit(features, labels, mean=mean, scale=scale)
    torch.testing.assert_close(on_the_way.objective_, before.objective_, rtol=1e-8, atol=0)
    torch.testing.assert_close(on_the_way.coef_, before.coef_, rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(on_the_way.intercept_, before.intercept_, rtol=1e-2, atol=1e-4)
    for number in range(len(STRENGTHS)):
        expected = before.predict((held_out.double() - mean) / divisor, number)
        assert torch.equal(on_the_way.predict(held_out, number), expected)


def test__a_large_mean_costs_no_digits(noisy: Problem) -> None:
    # Whole multiples of a 64th, so that the shift itself rounds nothing away.
    features, held_out = ((part * 64).round() / 64 for part in (noisy.features, noisy.held_out))
    plain = LogisticRegression([0.1, 1e3]).fit(features, noisy.labels)
    shifted = LogisticRegression([0.1, 1e3]).fit(features + 2.0**14, noisy.labels)
    torch.testing.assert_close(shifted.objective_, plain.objective_, rtol=1e-9, atol=0)
    for number in range(2):
        scores = shifted.decision_function(held_out + 2.0**14, number)
        torch.testing.assert_close(scores, plain.decision_function(held_out, number), rtol=1e-3, atol=1e-3)


def test__the_same_input_gives_the_same_bits(noisy: Problem) -> None:
    first, second = (LogisticRegression(STRENGTHS).fit(noisy.features, noisy.labels) for _ in range(2))
    assert torch.equal(first.coef_, second.coef_)
    assert torch.equal(first.intercept_, second.intercept_)


def test__labels_that_never_occur_are_never_predicted(noisy: Problem) -> None:
    spread = torch.tensor([3, 7, 8, 250])
    ours = LogisticRegression([1.0]).fit(noisy.features, spread[noisy.labels])
    expected = LogisticRegression([1.0]).fit(noisy.features, noisy.labels)
    assert ours.classes_.tolist() == spread.tolist()
    assert ours.coef_.shape == (1, 4, 7)
    assert torch.equal(ours.predict(noisy.held_out), spread[expected.predict(noisy.held_out)])


def test__equal_scores_go_to_the_lowest_label() -> None:
    features = torch.tensor([[-1.0, 0.0], [1.0, 0.0]]).repeat(4, 1)
    ours = LogisticRegression([1.0]).fit(features, torch.tensor([9, 9, 4, 4, 9, 9, 4, 4]))
    assert ours.predict_proba(torch.zeros(1, 2)).tolist() == [[0.5, 0.5]]
    assert ours.predict(torch.zeros(1, 2)).tolist() == [4]


def test__more_channels_than_samples_and_equal_channels_are_fitted() -> None:
    few = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    data = Problem(torch.cat([few, few[:, :5]], 1), torch.arange(12) % 3, few[:, [*range(20), *range(5)]])
    ours = LogisticRegression(STRENGTHS).fit(data.features, data.labels)
    assert ours.converged_.all()
    assert_same_minimum(ours, data, "newton-cholesky")


def test__features_that_say_nothing_give_the_frequencies() -> None:
    labels = torch.tensor([0] * 6 + [1] * 3 + [2] * 1)
    ours = LogisticRegression(STRENGTHS).fit(torch.full((10, 3), 2.5), labels)
    assert ours.converged_.all()
    assert not ours.coef_.any()
    torch.testing.assert_close(ours.predict_proba(torch.full((1, 3), 2.5), 5), torch.tensor([[0.6, 0.3, 0.1]]))


def test__a_fit_without_enough_iterations_says_so(noisy: Problem, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="capi"):
        ours = LogisticRegression([1e-6, 1e4], max_iterations=3).fit(noisy.features, noisy.labels)
    assert ours.converged_.tolist() == [True, False]
    assert ours.n_iter_.tolist() == [2, 3]
    assert [record.getMessage()[:67] for record in caplog.records] == [
        "logistic regression with C = 10000 has not converged in 3 iteration"
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test__values_that_are_no_finite_numbers_are_an_error(noisy: Problem, value: float) -> None:
    fitted = LogisticRegression([1.0]).fit(noisy.features, noisy.labels)
    for features in (noisy.features, noisy.held_out):
        features[17, 3] = value
    with pytest.raises(CapiError, match="no finite numbers"):
        LogisticRegression([1.0]).fit(noisy.features, noisy.labels)
    with pytest.raises(CapiError, match="no finite numbers"):
        fitted.predict(noisy.held_out)


def test__bad_input_is_an_error_that_says_what_to_do(noisy: Problem) -> None:
    features, labels, held_out = noisy
    with pytest.raises(CapiError, match="all 240 labels are 5"):
        LogisticRegression([1.0]).fit(features, torch.full((240,), 5))
    with pytest.raises(CapiError, match="no samples"):
        LogisticRegression([1.0]).fit(features[:0], labels[:0])
    for strengths in ([], [1.0, 0.0], [-1.0], [float("nan")]):
        with pytest.raises(CapiError, match="strengths must be positive"):
            LogisticRegression(strengths).fit(features, labels)
    with pytest.raises(CapiError, match=r"not torch\.float16"):
        LogisticRegression([1.0], dtype=torch.float16).fit(features, labels)
    with pytest.raises(CapiError, match=r"too large for torch\.float32: standardise"):
        LogisticRegression([1.0]).fit(features * 1e20, labels)
    with pytest.raises(CapiError, match="finite and no scale negative"):
        LogisticRegression([1.0]).fit(features, labels, scale=-torch.ones(7))
    with pytest.raises(CapiError, match="call fit first"):
        LogisticRegression([1.0]).predict(held_out)
    fitted = LogisticRegression([1.0]).fit(features, labels)
    with pytest.raises(CapiError, match="5 channels, but 7 were fitted"):
        fitted.predict(held_out[:, :5])
    with pytest.raises(CapiError, match="which = 1"):
        fitted.predict(held_out, 1)
