import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from capi.errors import CapiError
from capi.report.pictures.gallery import (
    PatchPlace,
    PrototypeIndex,
    gallery_sheet,
    member_crops,
    patch_crop,
    spread_over_use,
)
from capi.report.pictures.sheets import strip

GRID = (5, 4)


def slow_members(
    prototypes: Tensor, bias: Tensor | None, maps: list[Tensor], best: int
) -> tuple[dict[int, list[tuple[float, int, int, int]]], list[int]]:
    """The same by loops over every patch and prototype, all images in memory."""
    members: dict[int, list[tuple[float, int, int, int]]] = {number: [] for number in range(len(prototypes))}
    counts = [0] * len(prototypes)
    for image, feature_map in enumerate(maps):
        of_image: dict[int, list[tuple[float, int, int, int]]] = {}
        for row in range(feature_map.shape[0]):
            for column in range(feature_map.shape[1]):
                token = feature_map[row, column].double()
                token = token / token.norm()
                logits = [float(token @ prototype.double()) for prototype in prototypes]
                if bias is not None:
                    logits = [logit + float(more) for logit, more in zip(logits, bias, strict=True)]
                nearest = max(range(len(logits)), key=logits.__getitem__)
                counts[nearest] += 1
                cosine = float(token @ prototypes[nearest].double()) / float(prototypes[nearest].double().norm())
                of_image.setdefault(nearest, []).append((-cosine, image, row, column))
        for number, places in of_image.items():
            members[number] += sorted(places)[:3]
    return {number: sorted(places)[:best] for number, places in members.items()}, counts


def indexed(prototypes: Tensor, bias: Tensor | None, maps: list[Tensor], best: int = 16) -> PrototypeIndex:
    index = PrototypeIndex(prototypes, bias, best)
    for number, feature_map in enumerate(maps):
        index.add(number, feature_map)
    return index


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("best", [1, 4, 16])
def test__members_and_shares_are_those_of_the_slow_version(with_bias: bool, best: int) -> None:
    prototypes, bias = 3 * torch.randn(6, 8), torch.randn(6) if with_bias else None
    maps = [torch.randn(*grid, 8) * 5 for grid in [(5, 4), (3, 7), (1, 1), (6, 6), (2, 9), (5, 5)]]
    index = indexed(prototypes, bias, maps, best)
    expected, counts = slow_members(prototypes, bias, maps, best)
    for number, places in expected.items():
        nearest = index.members(number)
        assert [(place.image, place.row, place.column) for place in nearest] == [place[1:] for place in places]
        np.testing.assert_allclose([place.score for place in nearest], [-place[0] for place in places], atol=1e-6)
    torch.testing.assert_close(index.shares, torch.tensor(counts) / sum(counts))
    assert index.seen == sum(counts)


def test__bias_decides_which_prototype_is_nearest() -> None:
    prototypes = torch.eye(2)
    patch = torch.tensor([[[10.0, 9.0]]])
    assert len(indexed(prototypes, None, [patch]).members(0)) == 1
    # Large beside the normalised token, though small beside the token as it is.
    assert len(indexed(prototypes, torch.tensor([0.0, 0.5]), [patch]).members(1)) == 1


def test__one_image_gives_a_prototype_no_more_than_three_patches() -> None:
    index = indexed(torch.tensor([[1.0, 0.0]]), None, [torch.rand(4, 4, 2) for _ in range(3)])
    images = [place.image for place in index.members(0)]
    assert sorted(images) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert index.seen == 48


def test__equal_patches_come_in_the_order_in_which_they_were_added() -> None:
    same = torch.ones(2, 3, 4)
    index = PrototypeIndex(torch.ones(1, 4), best=5)
    for number in (7, 2, 9):
        index.add(number, same)
    places = [(place.image, place.row, place.column) for place in index.members(0)]
    assert places == [(7, 0, 0), (7, 0, 1), (7, 0, 2), (2, 0, 0), (2, 0, 1)]


def test__many_images_need_the_memory_of_few() -> None:
    index = PrototypeIndex(torch.randn(5, 4), best=3)

    def memory() -> int:
        return sum(value.nbytes for value in vars(index).values() if isinstance(value, Tensor))

    before = memory()
    for number in range(40):
        index.add(number, torch.randn(4, 4, 4))
    assert memory() == before
    assert all(len(index.members(number)) == 3 for number in range(5))


def test__logits_in_parts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prototypes, maps = torch.randn(6, 8), [torch.randn(*GRID, 8) for _ in range(3)]
    whole = indexed(prototypes, None, maps)
    monkeypatch.setattr("capi.report.pictures.gallery._LOGITS", 20)
    parts = indexed(prototypes, None, maps)
    assert torch.equal(whole.shares, parts.shares)
    places = [[(place.image, place.row, place.column) for place in index.members(2)] for index in (whole, parts)]
    assert places[0] == places[1]


def test__the_nearest_prototype_keeps_the_shape_of_the_grid() -> None:
    prototypes, feature_map = torch.randn(6, 8), torch.randn(*GRID, 8)
    expected = (feature_map / feature_map.norm(dim=-1, keepdim=True)) @ prototypes.T
    assert torch.equal(PrototypeIndex(prototypes).nearest(feature_map), expected.argmax(-1))


def test__patches_of_zeros_and_a_prototype_of_zeros_have_finite_scores() -> None:
    index = indexed(torch.zeros(2, 3), torch.tensor([0.0, 1.0]), [torch.zeros(2, 2, 3)])
    assert [place.score for place in index.members(1)] == [0.0, 0.0, 0.0]


def test__an_index_without_images_has_no_members_and_no_shares() -> None:
    index = PrototypeIndex(torch.randn(3, 2))
    assert index.members(1) == []
    assert index.shares.tolist() == [0, 0, 0]
    assert index.seen == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: PrototypeIndex(torch.randn(3, 2)).members(3), "numbered from 0 to 2"),
        (lambda: PrototypeIndex(torch.randn(3, 2)).members(-1), "there is no prototype -1"),
        (lambda: PrototypeIndex(torch.randn(3, 2)).add(0, torch.randn(2, 2, 5)), "width 5"),
        (lambda: PrototypeIndex(torch.randn(3, 2), best=0), "at least 1"),
        (lambda: gallery_sheet(PrototypeIndex(torch.randn(3, 2)), photo_of, GRID), "at least one image"),
        (lambda: patch_crop(photo_of(0), PatchPlace(0, 5, 0, 1.0), GRID), "row 5"),
    ],
)
def test__what_cannot_be_is_said(wrong: Any, says: str) -> None:
    with pytest.raises(CapiError, match=says):
        wrong()


def test__shown_prototypes_are_spread_from_the_most_to_the_least_used() -> None:
    shares = torch.tensor([0.1, 0.0, 0.4, 0.1, 0.0, 0.05, 0.3, 0.05])
    assert spread_over_use(shares, 8) == [2, 6, 0, 3, 5, 7]
    assert spread_over_use(shares, 3) == [2, 0, 7]
    assert spread_over_use(shares, 1) == [2]
    assert spread_over_use(torch.zeros(4), 3) == []


def photo_of(_: int) -> Image.Image:
    """Every patch of the grid in a grey of its own: ten times its number."""
    grays = (torch.arange(20, dtype=torch.uint8) * 10).view(*GRID)
    pixels = grays.repeat_interleave(30, 0).repeat_interleave(30, 1)
    return Image.fromarray(pixels.numpy()).convert("RGB")


def grays_in(crop: Image.Image, across: int, down: int) -> list[list[int]]:
    """The grey in the middle of each patch that a view shows."""
    values = np.asarray(crop.convert("L"))
    rows = [int((row + 0.5) * values.shape[0] / down) for row in range(down)]
    columns = [int((column + 0.5) * values.shape[1] / across) for column in range(across)]
    return values[np.ix_(rows, columns)].tolist()


@pytest.mark.parametrize(
    ("row", "column", "shown", "framed"),
    [
        (2, 1, [[40, 50, 60], [80, 90, 100], [120, 130, 140]], (1, 1)),
        (0, 0, [[0, 10, 20], [40, 50, 60], [80, 90, 100]], (0, 0)),
        (4, 3, [[90, 100, 110], [130, 140, 150], [170, 180, 190]], (2, 2)),
    ],
)
def test__a_crop_shows_the_patch_and_its_neighbors(
    row: int, column: int, shown: list[list[int]], framed: tuple[int, int]
) -> None:
    crop = patch_crop(photo_of(0), PatchPlace(0, row, column, 1.0), GRID, side=90)
    assert crop.size == (90, 90)
    assert grays_in(crop, 3, 3) == shown
    values = np.asarray(crop.convert("L"))
    top, left = framed[0] * 30, framed[1] * 30
    # The frame is the patch's border, and nothing else is as light.
    assert (values[[top, top + 29], left : left + 30] == 255).all()
    assert (values[top : top + 30, [left, left + 29]] == 255).all()
    assert (values == 255).sum() == 4 * 29


def test__a_crop_without_context_is_the_bare_patch() -> None:
    crop = patch_crop(photo_of(0), PatchPlace(0, 3, 2, 1.0), GRID, context=0, side=20)
    # Smoothing at the edge lets the neighbours through a little; a frame would be white.
    assert abs(np.asarray(crop.convert("L")).astype(int) - 140).max() <= 3


def test__a_crop_of_a_grid_smaller_than_the_view_keeps_its_aspect() -> None:
    photo = Image.new("RGB", (80, 20), "red")
    crop = patch_crop(photo, PatchPlace(0, 0, 2, 1.0), (1, 4), side=60)
    values = np.asarray(crop)
    assert crop.size == (60, 60)
    assert (values[:20] == values[0, 0]).all()
    assert tuple(values[30, 5]) == (255, 0, 0)


def test__a_crop_is_the_same_from_a_photo_of_another_size() -> None:
    place = PatchPlace(0, 2, 1, 1.0)
    small = patch_crop(photo_of(0).resize((40, 50), Image.Resampling.NEAREST), place, GRID, side=90)
    assert grays_in(small, 3, 3) == grays_in(patch_crop(photo_of(0), place, GRID, side=90), 3, 3)


def test__each_photo_is_asked_for_once_and_crops_keep_their_rank() -> None:
    index = indexed(torch.randn(4, 8), None, [torch.randn(*GRID, 8) for _ in range(6)])
    asked: list[int] = []

    def photo(number: int) -> Image.Image:
        asked.append(number)
        return photo_of(number)

    crops = member_crops(index, [3, 1], photo, GRID, patches=5, side=32)
    assert len(asked) == len(set(asked))
    for prototype in (3, 1):
        expected = [patch_crop(photo_of(0), place, GRID, side=32) for place in index.members(prototype)[:5]]
        assert [crop.tobytes() for crop in crops[prototype]] == [crop.tobytes() for crop in expected]


def test__a_strip_is_as_long_as_its_crops() -> None:
    crops = [Image.new("RGB", (10, 10), color) for color in ("red", "blue")]
    picture = strip(crops, side=10)
    assert picture.size == (22, 10)
    assert [picture.getpixel((x, 5)) for x in (9, 10, 11, 12)] == [(255, 0, 0), *[(255, 255, 255)] * 2, (0, 0, 255)]
    assert strip(crops, side=10, least=4).size == (46, 10)
    assert strip([], side=10).size == (10, 10)


def test__a_sheet_shows_the_most_used_or_those_asked_for() -> None:
    index = indexed(torch.randn(7, 8), None, [torch.randn(*GRID, 8) for _ in range(4)])
    asked = gallery_sheet(index, photo_of, GRID, prototypes=[1, 2, 5], patches=4, side=32)
    order = index.shares.sort(descending=True).indices[:3].tolist()
    most = gallery_sheet(index, photo_of, GRID, count=3, patches=4, side=32)
    same = gallery_sheet(index, photo_of, GRID, prototypes=order, patches=4, side=32)
    assert most.tobytes() == same.tobytes()
    assert asked.width == most.width
    assert math.prod(asked.size) > 0
    assert most.tobytes() != gallery_sheet(index, photo_of, GRID, prototypes=order[::-1], patches=4, side=32).tobytes()
