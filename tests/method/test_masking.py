import math

import pytest
import torch

from capi.errors import CapiError
from capi.method.masking import (
    MASKS,
    MaskSampler,
    PatchGrid,
    block_boxes,
    block_mask,
    inverse_block_mask,
    multi_block_mask,
    roll,
)
from capi.runtime.randomness import sample_keys

GRIDS = [PatchGrid(14, 14), PatchGrid(8, 6), PatchGrid(3, 17), PatchGrid(1, 16), PatchGrid(16, 1), PatchGrid(2, 2)]
KEYS = sample_keys(0, 0, torch.arange(4000))


def sampler(kind: str = "inverse_block", ratio: float = 0.65, shift: bool = True, predict: int | float = 1):
    return MaskSampler(kind=kind, ratio=ratio, roll=shift, predict=predict)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("count", [1, 0.5, -1])
def test__every_image_has_exactly_the_count(kind: str, grid: PatchGrid, count: float) -> None:
    count = {1: 1, 0.5: max(grid.size // 2, 1), -1: grid.size - 1}[count]
    mask = MASKS[kind](grid, count, KEYS)
    assert mask.shape == (len(KEYS), grid.size)
    assert (mask.sum(1) == count).all()


@pytest.mark.parametrize("kind", MASKS)
def test__visible_and_predicted_patches_are_disjoint_sorted_and_within_the_grid(kind: str) -> None:
    grid = PatchGrid(7, 9)
    visible, predict = sampler(kind, predict=9)(grid, KEYS)
    assert visible.shape == (4000, 63 - int(63 * 0.65))
    assert predict.shape == (4000, 9)
    assert (visible.diff(dim=1) > 0).all()
    assert (predict.diff(dim=1) > 0).all()
    assert 0 <= min(visible.min(), predict.min()) <= max(visible.max(), predict.max()) < 63
    assert not (visible[:, :, None] == predict[:, None, :]).any()


def test__paper_counts_at_224_pixels() -> None:
    assert sampler(predict=7).counts(PatchGrid(14, 14)) == (69, 127, 7)
    # The released default, 5 % of the masked patches, at patch sizes 16 and 14.
    assert sampler(predict=0.05).counts(PatchGrid(14, 14))[2] == 6
    assert sampler(predict=0.05).counts(PatchGrid(16, 16))[2] == 8
    # Shares are rounded down: 7.6 patches.
    assert sampler(predict=0.06).counts(PatchGrid(14, 14))[2] == 7


def test__a_share_never_rounds_to_zero_predictions() -> None:
    assert sampler(predict=0.05).counts(PatchGrid(2, 2)) == (2, 2, 1)


def test__several_blocks_are_a_union_of_rectangles_of_the_drawn_sizes() -> None:
    grid = PatchGrid(14, 14)
    # Up to the size of the smallest block, what is hidden lies in one rectangle and begins in its upper left corner.
    smallest = multi_block_mask(grid, 20, KEYS[:200]).view(-1, 14, 14)
    for mask in smallest:
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        assert mask[rows[0], columns[0]]
        assert 4 <= len(columns) <= 8
        # All rows but the last are full.
        assert mask[rows[0] : rows[-1], columns[0] : columns[-1] + 1].all()
        assert len(rows) == rows[-1] - rows[0] + 1
    # More of the grid holds what less of it held: blocks are added, none is moved.
    assert (multi_block_mask(grid, 127, KEYS[:200]) & smallest.flatten(1)).sum() == smallest.sum()


@pytest.mark.parametrize("kind", ["block", "inverse_block", "multi_block"])
def test__roll_makes_coverage_uniform(kind: str) -> None:
    grid = PatchGrid(6, 8)
    keys = sample_keys(1, 0, torch.arange(20_000))
    count = 31
    covered = roll(grid, MASKS[kind](grid, count, keys), keys).double().mean(0)
    # Five standard deviations of a mean of 20,000 coin flips.
    spread = math.sqrt(count / 48 * (1 - count / 48) / 20_000)
    assert (covered - count / 48).abs().max() < 5 * spread
    unrolled = MASKS[kind](grid, count, keys).double().mean(0)
    assert (unrolled - count / 48).abs().max() > 20 * spread


def test__random_masks_and_predictions_are_uniform() -> None:
    grid = PatchGrid(5, 5)
    keys = sample_keys(2, 0, torch.arange(20_000))
    visible, predict = sampler("random", 0.6, shift=False, predict=4)(grid, keys)
    for index in (visible, predict):
        share = index.shape[1] / 25
        frequency = torch.bincount(index.flatten(), minlength=25) / 20_000
        assert (frequency - share).abs().max() < 5 * math.sqrt(share * (1 - share) / 20_000)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test__blocks_fit_the_grid_and_hold_the_count(grid: PatchGrid) -> None:
    for count in range(1, grid.size):
        height, width, top, left = block_boxes(grid, count, KEYS[:500])
        assert (height * width >= count).all()
        assert (top >= 0).all()
        assert (left >= 0).all()
        assert (top + height <= grid.rows).all()
        assert (left + width <= grid.columns).all()


@pytest.mark.parametrize("grid", [PatchGrid(7, 1), PatchGrid(1, 100), PatchGrid(2, 50), PatchGrid(50, 2)], ids=str)
def test__on_flat_grids_a_block_is_no_longer_than_its_patches_need(grid: PatchGrid) -> None:
    """The widest block that fits has whole sides, which rounding would make one too long."""
    across = min(grid)
    # From here on the aspect that fits is flatter than 2 to 1: blocks go across the whole grid.
    for count in range(2 * across**2 + across, grid.size, across):
        boxes = block_boxes(grid, count, KEYS[:50])
        sides = torch.stack([boxes.height, boxes.width])
        assert (sides.amin(0) == across).all()
        assert (sides.amax(0) == count // across).all()


def test__block_aspects_are_log_uniform_between_a_half_and_two() -> None:
    # A large grid, so that rounding up to whole patches does not hide the aspect.
    height, width, _, _ = block_boxes(PatchGrid(4000, 4000), 1_000_000, KEYS)
    logarithm = (height / width).log2().double()
    assert logarithm.min() >= -1.01
    assert logarithm.max() <= 1.01
    quantiles = torch.quantile(logarithm, torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64))
    torch.testing.assert_close(
        quantiles, torch.tensor([-0.8, -0.5, 0.0, 0.5, 0.8], dtype=torch.float64), atol=0.06, rtol=0
    )


def test__block_places_are_uniform() -> None:
    grid = PatchGrid(9, 9)
    height, _, top, _ = block_boxes(grid, 16, sample_keys(3, 0, torch.arange(30_000)))
    for tall in height.unique().tolist():
        places = torch.bincount(top[height == tall], minlength=9 - tall + 1).double()
        assert len(places) == 9 - tall + 1
        expected = places.sum() / len(places)
        assert ((places - expected).abs() < 5 * expected.sqrt()).all()


def test__a_block_is_a_rectangle_cut_at_its_lower_right_end() -> None:
    grid, count = PatchGrid(8, 7), 19
    masks = block_mask(grid, count, KEYS[:300]).view(-1, 8, 7)
    boxes = block_boxes(grid, count, KEYS[:300])
    for mask, height, width, top, left in zip(masks, *boxes, strict=True):
        inside = mask[top : top + height, left : left + width].flatten()
        assert inside[:count].all()
        assert not inside[count:].any()
        assert mask.sum() == count


def test__inverse_block_leaves_a_block_visible() -> None:
    grid = PatchGrid(8, 7)
    assert torch.equal(~inverse_block_mask(grid, 37, KEYS), block_mask(grid, 19, KEYS))


def test__roll_is_a_circular_shift() -> None:
    grid = PatchGrid(4, 5)
    mask = torch.zeros(2000, 20, dtype=torch.bool)
    mask[:, [0, 1, 5]] = True
    rolled = roll(grid, mask, KEYS[:2000]).view(-1, 4, 5)
    shifts = {
        (row, column): torch.roll(mask[0].view(4, 5), (row, column), (0, 1)) for row in range(4) for column in range(5)
    }
    seen = set()
    for image in rolled:
        matches = [shift for shift, expected in shifts.items() if torch.equal(image, expected)]
        assert len(matches) == 1
        seen.update(matches)
    assert seen == set(shifts)


def test__a_sample_does_not_depend_on_its_batch() -> None:
    grid, draw = PatchGrid(6, 6), sampler(predict=3)
    whole = draw(grid, sample_keys(5, 7, torch.arange(10)))
    parts = [draw(grid, sample_keys(5, 7, torch.arange(start, start + 5))) for start in (0, 5)]
    assert torch.equal(whole.visible, torch.cat([part.visible for part in parts]))
    assert torch.equal(whole.predict, torch.cat([part.predict for part in parts]))


@pytest.mark.parametrize(
    ("settings", "grid", "word"),
    [
        ({"ratio": 0.01}, PatchGrid(4, 4), "masking.ratio"),
        ({"ratio": 1.0}, PatchGrid(4, 4), "masking.ratio"),
        ({"predict": 11}, PatchGrid(4, 4), "masking.predict"),
        ({"predict": 0}, PatchGrid(4, 4), "masking.predict"),
    ],
)
def test__impossible_counts_name_the_field_to_change(settings: dict, grid: PatchGrid, word: str) -> None:
    with pytest.raises(CapiError, match=word):
        sampler(**settings).counts(grid)


def test__an_unknown_mask_names_the_nearest() -> None:
    with pytest.raises(CapiError, match='did you mean "inverse_block"'):
        sampler("inverse-blok")
