"""A sparse dictionary of patch features: each patch is a sum of a few atoms, none of them taken negatively.

Minimised is half the squared error plus `penalty` times the sum of all codes, in units where a patch has length 1 on
average; atoms have at most length 1 (Mairal and others, "Online learning for matrix factorization and sparse coding",
2010, with non-negative codes). Codes and atoms are found in turns, one coordinate after the other.
"""

import torch
from torch import Tensor

from capi.report.pictures.clusters import KMeans
from capi.types import Float

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
    centres = KMeans(count, seed=seed).fit(patches)
    found = centres.centres_ + centres.mean_.float()
    atoms[: len(found)] = found / found.norm(dim=1, keepdim=True).clamp_min(1e-6)
    return atoms
