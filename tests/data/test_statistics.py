import numpy as np
import pytest

from capi.data.decoding import Decoder
from capi.data.reader import Reader
from capi.data.sources import Encoded
from capi.data.statistics import evenly, summarize
from capi.errors import CapiError
from tests.data.pictures import Pixels, encoded, photo


def reader(images: list[Pixels | bytes], ending: str = "png") -> Reader:
    contents = [image if isinstance(image, bytes) else encoded(image, "PNG") for image in images]
    return Reader(Encoded([f"{number}.{ending}" for number in range(len(images))], contents), Decoder())


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
    with pytest.raises(CapiError, match=r"none of 2 images could be read; 0\.png: no image"):
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
