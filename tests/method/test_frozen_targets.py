import pytest
import torch
import torch.nn.functional as F

from capi.errors import CapiError
from capi.method.frozen_targets import FrozenTargets, renormalized, resampled, to_whole_patches
from capi.method.teacher import Teacher
from capi.models.features import PixelEncoder
from capi.types import IMAGENET, Features, Statistics

GRAY = Statistics((0.5,) * 3, (0.25,) * 3)


def test__with_the_same_grid_targets_are_the_encoder_s_features_normalized(teacher: Teacher) -> None:
    encoder, images = PixelEncoder(4), torch.randn(2, 3, 12, 8)
    target = FrozenTargets(encoder=encoder, patch_size=4, statistics=IMAGENET)
    tokens = target.tokens(teacher, images)
    assert torch.equal(tokens, encoder(images).feature_map.flatten(1, 2))
    _, (targets,) = target([tokens], [torch.tensor([[5], [2]])])
    torch.testing.assert_close(targets[0, 0], F.layer_norm(tokens[0, 5], (48,)))
    assert not target.state_dict()


@pytest.mark.parametrize("size", [2, 6, 12])
def test__with_another_grid_features_are_resampled(size: int, teacher: Teacher) -> None:
    encoder, images = PixelEncoder(size), torch.randn(2, 3, 12, 12)
    target = FrozenTargets(encoder=encoder, patch_size=4, statistics=IMAGENET)
    feature_map = encoder(images).feature_map.permute(0, 3, 1, 2)
    expected = F.interpolate(feature_map, size=(3, 3), mode="bilinear", antialias=True)
    tokens = target.tokens(teacher, images)
    torch.testing.assert_close(tokens, expected.flatten(2).transpose(1, 2))
    assert tokens.shape == (2, 9, encoder.width)


def test__resampling_keeps_places_where_they_are() -> None:
    rows = torch.arange(8.0)[:, None].expand(8, 6)
    columns = torch.arange(6.0).expand(8, 6)
    places = resampled(torch.stack([rows, columns], -1)[None], 4, 3)[0]
    torch.testing.assert_close(places[1, 1], torch.tensor([2.5, 2.5]), rtol=0, atol=1e-5)
    finer = resampled(torch.stack([rows, columns], -1)[None], 16, 12)[0]
    torch.testing.assert_close(finer[6, 5], torch.tensor([2.75, 2.25]), rtol=0, atol=1e-5)


def test__images_are_resized_to_whole_patches_of_the_encoder(teacher: Teacher) -> None:
    images = torch.randn(1, 3, 32, 24)
    assert to_whole_patches(images, 8) is images
    assert to_whole_patches(images, 14).shape == (1, 3, 28, 28)
    assert to_whole_patches(images, 100).shape == (1, 3, 100, 100)
    target = FrozenTargets(encoder=PixelEncoder(14), patch_size=4, statistics=IMAGENET)
    assert target.tokens(teacher, images).shape == (1, 48, 3 * 14 * 14)


def test__the_encoder_gets_images_normalized_as_it_wants(teacher: Teacher) -> None:
    seen = []

    class Watching(PixelEncoder):
        def forward(self, images: torch.Tensor, *, pooled: bool = True) -> Features:
            seen.append((images, pooled))
            return super().forward(images, pooled=pooled)

    plain = torch.rand(2, 3, 8, 8)
    mean, std = (torch.tensor(values)[:, None, None] for values in IMAGENET)
    target = FrozenTargets(encoder=Watching(4, GRAY), patch_size=4, statistics=IMAGENET)
    target.tokens(teacher, (plain - mean) / std)
    ((images, pooled),) = seen
    torch.testing.assert_close(images, (plain - 0.5) / 0.25, rtol=1e-4, atol=1e-5)
    assert not pooled
    assert renormalized(plain, GRAY, GRAY) is plain


def test__another_number_of_channels_is_refused() -> None:
    with pytest.raises(CapiError, match=r"takes images with 3 channels, but model\.channels is 1"):
        FrozenTargets(encoder=PixelEncoder(4), patch_size=4, statistics=Statistics((0.5,), (0.5,)))
