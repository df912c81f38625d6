import numpy as np
import pytest
import torch

from capi.errors import CapiError
from capi.evals.features import Encoding
from capi.evals.patches import ColumnMoments, PatchCollector

VOID = 9


def test__standard_is_mean_and_deviation_and_a_channel_that_never_changes_stays() -> None:
    features = torch.randn(50, 3) * 4 + 100
    features[:, 1] = 7.5
    standard = ColumnMoments().add(features[:20]).add(features[20:]).standard()
    np.testing.assert_allclose(standard.mean.numpy(), features.double().mean(0).numpy(), rtol=1e-6)
    expected = np.where([True, False, True], features.double().numpy().std(0), 1.0)
    np.testing.assert_allclose(standard.scale.numpy(), expected, rtol=1e-6)
    plain = ColumnMoments().add(features).standard(wanted=False)
    assert (plain.mean.tolist(), plain.scale.tolist()) == ([0, 0, 0], [1, 1, 1])


def test__moments_keep_their_digits_far_from_zero() -> None:
    features = torch.randn(1000, 2).double() + 1e6
    moments = ColumnMoments()
    for part in features.split(7):
        moments.add(part.float())
    expected = features.float().double().numpy()
    np.testing.assert_allclose(moments.standard().scale.numpy(), expected.std(0), rtol=1e-6)


def test__patches_to_fit_on_are_a_slice_and_ignored_ones_count_in_the_statistics_alone() -> None:
    collector = PatchCollector(Encoding(), {VOID}, standardize=True)
    features = torch.randn(6, 3)
    blocks = torch.tensor([1, VOID, 2, 1, VOID, 1], dtype=torch.uint8)[:, None, None].expand(6, 2, 2).clone()
    to_fit = torch.tensor([True, True, True, True, False, False])
    for part in (slice(0, 4), slice(4, 6)):
        collector.add(features[part], blocks[part], to_fit[part], capacity=6)
    fit, every, left_out = collector.finish()
    assert (fit.labels.tolist(), every.labels.tolist(), left_out) == ([1, 2, 1], [1, 2, 1, 1], 2)
    assert torch.equal(every.features, features[[0, 2, 3, 5]])
    torch.testing.assert_close(fit.standard.mean, features[:4].mean(0))
    torch.testing.assert_close(fit.standard.scale, features[:4].std(0, correction=0))
    # Held-out images do not count in the statistics, not even where they are fitted on.
    assert torch.equal(every.standard.mean, fit.standard.mean)
    assert torch.equal(every.standard.scale, fit.standard.scale)


def test__nothing_but_ignored_patches_is_an_error() -> None:
    collector = PatchCollector(Encoding(), {VOID}, standardize=True)
    blocks = torch.full((2, 2, 2), VOID, dtype=torch.uint8)
    collector.add(torch.randn(2, 3), blocks, torch.tensor([True, False]), capacity=2)
    with pytest.raises(CapiError, match="no training patch has a label that counts"):
        collector.finish()
