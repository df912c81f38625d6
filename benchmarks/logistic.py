"""The grid of eight penalties of logistic regression against eight fits of scikit-learn at an equal objective.

    python benchmarks/logistic.py

Each fit of scikit-learn gets the loosest tolerance with which its objective is within 1e-4 of the minimum, and float32,
its faster precision, where that gets there. `--array-api` also lets scikit-learn compute with torch.
"""

import argparse
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from measure import Work, interleaved_best
from torch import Tensor

from capi.evals.logistic import LogisticRegression
from capi.runtime.devices import keep_freed_memory

STRENGTHS = np.logspace(-6, 5, 8).tolist()
EQUAL = 1e-4
# Share of the penalty that is left to gain; what is reached is measured and printed.
OUR_TOLERANCE = 3e-6
THEIR_TOLERANCES = [10.0**-half for half in np.arange(2, 12.5, 0.5)]
# How far apart the classes are and how many labels are wrong.
CASES = {"overlapping": (0.3, 0.1), "separable": (0.9, 0.0)}


@dataclass(frozen=True)
class Fit:
    """How scikit-learn is asked for one strength."""

    strength: float
    tolerance: float
    dtype: torch.dtype


def correlated_features(
    samples: int, width: int, classes: int, distance: float, wrong: float, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Standardised features whose spectrum falls as 1 / rank, with a little noise, in classes of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator)
    frequency = normal(classes).softmax(0)
    labels = torch.multinomial(frequency, samples, replacement=True, generator=generator)
    latent = (normal(samples, width) + distance * normal(classes, width)[labels]) / torch.arange(1, width + 1).sqrt()
    features = latent @ torch.linalg.qr(normal(width, width)).Q.T + 0.02 * normal(samples, width)
    other = torch.randint(classes, (samples,), generator=generator)
    labels = torch.where(torch.rand(samples, generator=generator) < wrong, other, labels)
    return (features - features.mean(0)) / features.std(0), labels


def objective(features: Tensor, labels: Tensor, strength: float, weights: Tensor, intercept: Tensor) -> float:
    scores = features.double() @ weights.double().T + intercept.double()
    losses = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
    return float(strength * losses + 0.5 * weights.double().square().sum())


def scikit_learn(features: Tensor, labels: Tensor, fit: Fit, array_api: bool = False) -> tuple[Tensor, Tensor]:
    """Weights and intercepts by scikit-learn's own L-BFGS."""
    from sklearn import config_context
    from sklearn.linear_model import LogisticRegression as ScikitLearn

    model = ScikitLearn(C=fit.strength, tol=fit.tolerance, max_iter=100_000)
    with warnings.catch_warnings(), config_context(array_api_dispatch=array_api):
        warnings.simplefilter("ignore")
        given = features.to(fit.dtype)
        model.fit(*((given, labels) if array_api else (given.numpy(), labels.numpy())))
    return torch.as_tensor(model.coef_), torch.as_tensor(model.intercept_)


def loosest(features: Tensor, labels: Tensor, minima: Sequence[float]) -> list[Fit]:
    """The cheapest way in which scikit-learn comes near enough to each minimum, or else its tightest."""
    ways, fits = list(product((torch.float32, torch.float64), THEIR_TOLERANCES)), []
    for strength, minimum in zip(STRENGTHS, minima, strict=True):
        for dtype, tolerance in ways:
            fit = Fit(strength, tolerance, dtype)
            above = objective(features, labels, strength, *scikit_learn(features, labels, fit)) / minimum - 1
            if above <= EQUAL:
                break
        fits.append(fit)
        # A weaker penalty never needs less: begin a little looser than here.
        ways = ways[max(ways.index((dtype, tolerance)) - 1, 0) :]
        print(f"  C = {strength:7.1e}  scikit-learn's tol {tolerance:.0e} in {str(dtype)[6:]}, ", end="")
        print(f"objective above the minimum by {above:.1e}", flush=True)
    return fits


def compare(name: str, features: Tensor, labels: Tensor, arguments: argparse.Namespace) -> None:
    print(f"{name}: {len(features)} x {features.shape[1]} features, {int(labels.max()) + 1} classes")
    minima = LogisticRegression(STRENGTHS, tolerance=1e-11).fit(features, labels).objective_.tolist()
    fits = loosest(features, labels, minima)
    ours = LogisticRegression(STRENGTHS, tolerance=OUR_TOLERANCE)

    def theirs(array_api: bool) -> Sequence[tuple[Tensor, Tensor]]:
        return [scikit_learn(features, labels, fit, array_api) for fit in fits]

    works: dict[str, Work] = {"ours": partial(ours.fit, features, labels), "scikit-learn": partial(theirs, False)}
    if arguments.array_api:
        works["scikit-learn on torch"] = partial(theirs, True)
    seconds = interleaved_best(works, arguments.rounds)
    above = max(reached / minimum - 1 for reached, minimum in zip(ours.objective_.tolist(), minima, strict=True))
    print(f"  ours: {ours.n_iter_.tolist()} iterations, objectives above the minimum by at most {above:.1e}")
    assert above <= EQUAL, "the comparison is at an equal objective"
    for work, value in seconds.items():
        print(f"  {work:22} {value:7.2f} s   {value / seconds['ours']:5.1f} x ours", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("samples", 20_000), ("width", 384), ("classes", 21), ("rounds", 3)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--array-api", action="store_true", help="also scikit-learn's array-API dispatch to torch")
    arguments = parser.parse_args(words)
    # scikit-learn looks at this when it is imported.
    os.environ["SCIPY_ARRAY_API"] = "1"
    keep_freed_memory()
    for name, (distance, wrong) in CASES.items():
        if arguments.only in (None, name):
            data = correlated_features(arguments.samples, arguments.width, arguments.classes, distance, wrong)
            compare(name, *data, arguments)


if __name__ == "__main__":
    main()
