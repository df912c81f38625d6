"""Groups of patches that are alike: k-means, seeded and the same on every run.

A sparse dictionary of patch features: each patch is a sum of a few atoms, none of them taken negatively.

Minimised is half the squared error plus `penalty` times the sum of all codes, in units where a patch has length 1 on
average; atoms have at most length 1 (Mairal and others, "Online learning for matrix factorization and sparse coding",
2010, with non-negative codes). Codes and atoms are found in turns, one coordinate after the other.
"""

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
        attempts = [_refined(values, _start(values, self.clusters, generator)) for _ in range(_ATTEMPTS)]
        centers = min(attempts, key=lambda attempt: attempt[1])[0]
        sizes = _nearest(values, centers).bincount(minlength=len(centers))
        order = sizes.sort(descending=True, stable=True).indices
        self.mean_ = mean
        self.centers_ = centers[order]
        self.shares_ = sizes[order] / len(values)
        self.inertia_ = _inertia(values, self.centers_)
        return self

    def predict(self, features: Float[Tensor, "s d"]) -> Int[Tensor, " s"]:
        """The cluster of each patch."""
        return _nearest((features.double() - self.mean_).float(), self.centers_)


def _start(values: Float[Tensor, "s d"], clusters: int, generator: torch.Generator) -> Float[Tensor, "k d"]:
    """k-means++: each further centre is a patch, drawn by its squared distance to the nearest centre so far."""
    first = int(torch.randint(len(values), (1,), generator=generator))
    centers = [values[first]]
    distances = _squared(values, centers[0])
    for _ in range(clusters - 1):
        total = distances.cumsum(0)
        if total[-1] <= 0:
            break
        draw = torch.rand(1, generator=generator, dtype=torch.float64) * total[-1]
        # Rounding must not lead to a patch that is a centre already.
        chosen = min(int(torch.searchsorted(total, draw, right=True)), int(distances.nonzero()[-1]))
        centers.append(values[chosen])
        distances = torch.minimum(distances, _squared(values, values[chosen]))
    return torch.stack(centers)


def _refined(values: Float[Tensor, "s d"], centers: Float[Tensor, "k d"]) -> tuple[Tensor, float]:
    """Centres that are the means of the patches nearest to them, and the sum of squared distances."""
    labels = _nearest(values, centers)
    for _ in range(_ITERATIONS):
        centers = _means(values, labels, centers)
        moved = _nearest(values, centers)
        if torch.equal(moved, labels):
            break
        labels = moved
    return centers, _inertia(values, centers)


def _means(values: Float[Tensor, "s d"], labels: Int[Tensor, " s"], centers: Float[Tensor, "k d"]) -> Tensor:
    """The mean of each cluster; one that lost all its patches takes the patch that is worst off."""
    sizes = labels.bincount(minlength=len(centers))
    sums = torch.zeros(centers.shape, dtype=torch.float64).index_add_(0, labels, values.double())
    means = (sums / sizes.clamp_min(1)[:, None]).float()
    empty = (sizes == 0).nonzero()[:, 0]
    if len(empty):
        far = _squared(values, centers[labels]).topk(len(empty)).indices
        means[empty] = values[far]
    return means


def _nearest(values: Float[Tensor, "s d"], centers: Float[Tensor, "k d"]) -> Int[Tensor, " s"]:
    half = centers.square().sum(1) / 2
    return torch.cat([(part @ centers.T - half).argmax(1) for part in values.split(_AT_ONCE)])


def _inertia(values: Float[Tensor, "s d"], centers: Float[Tensor, "k d"]) -> float:
    return float(_squared(values, centers[_nearest(values, centers)]).sum())


def _squared(values: Float[Tensor, "s d"], others: Tensor) -> Float[Tensor, " s"]:
    """Squared distances, exact where they are small."""
    return (values - others).square().sum(1, dtype=torch.float64)


_ROUNDS = 60
_SWEEPS, _MOST_SWEEPS, _SETTLED = 5, 500, 1e-5


class SparseDictionary:
    """Atoms are numbered by how much they are used, and deterministic: they start from k-means."""

    def __init__(self, atoms: int = 8, *, penalty: float = 0.1, seed: int = 0) -> None:
        self.atoms, self.penalty, self.seed = atoms, penalty, seed

    def fit(self, features: Float[Tensor, "s d"]) -> "SparseDictionary":
        values = features.double()
        self.mean_ = values.mean(0)
        length = (values - self.mean_).square().sum(1).mean().sqrt()
        # Patches that differ by rounding alone are all the same.
        self.scale_ = length if length > 1e-6 * values.norm(dim=1).max() else torch.tensor(torch.inf).double()
        patches = self._scaled(features)
        atoms = _starting_atoms(patches, self.atoms, self.seed)
        codes = torch.zeros(len(patches), len(atoms))
        for _ in range(_ROUNDS):
            codes = swept(patches, atoms, codes, self.penalty, _SWEEPS)
            atoms = renewed(patches, atoms, codes)
        codes = swept(patches, atoms, codes, self.penalty, _MOST_SWEEPS)
        self.atoms_ = atoms[codes.sum(0).sort(descending=True, stable=True).indices]
        return self

    def transform(self, features: Float[Tensor, "s d"]) -> Float[Tensor, "s k"]:
        """How much of each atom is in each patch."""
        patches = self._scaled(features)
        start = torch.zeros(len(patches), len(self.atoms_))
        return swept(patches, self.atoms_, start, self.penalty, _MOST_SWEEPS)

    def _scaled(self, features: Float[Tensor, "s d"]) -> Float[Tensor, "s d"]:
        return ((features.double() - self.mean_) / self.scale_).float()


def swept(
    patches: Float[Tensor, "s d"], atoms: Float[Tensor, "k d"], codes: Float[Tensor, "s k"], penalty: float, sweeps: int
) -> Float[Tensor, "s k"]:
    """Better codes for given atoms: each in turn the best there is for the others, until they settle."""
    products, overlaps = patches @ atoms.T - penalty, atoms @ atoms.T
    codes = codes.clone()
    for _ in range(sweeps):
        before = codes.clone()
        for atom in range(len(atoms)):
            own = overlaps[atom, atom].clamp_min(1e-12)
            rest = products[:, atom] - codes @ overlaps[:, atom] + codes[:, atom] * own
            codes[:, atom] = (rest / own).clamp_min(0)
        if (codes - before).abs().max() < _SETTLED:
            break
    return codes


def renewed(
    patches: Float[Tensor, "s d"], atoms: Float[Tensor, "k d"], codes: Float[Tensor, "s k"]
) -> Float[Tensor, "k d"]:
    """Better atoms for given codes: each in turn the best there is for the others, within length 1."""
    weights, wanted = codes.T @ codes, codes.T @ patches
    atoms = atoms.clone()
    for atom in range(len(atoms)):
        if weights[atom, atom] > 0:
            moved = atoms[atom] + (wanted[atom] - weights[atom] @ atoms) / weights[atom, atom]
            atoms[atom] = moved / moved.norm().clamp_min(1.0)
    return atoms


def _starting_atoms(patches: Float[Tensor, "s d"], count: int, seed: int) -> Float[Tensor, "_ d"]:
    """The directions of clusters; those that are missing, or lie in the middle, stay zero and are never used."""
    atoms = torch.zeros(count, patches.shape[1])
    centers = KMeans(count, seed=seed).fit(patches)
    directions = centers.centers_ + centers.mean_.float()
    atoms[: len(directions)] = directions / directions.norm(dim=1, keepdim=True).clamp_min(1e-6)
    return atoms
