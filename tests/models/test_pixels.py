import pytest
import torch

from capi.errors import CapiError
from capi.models.features import PixelEncoder
from capi.types import IMAGENET, Statistics, VisionEncoder, statistics_of


def test__the_features_of_a_patch_are_its_pixels() -> None:
    encoder = PixelEncoder(4)
    images = torch.randn(2, 3, 8, 12)
    features = encoder(images)
    assert features.feature_map.shape == (2, 2, 3, encoder.width)
    for row in range(2):
        for column in range(3):
            patch = images[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert torch.equal(features.feature_map[:, row, column], patch.flatten(1))


def test__it_is_an_encoder_without_weights_registers_and_pooled_vector() -> None:
    encoder = PixelEncoder(4)
    assert isinstance(encoder, VisionEncoder)
    assert not list(encoder.parameters())
    features = encoder(torch.zeros(2, 3, 8, 8))
    assert features.pooled is None
    assert features.registers.shape == (2, 0, 48)


def test__channels_and_statistics_are_its_own() -> None:
    encoder = PixelEncoder(2, Statistics((0.5,), (0.2,)))
    assert encoder.width == 4
    assert encoder(torch.zeros(1, 1, 4, 4)).feature_map.shape == (1, 2, 2, 4)
    assert statistics_of(encoder) == Statistics((0.5,), (0.2,))
    assert statistics_of(PixelEncoder()) == IMAGENET


def test__patches_without_pixels_are_an_error() -> None:
    with pytest.raises(CapiError, match="patches of 0 pixels"):
        PixelEncoder(0)


def test__images_that_patches_do_not_fill_are_an_error() -> None:
    with pytest.raises(CapiError, match="9 x 8 pixels"):
        PixelEncoder(4)(torch.zeros(1, 3, 9, 8))
