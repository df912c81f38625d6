"""Tables of positions on other grids, offsets between patches, rotations."""

import pytest
import torch

from capi.errors import CapiError
from capi.models.plain_vit import (
    column_first_sincos,
    relative_index,
    resampled,
    rotary_angles,
    rotary_periods,
    rotated,
    row_first_sincos,
)


@pytest.mark.parametrize("resampling", ["fixed", "bicubic", "antialias", "offset", "rows"])
def test__on_its_own_grid_a_table_is_left_as_it_is(resampling: str) -> None:
    table = torch.randn(1, 9, 8)
    assert resampled(table, 3, 3, resampling, 4) is table  # type: ignore[arg-type]


@pytest.mark.parametrize("resampling", ["bicubic", "antialias", "offset"])
def test__a_gradient_along_an_axis_stays_one(resampling: str) -> None:
    """So rows are not taken for columns."""
    down = torch.arange(6.0).repeat_interleave(6)
    across = torch.arange(6.0).repeat(6)
    places = resampled(torch.stack([down, across], dim=-1)[None], 3, 9, resampling, 4)[0].reshape(3, 9, 2)  # type: ignore[arg-type]
    assert (places[1:, :, 0] > places[:-1, :, 0]).all()
    assert (places[:, 1:, 1] > places[:, :-1, 1]).all()
    assert places[:, :, 0].std(1).max() < 0.05
    assert places[:, :, 1].std(0).max() < 0.05


def test__a_fixed_table_takes_no_other_grid() -> None:
    with pytest.raises(CapiError, match="images of 12 x 12 pixels only"):
        resampled(torch.zeros(1, 9, 8), 3, 4, "fixed", 4)


def test__sines_of_rows_first_are_the_others_with_halves_exchanged() -> None:
    first, second = column_first_sincos(3, 3, 16)[0], row_first_sincos(3, 3, 16, 4)[0]
    torch.testing.assert_close(first.reshape(3, 3, 16)[1, 2], second.reshape(3, 3, 16)[2, 1])


def test__the_row_of_a_pair_depends_on_its_offset_alone() -> None:
    index = relative_index(4)
    assert index.shape == (17, 17)
    place = {1 + row * 4 + column: (row, column) for row in range(4) for column in range(4)}
    by_offset: dict[tuple[int, int], set[int]] = {}
    for pair, (row, column) in place.items():
        for other, (below, right) in place.items():
            by_offset.setdefault((row - below, column - right), set()).add(int(index[pair, other]))
    assert all(len(rows) == 1 for rows in by_offset.values())
    assert len({next(iter(rows)) for rows in by_offset.values()}) == 49
    assert (index[0, 1:] == 49).all()
    assert (index[1:, 0] == 50).all()
    assert index[0, 0] == 51


def test__rotations_make_logits_depend_on_offsets_alone_and_spare_the_prefix() -> None:
    angles = rotary_angles(4, 4, rotary_periods(8))
    x = torch.randn(1, 2, 1, 8).expand(1, 2, 18, 8)
    turned = rotated(x, angles[None])
    torch.testing.assert_close(turned[:, :, :2], x[:, :, :2])
    logits = (turned @ turned.transpose(-2, -1))[0, 0, 2:, 2:]
    torch.testing.assert_close(logits[0, 5], logits[5, 10])
    torch.testing.assert_close(logits[0, 1], logits[9, 10])
    assert abs(logits[0, 5] - logits[0, 1]) > 1e-4
