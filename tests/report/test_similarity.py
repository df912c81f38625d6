import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from capi.report.pictures.colormaps import heat
from capi.report.pictures.painters import Legend
from capi.report.pictures.sheets import with_scale
from capi.report.pictures.similarity import (
    heat_over,
    most_similar,
    nearest_patches,
    outline_patch,
    patch_at,
    patch_box,
    patch_mask,
    similarity_map,
    similarity_picture,
)


def slow_cosine(first: Tensor, other: Tensor) -> float:
    """Sums written out."""
    product = sum(a * b for a, b in zip(first.tolist(), other.tolist(), strict=True))
    lengths = sum(a * a for a in first.tolist()) ** 0.5 * sum(b * b for b in other.tolist()) ** 0.5
    return product / lengths


def test__similarity_is_the_cosine_of_each_patch() -> None:
    feature_map, patch = torch.randn(3, 5, 7), torch.randn(7)
    maps = similarity_map(patch, feature_map)
    expected = [[slow_cosine(patch, feature_map[row, column]) for column in range(5)] for row in range(3)]
    torch.testing.assert_close(maps, torch.tensor(expected))


@pytest.mark.parametrize("place", [(0, 0), (2, 4), (3, 1)])
def test__a_patch_is_the_most_similar_to_itself(place: tuple[int, int]) -> None:
    feature_map = torch.randn(4, 6, 5) * 100 + 3
    similarity = similarity_map(feature_map[place], feature_map)
    assert most_similar(similarity) == place
    assert similarity[place] == pytest.approx(1)


def test__of_alike_patches_the_clicked_one_counts_but_only_of_alike_ones() -> None:
    similarity = torch.tensor([[1.0, 0.5], [1.0, 0.2]])
    assert most_similar(similarity) == (0, 0)
    assert most_similar(similarity, (1, 0)) == (1, 0)
    assert most_similar(similarity, (0, 1)) == (0, 0)


def test__patches_without_a_direction_are_similar_to_nothing() -> None:
    feature_map = torch.randn(2, 2, 3)
    feature_map[0, 1] = 0
    assert similarity_map(feature_map[1, 1], feature_map)[0, 1] == 0
    assert torch.equal(similarity_map(torch.zeros(3), feature_map), torch.zeros(2, 2))


@pytest.mark.parametrize("each", [1, 3])
def test__the_nearest_patches_are_those_of_a_search_one_by_one(each: int) -> None:
    maps, patch = {number: torch.randn(2 + number, 3, 8) for number in range(4)}, torch.randn(8)
    nearest = nearest_patches(patch, maps, 5, each=each)
    slow = []
    for number, feature_map in maps.items():
        places = [(row, column) for row in range(feature_map.shape[0]) for column in range(3)]
        best = sorted(((slow_cosine(patch, feature_map[at]), number, *at) for at in places), reverse=True)[:each]
        slow += best
    expected = sorted(slow, reverse=True)[:5]
    assert [(feature_map.image, feature_map.row, feature_map.column) for feature_map in nearest] == [
        entry[1:] for entry in expected
    ]
    assert [feature_map.score for feature_map in nearest] == pytest.approx([entry[0] for entry in expected], abs=1e-5)


def test__no_other_images_have_no_nearest_patches() -> None:
    assert nearest_patches(torch.randn(3), {}, 4) == []


def test__a_pixel_lies_in_the_box_of_its_patch() -> None:
    grid, size = (3, 5), (52, 29)
    for down in range(29):
        for across in range(52):
            box = patch_box(patch_at((across, down), grid, size), grid, size)
            # Sides that patches do not divide are rounded by less than a pixel.
            assert box.left - 1 <= across < box.right + 1
            assert box.top - 1 <= down < box.bottom + 1
    assert patch_at((-4, 500), grid, size) == (2, 0)
    assert patch_at((52, 29), grid, size) == (2, 4)


def test__heat_covers_what_has_a_value_and_leaves_the_rest_of_the_photo() -> None:
    photo = Image.new("RGB", (20, 10), (255, 255, 255))
    values = torch.tensor([[0.0, 0.25], [0.5, torch.nan]])
    pixels = np.asarray(heat_over(photo, values, (0.0, 0.5)))
    # On a white photo the colours are those of the scale.
    assert pixels[0, 0].tolist() == heat(torch.tensor(0.0)).tolist()
    assert pixels[4, 19].tolist() == heat(torch.tensor(0.5)).tolist()
    assert pixels[5, 9].tolist() == heat(torch.tensor(1.0)).tolist()
    assert pixels[9, 19].tolist() == [255, 255, 255]


def test__black_stays_black_on_every_photo() -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    assert np.asarray(heat_over(photo, torch.zeros(2, 2), (0.0, 1.0))).max() == 0


def test__values_that_are_all_the_same_can_be_drawn() -> None:
    photo = Image.new("RGB", (8, 8), "white")
    assert similarity_picture(photo, torch.ones(2, 2), (1, 1)).width >= 8


def test__a_mask_of_patches_is_a_mask_of_pixels() -> None:
    chosen = torch.tensor([[True, False, False], [False, False, True]])
    pixels = np.asarray(patch_mask(chosen, (12, 8)))
    assert np.array_equal(pixels, np.kron(chosen.numpy(), np.full((4, 4), 255)))


def test__the_outline_surrounds_the_patch_and_hides_nothing_of_it() -> None:
    photo = Image.new("RGB", (60, 60), (10, 20, 30))
    marked = np.asarray(outline_patch(photo, (1, 1), (3, 3)))
    assert (marked[20:40, 20:40] == (10, 20, 30)).all()
    assert (marked[19, 20:40] == (57, 215, 255)).all()
    assert (marked[20:40, 40] == (57, 215, 255)).all()
    assert (np.asarray(photo) == (10, 20, 30)).all()


def test__the_scale_runs_from_black_to_white_below_the_picture() -> None:
    picture = Image.new("RGB", (300, 40), "blue")
    bar = Image.fromarray(heat(torch.linspace(0, 1, 256))[None].contiguous().numpy())
    pixels = with_scale(picture, Legend(bar, "0", "1"), "cosine")
    assert pixels.width == 300
    assert pixels.crop((0, 0, 300, 40)).tobytes() == picture.tobytes()
    shown = np.asarray(pixels)[52, 2:-2].astype(int).sum(1)
    assert (np.diff(shown) >= 0).all()
    assert (shown[0], shown[-1]) == (pytest.approx(0, abs=12), pytest.approx(765, abs=12))


def test__limits_make_images_comparable() -> None:
    photo, similarity = Image.new("RGB", (300, 300), "white"), torch.tensor([[0.2, 0.4], [0.3, 0.35]])
    free = np.asarray(similarity_picture(photo, similarity))
    fixed = np.asarray(similarity_picture(photo, similarity, limits=(0.0, 1.0)))
    assert free[0, 299].tolist() == [255, 255, 255]
    assert fixed[0, 299].tolist() == heat(torch.tensor(0.4)).tolist()
