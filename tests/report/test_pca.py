import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA
from torch import Tensor

from capi.report.pictures.pca import as_colors, fit_components, pca_pictures, photos_of
from capi.types import Features


class Patches:
    """An encoder whose patches are the pixels themselves."""

    width, patch_size = 5, 1

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
        assert not pooled
        return Features(None, torch.zeros(len(images), 0, 5), images.permute(0, 2, 3, 1))


def uneven(*shape: int) -> Tensor:
    """Skewed values around a far mean, the first of the last axis the most spread."""
    spread = torch.arange(shape[-1], 0, -1).float()
    return torch.empty(shape).exponential_() * spread * torch.tensor([1.0, -1.0]).repeat(shape[-1])[: shape[-1]] + 9


def colored(color: tuple[int, int, int], width: int = 2, height: int = 2) -> Image.Image:
    return Image.new("RGB", (width, height), color)


def test__components_are_those_of_scikit_learn_up_to_sign() -> None:
    features = uneven(80, 6)
    ours, theirs = fit_components(features), PCA(3).fit(features.double().numpy())
    torch.testing.assert_close(ours.mean, torch.from_numpy(theirs.mean_).float())
    agreement = (ours.directions * torch.from_numpy(theirs.components_).float()).sum(1)
    torch.testing.assert_close(agreement.abs(), torch.ones(3))
    expected = torch.from_numpy(theirs.transform(features.double().numpy())).float() * agreement.sign()
    torch.testing.assert_close(ours.project(features), expected, atol=1e-4, rtol=1e-4)


def test__each_component_leans_to_the_right_whatever_the_sign_of_the_features() -> None:
    features = uneven(200, 6)
    for turned in (features, -features):
        projected = fit_components(turned, 4).project(turned)
        assert ((projected**3).mean(0) > 0).all()
    torch.testing.assert_close(
        fit_components(features).project(features), fit_components(-features).project(-features), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("patches", [1, 2, 3])
def test__components_that_the_patches_lack_are_zero(patches: int) -> None:
    features = torch.randn(patches, 6) + 5
    projected = fit_components(features).project(features)
    torch.testing.assert_close(torch.cdist(projected, projected), torch.cdist(features, features), atol=1e-4, rtol=0)
    assert (projected[:, patches - 1 :] == 0).all()


def test__patches_that_differ_by_rounding_alone_have_one_color() -> None:
    features = torch.randn(6).repeat(40, 1) * (1 + 1e-7 * torch.randn(40, 1))
    assert len(features.unique(dim=0)) > 1
    assert len(as_colors(fit_components(features).project(features)).unique(dim=0)) == 1


def test__colors_stretch_all_but_the_extremes_over_0_to_255() -> None:
    values = torch.randn(2, 25, 20, 3) * torch.tensor([0.01, 1.0, 100.0])
    values[0, 0, 0], values[0, 0, 1] = 1e6, -1e6
    colors = as_colors(values)
    flat = values.flatten(0, 2).double().numpy()
    low, high = np.percentile(flat, [1, 99], axis=0)
    expected = np.round(np.clip((flat - low) / (high - low), 0, 1) * 255).astype(np.uint8)
    assert colors.dtype == torch.uint8
    assert np.array_equal(colors.flatten(0, 2).numpy(), expected)
    assert colors.amin((0, 1, 2)).tolist() == [0, 0, 0]
    assert colors.amax((0, 1, 2)).tolist() == [255, 255, 255]


def test__a_component_without_variation_is_gray_and_leaves_the_others_alone() -> None:
    values = torch.randn(30, 3)
    flat = values.clone()
    flat[:, 1] = 4.0
    assert torch.equal(as_colors(flat)[:, [0, 2]], as_colors(values)[:, [0, 2]])
    assert (as_colors(flat)[:, 1] == 128).all()


def test__joint_pictures_share_their_components_and_others_have_their_own() -> None:
    images = uneven(3, 4, 6, 5).permute(0, 3, 1, 2) * torch.tensor([1.0, 2.0, 3.0])[:, None, None, None]
    features = images.permute(0, 2, 3, 1)
    alone, joint = pca_pictures(Patches(), images), pca_pictures(Patches(), images, joint=True)
    assert [picture.size for picture in alone + joint] == [(6, 4)] * 6
    together = as_colors(fit_components(features.flatten(0, 2)).project(features.flatten(0, 2))).view(3, 4, 6, 3)
    for number in range(3):
        patches = features[number].flatten(0, 1)
        own = as_colors(fit_components(patches).project(patches)).view(4, 6, 3)
        assert np.array_equal(np.asarray(alone[number]), own.numpy())
        assert np.array_equal(np.asarray(joint[number]), together[number].numpy())
        assert not torch.equal(own, together[number])


@pytest.mark.parametrize("channels", [1, 3])
def test__photos_show_the_pixels_and_no_overflow(channels: int) -> None:
    pixels = torch.tensor([-3.0, 0.0, 100.4, 254.6, 259.0, 7.0]).view(1, 1, 2, 3).repeat(2, channels, 1, 1)
    pixels[1] = pixels[1].flip(-1)
    first, second = (np.asarray(photo) for photo in photos_of(pixels))
    assert first.shape == (2, 3, 3)
    assert first[..., channels - 1].tolist() == [[0, 0, 100], [255, 255, 7]]
    assert np.array_equal(second, first[:, ::-1])
    whole = torch.randint(256, (1, 3, 4, 5), dtype=torch.uint8)
    assert np.array_equal(np.asarray(photos_of(whole)[0]), whole[0].permute(1, 2, 0).numpy())


def test__dim_images_are_stretched_and_bytes_are_not() -> None:
    """12 bits in 16: a hundred of 65535 levels, between which the shapes of the image lie."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(400, 500, (2, 3, 20, 30), generator=generator)
    dim = levels.float() / 257
    first, _ = (np.asarray(photo).astype(int) for photo in photos_of(dim))
    low, high = np.percentile(dim[0].numpy(), (1, 99))
    expected = np.clip((dim[0].permute(1, 2, 0).numpy() - low) / (high - low), 0, 1) * 255
    assert np.abs(first - expected).max() <= 0.51
    assert (first.min(), first.max()) == (0, 255)
    # Bytes stay what they are, also as floats; so do 16 bits that fill a quarter of the range, and a constant image.
    dark = torch.randint(3, 9, (1, 3, 20, 30), generator=generator)
    for pixels in (dark.byte(), dark.float()):
        assert np.array_equal(np.asarray(photos_of(pixels)[0]), dark[0].permute(1, 2, 0).numpy())
    wide = torch.rand(1, 3, 20, 30, generator=generator) * 80
    assert np.array_equal(np.asarray(photos_of(wide)[0]), wide[0].round().byte().permute(1, 2, 0).numpy())
    assert np.asarray(photos_of(torch.full((1, 1, 4, 4), 1.3))[0]).max() == 1


def test__one_bright_pixel_does_not_keep_an_image_dark() -> None:
    dim = torch.rand(1, 1, 30, 30, generator=torch.Generator().manual_seed(0))
    dim[0, 0, 3, 4] = 200.5
    photo = np.asarray(photos_of(dim)[0])
    assert np.median(photo) > 100
    assert photo[3, 4].tolist() == [255] * 3


def test__of_many_channels_three_are_shown_and_of_two_one() -> None:
    pixels = torch.randint(256, (1, 5, 4, 6), dtype=torch.uint8)
    assert np.array_equal(np.asarray(photos_of(pixels)[0]), pixels[0, :3].permute(1, 2, 0).numpy())
    assert np.array_equal(np.asarray(photos_of(pixels[:, :2])[0])[..., 2], pixels[0, 0].numpy())
