import numpy as np
import pytest

from capi.data.decoding import Decoder
from capi.data.reader import ImageReader
from capi.data.sources import EncodedImages
from capi.data.survey import (
    QUICK_SAMPLE,
    evenly,
    quick_statistics,
    significant,
    statistics_warning,
    summarize,
)
from capi.errors import CapiError
from capi.types import IMAGENET, Statistics
from tests.data.pictures import Pixels, encoded, noise, photo


def reader(images: list[Pixels | bytes], ending: str = "png") -> ImageReader:
    contents = [image if isinstance(image, bytes) else encoded(image, "PNG") for image in images]
    return ImageReader(EncodedImages([f"{number}.{ending}" for number in range(len(images))], contents), Decoder())


def test__mean_and_deviation_are_those_of_all_pixels() -> None:
    images = [photo(64, 64, seed=seed) // (seed + 1) for seed in range(5)]
    summary = summarize(reader(images))
    values = np.stack(images) / 255
    np.testing.assert_allclose(summary.mean, values.mean((0, 1, 2)), rtol=1e-9)
    np.testing.assert_allclose(summary.std, values.std((0, 1, 2)), rtol=1e-9)
    assert (summary.total, summary.looked_at, summary.broken) == (5, 5, {})


def test__each_image_counts_the_same_whatever_its_size() -> None:
    black, white = np.zeros((64, 200, 3), dtype=np.uint8), np.full((640, 640, 3), 255, dtype=np.uint8)
    summary = summarize(reader([black, white, black, black]))
    np.testing.assert_allclose(summary.mean, 0.25)
    np.testing.assert_allclose(summary.std, np.sqrt(0.25 * 0.75))
    assert (summary.smallest, summary.largest) == ((64, 200), (640, 640))


def test__constant_images_have_a_deviation_that_can_be_divided_by() -> None:
    summary = summarize(reader([np.full((70, 70, 3), 77, dtype=np.uint8)] * 3))
    np.testing.assert_allclose(summary.mean, 77 / 255)
    assert all(1e-6 < deviation < 0.01 for deviation in summary.std)


def test__broken_images_are_named_and_do_not_count() -> None:
    image = photo(64, 64)
    summary = summarize(reader([b"no image", image, image]))
    np.testing.assert_allclose(summary.mean, image.mean((0, 1)) / 255)
    assert summary.broken == {"0.png": "no image that can be read"}
    assert summary.looked_at == 3


def test__when_no_image_can_be_read_one_is_named() -> None:
    with pytest.raises(CapiError, match=r"2 images tried, and none could be read; 0\.png: no image"):
        summarize(reader([b"no", b"image"]))


def test__a_sample_is_spread_over_the_whole() -> None:
    for total, count in ((1, 5), (5, 5), (7, 3), (1000, 512), (10**8, 512)):
        numbers = evenly(total, count)
        assert len(numbers) == min(total, count)
        assert (numbers[0], numbers[-1]) == (0, total - 1)
        gaps = np.diff(numbers)
        assert len(gaps) == 0 or 1 <= gaps.min() <= gaps.max() <= gaps.min() + 1


def test__no_more_than_the_sample_is_looked_at() -> None:
    images = [np.full((64, 64, 3), 10 * number, dtype=np.uint8) for number in range(21)]
    summary = summarize(reader(images, ending="PNG"), count=3)
    assert (summary.total, summary.looked_at, summary.endings) == (21, 3, {"png": 3})
    np.testing.assert_allclose(summary.mean, (0 + 100 + 200) / 3 / 255)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.0020714, 0.485, 0.5], "0.00207,0.485,0.5"),
        ([0.000012345, 0.0, 1.0], "0.0000123,0,1"),
        ([12.3456], "12.3"),
    ],
)
def test__numbers_have_three_significant_digits_and_no_exponent(values: list[float], text: str) -> None:
    assert significant(values) == text


@pytest.mark.parametrize(
    ("mean", "std", "far"),
    [
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), False),
        # Digits on black, a dark and a bright set of photos, one color that is rare.
        ((0.131, 0.131, 0.131), (0.308, 0.308, 0.308), False),
        ((0.15, 0.14, 0.12), (0.12, 0.12, 0.1), False),
        ((0.8, 0.8, 0.8), (0.3, 0.3, 0.3), False),
        ((0.55, 0.4, 0.19), (0.24, 0.21, 0.16), False),
        # 12 bits in 16; one empty channel; nothing but white; values beyond full scale.
        ((0.007, 0.007, 0.007), (0.002, 0.002, 0.002), True),
        ((0.485, 0.456, 0.0), (0.229, 0.224, 0.001), True),
        ((0.99, 0.99, 0.99), (0.06, 0.06, 0.06), True),
        ((0.5, 0.5, 0.5), (1.2, 1.2, 1.2), True),
    ],
)
def test__only_images_far_from_what_they_are_normalized_with_are_warned_of(
    mean: tuple[float, ...], std: tuple[float, ...], far: bool
) -> None:
    measured = Statistics(mean, std)
    warning = statistics_warning(measured, IMAGENET)
    assert (warning is not None) == far
    assert not far or str(warning).endswith(": use data.mean=auto data.std=auto")
    assert statistics_warning(measured, measured) is None


def test__a_quick_look_is_the_same_each_time_and_near_the_whole() -> None:
    images = [photo(64, 64, seed=seed) for seed in range(QUICK_SAMPLE + 20)]
    statistics, whole = quick_statistics(reader(images)), summarize(reader(images))
    assert statistics is not None
    np.testing.assert_allclose(statistics.mean, whole.mean, atol=0.05)
    np.testing.assert_allclose(statistics.std, whole.std, atol=0.05)
    assert quick_statistics(reader(images)) == statistics
    assert quick_statistics(reader([b"no image"])) is None


def test__a_look_ends_when_its_time_is_over_with_images_from_everywhere() -> None:
    images = [np.full((8, 8, 3), number, dtype=np.uint8) for number in range(100)]
    summary = summarize(reader(images), 100, seconds=0.0)
    assert 8 <= summary.looked_at < 50
    assert 20 < summary.mean[0] * 255 < 80


def test__a_faint_channel_of_16_bits_keeps_its_std() -> None:
    values = (noise(64, 64, dtype=np.uint16) % 20).astype(np.uint16)
    summary = summarize(reader([values] * 2))
    np.testing.assert_allclose(summary.std, values.std() / 65535, rtol=1e-5)
