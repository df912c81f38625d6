import torch

from capi.method.bounded import ClusteringSettings, cluster
from capi.method.factors import normalized, rebuild
from capi.method.sinkhorn import OneProcess


def test__targets_of_any_images_are_rebuilt_as_they_were_balanced_together() -> None:
    tokens, prototypes, bias = torch.randn(6, 5, 8), torch.randn(20, 8), torch.randn(20)
    index = torch.rand(6, 5).argsort(1)[:, :3]
    for sinkhorn in ("positionwise", "standard"):
        settings = ClusteringSettings(sinkhorn=sinkhorn)
        expected = cluster(tokens, index, prototypes, bias, settings, OneProcess()).targets
        factors = cluster(tokens, None, prototypes, bias, settings, OneProcess()).factors
        assert expected is not None
        assert factors is not None
        for first, last in ((0, 2), (2, 3), (3, 6)):
            found = rebuild(
                tokens[first:last],
                index[first:last],
                prototypes,
                factors,
                first_image=first,
                images=6,
                target_temperature=settings.target_temperature,
            )
            torch.testing.assert_close(found, expected[first:last], rtol=1e-4, atol=1e-6)


def test__tokens_have_length_one_and_zeros_stay() -> None:
    # Lengths are bounded from below by 1e-7, which a faint token does not come near.
    tokens = torch.cat([torch.randn(3, 8), 1e-5 * torch.randn(1, 8), torch.zeros(1, 8)]).bfloat16()
    found = normalized(tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.norm(dim=1), torch.tensor([1.0, 1, 1, 1, 0]))
