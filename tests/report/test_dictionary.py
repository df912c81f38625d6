import numpy as np
import pytest
import torch
from sklearn.decomposition import DictionaryLearning, sparse_encode
from torch import Tensor

from capi.report.pictures.clusters import SparseDictionary, renewed, swept


def mixed(patches: int = 200, atoms: int = 4, width: int = 10) -> tuple[Tensor, Tensor]:
    """Sums of few atoms with a little noise, and the atoms."""
    directions = torch.linalg.qr(torch.randn(width, atoms)).Q.T
    codes = torch.rand(patches, atoms) * (torch.rand(patches, atoms) < 0.4)
    return codes @ directions + 0.01 * torch.randn(patches, width), directions


def objective(patches: Tensor, atoms: Tensor, codes: Tensor, penalty: float) -> float:
    """What is minimised, for each patch on average."""
    error = (patches - codes @ atoms).square().sum(1, dtype=torch.float64) / 2
    return float((error + penalty * codes.sum(1)).mean())


def test__codes_are_those_of_scikit_learn() -> None:
    patches, atoms = torch.randn(50, 8), torch.nn.functional.normalize(torch.randn(6, 8), dim=1)
    ours = swept(patches, atoms, torch.zeros(50, 6), 0.3, 2000)
    theirs = sparse_encode(
        patches.double().numpy(), atoms.double().numpy(), algorithm="lasso_cd", alpha=0.3, positive=True, max_iter=5000
    )
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
    assert (ours == 0).float().mean() > 0.2


def test__every_step_lowers_the_objective() -> None:
    patches, _ = mixed()
    atoms, codes = torch.nn.functional.normalize(torch.randn(5, 10), dim=1), torch.zeros(200, 5)
    values = [objective(patches, atoms, codes, 0.05)]
    for _ in range(10):
        codes = swept(patches, atoms, codes, 0.05, 1)
        values.append(objective(patches, atoms, codes, 0.05))
        atoms = renewed(patches, atoms, codes)
        values.append(objective(patches, atoms, codes, 0.05))
        assert (atoms.norm(dim=1) <= 1 + 1e-5).all()
    assert (np.diff(values) <= 1e-7).all()
    assert values[-1] < 0.5 * values[0]


def test__the_dictionary_is_as_good_as_that_of_scikit_learn() -> None:
    features, _ = mixed()
    dictionary = SparseDictionary(4, penalty=0.1).fit(features)
    patches = ((features - dictionary.mean_) / dictionary.scale_).float()
    theirs = DictionaryLearning(
        4,
        alpha=0.1,
        positive_code=True,
        fit_algorithm="cd",
        transform_algorithm="lasso_cd",
        transform_alpha=0.1,
        random_state=0,
        max_iter=300,
    ).fit(patches.double().numpy())
    codes = torch.from_numpy(theirs.transform(patches.double().numpy())).float()
    best = objective(patches, torch.from_numpy(theirs.components_).float(), codes, 0.1)
    assert objective(patches, dictionary.atoms_, dictionary.transform(features), 0.1) <= best * 1.05


def test__codes_are_not_negative_and_atoms_are_ordered_by_their_use() -> None:
    features, _ = mixed()
    codes = SparseDictionary(4).fit(features).transform(features)
    assert codes.shape == (200, 4)
    assert (codes >= 0).all()
    assert (codes == 0).any()
    assert (codes.sum(0).diff() <= 1e-3).all()
    assert torch.equal(codes, SparseDictionary(4).fit(features).transform(features))


@pytest.mark.parametrize("patches", [1, 2, 30])
def test__patches_that_are_all_alike_use_no_atom(patches: int) -> None:
    features = torch.full((patches, 6), 3.3)
    codes = SparseDictionary(4).fit(features).transform(features)
    assert codes.tolist() == [[0.0] * 4] * patches


def test__codes_do_not_depend_on_the_scale_of_the_features() -> None:
    features, _ = mixed()
    small, large = (SparseDictionary(3).fit(scale * features) for scale in (1e-3, 1e3))
    torch.testing.assert_close(small.transform(1e-3 * features), large.transform(1e3 * features), atol=1e-3, rtol=0)
