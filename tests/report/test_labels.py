import io

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from capi.errors import CapiError
from capi.report.pictures.sheets import font, stacked
from capi.report.predictions import color_of, colored, label_image, legend, overlay
from tests.data.pictures import noise


def saved(image: Image.Image) -> Image.Image:
    """The file as another program reads it."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Image.open(io.BytesIO(buffer.getvalue()))


def colors(image: Image.Image) -> set[tuple[int, ...]]:
    return {tuple(color) for color in np.asarray(image.convert("RGB")).reshape(-1, 3).tolist()}


def inked(image: Image.Image) -> npt.NDArray[np.bool_]:
    """The pixels where something is drawn."""
    return (np.asarray(image) != 255).any(-1)


def test__the_first_labels_have_colors_of_their_own() -> None:
    first = [color_of(label) for label in range(150)]
    assert len(set(first)) == 150
    # White is for ignored pixels.
    assert (255, 255, 255) not in first


def test__neighboring_labels_are_easy_to_tell_apart() -> None:
    first = np.array([color_of(label) for label in range(151)])
    assert np.abs(np.diff(first, axis=0)).sum(1).min() > 100


def test__every_pixel_has_the_color_of_its_label_and_ignored_ones_are_white() -> None:
    labels = np.array([[0, 7], [255, 300]])
    picture = np.asarray(colored(labels, ignored=[255]))
    expected = [[color_of(0), color_of(7)], [(255, 255, 255), color_of(300)]]
    assert picture.tolist() == [[list(color) for color in row] for row in expected]


def test__an_overlay_lies_between_the_photo_and_the_colors() -> None:
    photo, labels = noise(6, 9, 3), noise(6, 9) % 4
    mixed = np.asarray(overlay(Image.fromarray(photo), labels, ignored=[3], strength=0.25)).astype(float)
    expected = 0.75 * photo + 0.25 * np.asarray(colored(labels, ignored=[3]))
    np.testing.assert_allclose(mixed, expected, atol=1.0)


def test__a_gray_photo_can_be_laid_under_colors() -> None:
    assert overlay(Image.fromarray(noise(6, 9)), noise(6, 9) % 4).mode == "RGB"


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test__a_label_image_holds_the_numbers_and_shows_the_colors(dtype: type) -> None:
    labels = noise(12, 10).astype(dtype)
    labels[0, :2] = 0, 255
    image = saved(label_image(labels))
    assert image.mode == "P"
    assert (np.asarray(image) == labels).all()
    assert (np.asarray(image.convert("RGB")) == np.asarray(colored(labels))).all()


def test__labels_beyond_a_byte_take_16_bits() -> None:
    labels = np.array([[0, 255], [256, 65535]], dtype=np.int64)
    image = saved(label_image(labels))
    assert (np.asarray(image) == labels).all()


@pytest.mark.parametrize("label", [-1, 65536])
def test__labels_that_no_image_can_hold_are_an_error(label: int) -> None:
    with pytest.raises(CapiError, match=str(label)):
        label_image(np.array([[0, label]]))


@pytest.mark.parametrize("width", [60, 300, 640])
def test__a_legend_lists_all_names_and_none_overlaps_another(width: int) -> None:
    names = {label: f"a thing of kind {label}" * (1 + label % 2) for label in range(23)}
    sheet = legend(names, width)
    assert sheet.width >= width
    assert {color_of(label) for label in names} <= colors(sheet)
    # Names one at a time, in sheets of the same layout: their ink must not meet, nor run over the edge.
    together = np.zeros((sheet.height, sheet.width), dtype=int)
    longest = max(names.values(), key=font().getlength)
    for chosen in names:
        alone = {label: name if label == chosen else "" for label, name in names.items()}
        with_width = legend({**alone, 99: longest}, width)
        boxes = legend({**dict.fromkeys(names, ""), 99: longest}, width)
        together += (np.asarray(with_width) != np.asarray(boxes)).any(-1)[: sheet.height]
    assert together.max() == 1
    assert not inked(sheet)[:, -1].any()
    assert not inked(sheet)[-1].any()


def test__a_legend_is_sorted_by_label() -> None:
    assert legend({2: "b", 1: "a"}, 200).tobytes() == legend({1: "a", 2: "b"}, 200).tobytes()


def test__a_legend_of_nothing_is_a_blank_strip() -> None:
    assert not inked(legend({}, 100)).any()


def test__stacked_pictures_keep_their_pixels() -> None:
    upper, lower = Image.fromarray(noise(4, 6, 3)), Image.fromarray(noise(5, 9, 3, seed=1))
    sheet = np.asarray(stacked([upper, lower]))
    assert sheet.shape == (9, 9, 3)
    assert (sheet[:4, :6] == np.asarray(upper)).all()
    assert (sheet[:4, 6:] == 255).all()
    assert (sheet[4:] == np.asarray(lower)).all()


def test__an_ignored_label_is_white_in_the_legend_as_it_is_in_the_picture() -> None:
    plain, ignored = (np.asarray(legend({3: "void"}, 200, labels)) for labels in ((), (3,)))
    changed = (plain != ignored).any(2)
    assert changed.any()
    assert (ignored[changed] == 255).all()
