"""Groups of patches that are alike: k-means, seeded and the same on every run."""

import torch
from torch import Tensor

from capi.types import Float, Int

_ATTEMPTS, _ITERATIONS = 4, 100
# Distances of so many patches to all centres are in memory at a time.
_AT_ONCE = 2**15


class KMeans:
    """Lloyd's algorithm from k-means++ starts, the best of several. Clusters are numbered from the largest down.

    Where there are fewer different patches than clusters, there are as many clusters as those.
    """

    def __init__(self, clusters: int = 12, *, seed: int = 0) -> None:
        self.clusters, self.seed = clusters, seed

    def fit(self, features: Float[Tensor, "s d"]) -> "KMeans":
        # Around their mean, products of patches lose the fewest digits.
        mean = features.double().mean(0)
        values = (features.double() - mean).float()
        generator = torch.Generator().manual_seed(self.seed)
        found = [_refined(values, _start(values, self.clusters, generator)) for _ in range(_ATTEMPTS)]
        centres = min(found, key=lambda one: one[1])[0]
        sizes = _nearest(values, centres).bincount(minlength=len(centres))
        order = sizes.sort(descending=True, stable=True).indices
        self.mean_ = mean
        self.centres_ = centres[order]
        self.shares_ = sizes[order] / len(values)
        self.inertia_ = _inertia(values, self.centres_)
        return self

    def predict(self, features: Float[Tensor, "s d"]) -> Int[Tensor, " s"]:
        """The cluster of each patch."""
        return _nearest((features.double() - self.mean_).float(), self.centres_)


def _start(values: Float[Tensor, "s d"], clusters: int, generator: torch.Generator) -> Float[Tensor, "k d"]:
    """k-means++: each further centre is a patch, drawn by its squared distance to the nearest centre so far."""
    first = int(torch.randint(len(values), (1,), generator=generator))
    centres = [values[first]]
    distances = _squared(values, centres[0])
    for _ in range(clusters - 1):
        total = distances.cumsum(0)
        if total[-1] <= 0:
            break
        draw = torch.rand(1, generator=generator, dtype=torch.float64) * total[-1]
        # Rounding must not lead to a patch that is a centre already.
        chosen = min(int(torch.searchsorted(total, draw, right=True)), int(distances.nonzero()[-1]))
        centres.append(values[chosen])
        distances = torch.minimum(distances, _squared(values, values[chosen]))
    return torch.stack(centres)


def _refined(values: Float[Tensor, "s d"], centres: Float[Tensor, "k d"]) -> tuple[Tensor, float]:
    """Centres that are the means of the patches nearest to them, and the sum of squared distances."""
    labels = _nearest(values, centres)
    for _ in range(_ITERATIONS):
        centres = _means(values, labels, centres)
        moved = _nearest(values, centres)
        if torch.equal(moved, labels):
            break
        labels = moved
    return centres, _inertia(values, centres)


def _means(values: Float[Tensor, "s d"], labels: Int[Tensor, " s"], centres: Float[Tensor, "k d"]) -> Tensor:
    """The mean of each cluster; one that lost all its patches takes the patch that is worst off."""
    sizes = labels.bincount(minlength=len(centres))
    sums = torch.zeros(centres.shape, dtype=torch.float64).index_add_(0, labels, values.double())
    means = (sums / sizes.clamp_min(1)[:, None]).float()
    empty = (sizes == 0).nonzero()[:, 0]
    if len(empty):
        far = _squared(values, centres[labels]).topk(len(empty)).indices
        means[empty] = values[far]
    return means


def _nearest(values: Float[Tensor, "s d"], centres: Float[Tensor, "k d"]) -> Int[Tensor, " s"]:
    half = centres.square().sum(1) / 2
    return torch.cat([(part @ centres.T - half).argmax(1) for part in values.split(_AT_ONCE)])


def _inertia(values: Float[Tensor, "s d"], centres: Float[Tensor, "k d"]) -> float:
    return float(_squared(values, centres[_nearest(values, centres)]).sum())


def _squared(values: Float[Tensor, "s d"], others: Tensor) -> Float[Tensor, " s"]:
    """Squared distances, exact where they are small."""
    return (values - others).square().sum(1, dtype=torch.float64)
