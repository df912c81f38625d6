import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from capi.data.crops import center_box, color_changes, crop_draws, flips, normalize, random_box, recolor
from capi.data.decoding import Box
from capi.runtime.randomness import sample_keys
from tests.data.pictures import noise

KEYS = sample_keys(0, 0, torch.arange(4000))
DRAWS = crop_draws(KEYS)
ASPECT = (3 / 4, 4 / 3)
QUANTILES = [0.1, 0.25, 0.5, 0.75, 0.9]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("size", [(224, 224), (100, 150), (33, 500), (500, 33), (5, 4), (1, 1), (1, 900)])
@pytest.mark.parametrize("scale", [(0.6, 1.0), (0.08, 1.0), (0.001, 0.01), (1.0, 1.0)])
def test__a_crop_is_whole_pixels_inside_the_image(size: tuple[int, int], scale: tuple[float, float]) -> None:
    for draws in DRAWS[:500]:
        box = random_box(size, draws, scale, ASPECT)
        assert all(side == int(side) for side in box)
        assert 0 <= box.left < box.right <= size[1]
        assert 0 <= box.top < box.bottom <= size[0]


@pytest.mark.parametrize(("size", "scale"), [((1000, 1000), (0.6, 1.0)), ((900, 1200), (0.08, 0.4))])
def test__area_and_aspect_stay_within_their_ranges(size: tuple[int, int], scale: tuple[float, float]) -> None:
    for draws in DRAWS:
        box = random_box(size, draws, scale, ASPECT)
        across, down = box.right - box.left, box.bottom - box.top
        # Half a pixel of rounding on each side.
        assert scale[0] * 0.995 <= across * down / (size[0] * size[1]) <= scale[1] * 1.005
        assert ASPECT[0] * 0.995 <= across / down <= ASPECT[1] * 1.005


def test__area_is_uniform_aspect_is_log_uniform_and_the_place_is_uniform() -> None:
    # Up to half of the area at an aspect of up to 4 / 3 always fits, so nothing is drawn again.
    boxes = np.array([random_box((3000, 3000), draws, (0.1, 0.5), ASPECT) for draws in DRAWS])
    across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    uniform = [
        (across * down / 3000**2 - 0.1) / 0.4,
        np.log(across / down) / (2 * math.log(4 / 3)) + 0.5,
        boxes[:, 0] / (3000 - across),
        boxes[:, 1] / (3000 - down),
    ]
    for values in uniform:
        np.testing.assert_allclose(np.quantile(values, QUANTILES), QUANTILES, atol=5 * 0.5 / math.sqrt(4000))
    correlation = np.corrcoef(uniform) - np.eye(4)
    assert np.abs(correlation).max() < 5 / math.sqrt(4000)


def test__every_place_is_as_likely_as_another() -> None:
    boxes = [random_box((9, 8), draws, (16 / 72, 16 / 72), (1.0, 1.0)) for draws in DRAWS]
    assert {(box.right - box.left, box.bottom - box.top) for box in boxes} == {(4, 4)}
    places = np.zeros((6, 5))
    for box in boxes:
        places[int(box.top), int(box.left)] += 1
    expected = 4000 / 30
    assert np.abs(places - expected).max() < 5 * math.sqrt(expected)


@pytest.mark.parametrize("size", [(224, 224), (10, 1000), (1000, 10)])
def test__a_scale_of_one_keeps_the_whole_image(size: tuple[int, int]) -> None:
    assert random_box(size, DRAWS[0], (1.0, 1.0), ASPECT) == Box(0, 0, size[1], size[0])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((30, 1000), Box(480, 0, 520, 30)),
        ((1000, 30), Box(0, 480, 30, 520)),
        ((1, 1000), Box(499, 0, 500, 1)),
    ],
)
def test__where_nothing_fits_the_largest_in_the_middle_is_taken(size: tuple[int, int], expected: Box) -> None:
    for draws in DRAWS[:200]:
        assert random_box(size, draws, (0.6, 1.0), ASPECT) == expected


def test__the_center_is_what_a_resize_to_256_and_a_cut_to_224_keep() -> None:
    assert center_box((256, 256), (224, 224)) == Box(16, 16, 240, 240)
    assert center_box((512, 1024), (224, 224)) == Box(512 - 224, 32, 512 + 224, 480)
    assert center_box((300, 200), (224, 224), share=1.0) == pytest.approx((0, 50, 200, 250))


@pytest.mark.parametrize("size", [(40, 400), (400, 40), (123, 77)])
@pytest.mark.parametrize("target", [(224, 224), (32, 24), (14, 98)])
def test__the_center_has_the_aspect_of_the_target_and_touches_two_sides(
    size: tuple[int, int], target: tuple[int, int]
) -> None:
    box = center_box(size, target, share=1.0)
    across, down = box.right - box.left, box.bottom - box.top
    assert across / down == pytest.approx(target[1] / target[0])
    assert (box.left + box.right, box.top + box.bottom) == pytest.approx((size[1], size[0]))
    assert min(size[1] - across, size[0] - down) == pytest.approx(0)
    smaller = center_box(size, target, share=0.5)
    assert (smaller.right - smaller.left, smaller.bottom - smaller.top) == pytest.approx((across / 2, down / 2))


def test__half_of_the_images_are_mirrored_whatever_their_crop() -> None:
    keys = sample_keys(0, 3, torch.arange(20_000))
    mirrored = np.array(flips(keys))
    assert abs(mirrored.mean() - 0.5) < 5 * 0.5 / math.sqrt(20_000)
    first = np.array(crop_draws(keys))[:, 0]
    assert abs(np.corrcoef(mirrored, first)[0, 1]) < 5 / math.sqrt(20_000)


def test__the_draws_of_a_sample_are_the_same_alone_and_in_a_batch() -> None:
    assert crop_draws(KEYS[7:8]) == DRAWS[7:8]
    assert [flips(KEYS[number : number + 1])[0] for number in range(50)] == flips(KEYS[:50])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test__normalized_pixels_are_in_units_of_the_deviation(dtype: type) -> None:
    pixels = noise(4, 3, 10, 12).astype(dtype)
    mean, std = (np.array(values).reshape(3, 1, 1) for values in (MEAN, STD))
    result = normalize(torch.from_numpy(pixels), MEAN, STD)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), (pixels / 255 - mean) / std, atol=1e-5)


def changed_alone(monkeypatch: pytest.MonkeyPatch, which: int, change: float) -> torch.Tensor:
    """The matrix of one change of color, by so much, at full strength."""
    ranges = [0.0] * 4
    ranges[which] = 1.0
    monkeypatch.setattr("capi.data.crops.COLOR_RANGES", ranges)
    draws = torch.full((1, 4), (change + 1) / 2, dtype=torch.float64)
    monkeypatch.setattr("capi.data.crops.uniforms", lambda *_: draws)
    return color_changes(torch.zeros(1, dtype=torch.int64), 1.0, 3)


@pytest.mark.parametrize("change", [-0.4, 0.3])
@pytest.mark.parametrize(
    ("which", "enhance"), [(0, ImageEnhance.Brightness), (1, ImageEnhance.Contrast), (2, ImageEnhance.Color)]
)
def test__brightness_contrast_and_saturation_are_those_of_pillow(
    monkeypatch: pytest.MonkeyPatch, which: int, enhance: type[ImageEnhance._Enhance], change: float
) -> None:
    image = noise(20, 30, 3)
    # Pillow's contrast moves away from the image's own mean gray, so give it one of middle gray.
    image[10:] = 255 - image[:10]
    expected = np.asarray(enhance(Image.fromarray(image)).enhance(1 + change)).astype(np.float32)
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    recolored = recolor(pixels, changed_alone(monkeypatch, which, change))[0].permute(1, 2, 0).numpy()
    np.testing.assert_allclose(recolored, expected, atol=1.5)


def test__hue_turns_red_green_and_blue_into_each_other_and_leaves_gray(monkeypatch: pytest.MonkeyPatch) -> None:
    third = changed_alone(monkeypatch, 3, 1 / 3)
    colors = torch.tensor([[200.0, 0, 0], [0, 200, 0], [0, 0, 200], [90, 90, 90]]).T.reshape(1, 3, 2, 2)
    expected = torch.tensor([[0, 200.0, 0], [0, 0, 200], [200, 0, 0], [90, 90, 90]]).T.reshape(1, 3, 2, 2)
    torch.testing.assert_close(recolor(colors, third), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("channels", [1, 3, 5])
def test__colors_change_by_sample_and_by_strength(channels: int) -> None:
    keys = sample_keys(0, 0, torch.arange(400))
    matrices = color_changes(keys, 0.5, channels)
    assert torch.equal(color_changes(keys[7:9], 0.5, channels), matrices[7:9])
    assert len(matrices.flatten(1).unique(dim=0)) == 400
    identity = torch.cat([torch.eye(channels), torch.zeros(channels, 1)], 1)
    torch.testing.assert_close(color_changes(keys, 0.0, channels), identity.expand(400, -1, -1))
    if channels != 3:
        # Brightness and contrast: one factor for all channels, 1 +- 0.2 each.
        factors = matrices.diagonal(dim1=1, dim2=2)
        assert (factors == factors[:, :1]).all()
        assert 0.64 <= factors.min() < 0.7
        assert 1.36 < factors.max() <= 1.44
