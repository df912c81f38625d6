import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from capi.errors import CapiError
from capi.report.pictures.pca import PatchSample, PatchSummary, fit_components, moments_of


def uneven(rows: int, width: int) -> Tensor:
    """Skewed values, each channel with a spread of its own, around a far mean."""
    return torch.empty(rows, width).exponential_() * torch.arange(width, 0, -1) + 50


def streamed(features: Tensor, part: int, **options: int) -> PatchSummary:
    summary = PatchSummary(**options)
    for some in features.split(part):
        summary.add(some)
    return summary


def test__merged_moments_are_those_of_all_patches() -> None:
    features = uneven(90, 5)
    merged = moments_of(features[:7]).merged(moments_of(features[7:50])).merged(moments_of(features[50:]))
    assert merged.count == 90
    np.testing.assert_allclose(merged.mean, features.double().mean(0))
    np.testing.assert_allclose(merged.scatter / 89, np.cov(features.double().numpy().T), rtol=1e-10)


def test__merging_keeps_small_variation_around_a_huge_mean() -> None:
    features = torch.randn(400, 3, dtype=torch.float64) + 1e8
    merged = moments_of(features[:100]).merged(moments_of(features[100:]))
    exact = np.cov((features - 1e8).numpy().T)
    np.testing.assert_allclose(merged.scatter / 399, exact, rtol=1e-5, atol=1e-6)
    # What the sum of squares less the square of the mean makes of it.
    naive = (features.T @ features / 400 - torch.outer(features.mean(0), features.mean(0))).numpy()
    assert abs(naive - exact).max() > 0.01


@pytest.mark.parametrize("part", [1, 13, 300])
def test__streamed_components_are_those_of_scikit_learn_up_to_sign(part: int) -> None:
    features = uneven(300, 6)
    components = streamed(features, part).components(4)
    theirs = PCA(4).fit(features.double().numpy())
    agreement = (components.directions * torch.from_numpy(theirs.components_).float()).sum(1)
    torch.testing.assert_close(agreement.abs(), torch.ones(4))
    torch.testing.assert_close(components.mean, torch.from_numpy(theirs.mean_).float())
    np.testing.assert_allclose(components.shares, theirs.explained_variance_ratio_, rtol=1e-4)
    assert ((components.project(features) ** 3).mean(0) > 0).all()


@pytest.mark.parametrize("rows", [4, 5, 6, 40])
def test__streaming_changes_nothing_of_few_or_many_patches(rows: int) -> None:
    features = uneven(rows, 5)
    components, at_once = streamed(features, 3).components(3), fit_components(features)
    torch.testing.assert_close(components.directions, at_once.directions, atol=1e-4, rtol=0)
    torch.testing.assert_close(components.shares, at_once.shares, atol=1e-5, rtol=0)


def test__fewer_patches_than_channels_make_no_scatter() -> None:
    # The scatter of this width would take more memory than there is.
    components = streamed(torch.randn(6, 300_000), 2).components(3)
    assert components.directions.shape == (3, 300_000)


def test__a_sample_with_room_is_everything_in_order() -> None:
    features = torch.randn(50, 2)
    assert torch.equal(streamed(features, 7).sample.values, features)


def test__a_sample_does_not_depend_on_the_batches() -> None:
    features = torch.arange(5000.0)[:, None]
    samples = []
    for part in (1000, 64, 5000, 3):
        sample = PatchSample(100)
        for some in features.split(part):
            sample.add(some)
        samples.append(sample.values[:, 0])
    assert all(torch.equal(samples[0], other) for other in samples[1:])
    assert len(samples[0]) == 100
    assert (samples[0].diff() > 0).all()


def test__a_sample_comes_from_everywhere_and_every_patch_is_as_likely() -> None:
    counts = torch.zeros(64)
    for seed in range(40):
        sample = PatchSample(400, seed)
        for _ in range(40):
            sample.add(torch.arange(64.0)[:, None])
        counts += sample.values[:, 0].long().bincount(minlength=64)
    expected = 40 * 400 / 64
    # Chi-square with 63 degrees of freedom, far beyond which lies a sample that prefers positions.
    assert ((counts - expected) ** 2 / expected).sum() < 110


def test__a_smaller_sample_is_part_of_the_sample() -> None:
    sample = PatchSample(100)
    sample.add(torch.arange(1000.0)[:, None])
    few = sample.some(20)[:, 0]
    assert len(few) == 20
    assert set(few.tolist()) < set(sample.values[:, 0].tolist())
    assert (few.diff() > 0).all()


def test__the_sample_stays_within_its_bounds() -> None:
    summary = PatchSummary(sample_rows=10)
    for _ in range(50):
        summary.add(torch.randn(8, 3))
        assert sum(len(keys) for keys, _ in summary.sample._parts) <= 20
    assert len(summary.sample.values) == 10
    assert summary.seen == 400


def test__nothing_to_sum_up_is_reported() -> None:
    assert PatchSummary().seen == 0
    with pytest.raises(CapiError, match="no patches"):
        PatchSummary().components(3)
