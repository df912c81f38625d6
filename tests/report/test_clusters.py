import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans as TheirKMeans
from torch import Tensor

from capi.report.pictures.clusters import KMeans


def blobs(clusters: int, each: int, spread: float, width: int = 4) -> Tensor:
    centers = torch.randn(clusters, width) * 5
    return (centers[:, None] + spread * torch.randn(clusters, each, width)).flatten(0, 1) + 100


@pytest.mark.parametrize(("clusters", "spread"), [(3, 0.3), (6, 1.0), (8, 4.0)])
def test__the_inertia_is_as_good_as_that_of_scikit_learn(clusters: int, spread: float) -> None:
    features = blobs(clusters, 60, spread)
    ours = KMeans(clusters).fit(features)
    theirs = TheirKMeans(clusters, n_init=10, random_state=0).fit(features.numpy())
    assert ours.inertia_ <= theirs.inertia_ * 1.02
    # What is said of the inertia is true of the labels.
    centers = ours.centers_ + ours.mean_
    assert ours.inertia_ == pytest.approx(float((features - centers[ours.predict(features)]).square().sum()), rel=1e-4)


def test__each_patch_belongs_to_the_nearest_center_which_is_the_mean_of_its_patches() -> None:
    features = blobs(5, 40, 2.0)
    clusters = KMeans(5).fit(features)
    labels, centers = clusters.predict(features), clusters.centers_.double() + clusters.mean_
    distances = torch.cdist(features.double(), centers, compute_mode="donot_use_mm_for_euclid_dist")
    assert torch.equal(labels, distances.argmin(1))
    for number in range(5):
        torch.testing.assert_close(features[labels == number].double().mean(0), centers[number], atol=1e-3, rtol=0)


def test__clusters_are_numbered_from_the_largest_down_and_are_the_same_every_time() -> None:
    features = torch.cat([blobs(1, size, 0.2) + 40 * place for place, size in enumerate((10, 50, 30))])
    first, second = KMeans(3, seed=4).fit(features), KMeans(3, seed=4).fit(features)
    assert first.predict(features).bincount().tolist() == [50, 30, 10]
    assert first.shares_.tolist() == pytest.approx([50 / 90, 30 / 90, 10 / 90])
    assert torch.equal(first.centers_, second.centers_)


@pytest.mark.parametrize("different", [1, 2, 3])
def test__fewer_different_patches_than_clusters_make_as_many_clusters(different: int) -> None:
    features = torch.randn(different, 3).repeat(20, 1)
    clusters = KMeans(8).fit(features)
    assert len(clusters.centers_) == different
    assert clusters.inertia_ == pytest.approx(0, abs=1e-9)
    assert len(clusters.predict(features).unique()) == different


def test__a_cluster_that_loses_all_patches_takes_one_that_is_far_off() -> None:
    from capi.report.pictures.clusters import _means

    values = torch.tensor([[0.0], [1.0], [9.0]])
    labels, centers = torch.tensor([0, 0, 0]), torch.tensor([[0.5], [100.0]])
    assert _means(values, labels, centers)[1].tolist() == [9.0]
    assert np.isclose(_means(values, labels, centers)[0].item(), 10 / 3)
