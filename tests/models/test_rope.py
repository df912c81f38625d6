import math

import pytest
import torch
from torch import Tensor

from capi.models.positions import (
    RopeVariant,
    frequencies,
    patch_coordinates,
    register_coordinates,
    rotary_table,
    rotate,
)

VARIANTS: list[RopeVariant] = ["axial", "released"]


def slow_rotate(x: Tensor, position: Tensor, variant: RopeVariant) -> Tensor:
    """One head at one position, channel by channel, as METHOD writes it."""
    width = len(x)
    quarter, half = width // 4, width // 2
    base = [7 * 10000 ** (-i / (quarter - 1)) * 2 * math.pi for i in range(quarter)]
    row, column = ([value * float(coordinate) for value in base] for coordinate in position)
    angle = row + row + column + column
    if variant == "released":
        swapped = torch.cat([-x[half:], x[:half]])
    else:
        x1, x2, x3, x4 = x.split(quarter)
        swapped = torch.cat([-x2, x1, -x4, x3])
    return torch.stack([x[i] * math.cos(angle[i]) + swapped[i] * math.sin(angle[i]) for i in range(width)])


@pytest.mark.parametrize("variant", VARIANTS)
def test__equals_the_formula_channel_by_channel(variant: RopeVariant) -> None:
    x, positions = torch.randn(2, 5, 3, 16), torch.rand(2, 5, 2)
    rotated = rotate(x, rotary_table(positions, 16, variant))
    for image in range(2):
        for token in range(5):
            for head in range(3):
                expected = slow_rotate(x[image, token, head], positions[image, token], variant)
                torch.testing.assert_close(rotated[image, token, head], expected, rtol=1e-4, atol=2e-5)


def products(variant: RopeVariant, shift: tuple[float, float]) -> Tensor:
    """q.k between all pairs of five positions that are shifted together."""
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, 1, 5, 1, 32, generator=generator, dtype=torch.float64)
    positions = torch.rand(1, 5, 2, generator=generator) + torch.tensor(shift)
    table = rotary_table(positions, 32, variant)
    return torch.einsum("bqhw,bkhw->qk", rotate(query, table), rotate(key, table))


def test__axial_products_depend_on_relative_position_alone() -> None:
    torch.testing.assert_close(products("axial", (0, 0)), products("axial", (0.3, -0.7)), rtol=0, atol=1e-3)


def test__released_products_do_not() -> None:
    assert (products("released", (0, 0)) - products("released", (0.3, -0.7))).abs().max() > 0.5


def test__axial_keeps_lengths_and_released_does_not() -> None:
    x, positions = torch.randn(1, 6, 2, 16), torch.rand(1, 6, 2)
    lengths = {variant: rotate(x, rotary_table(positions, 16, variant)).norm(dim=-1) for variant in VARIANTS}
    torch.testing.assert_close(lengths["axial"], x.norm(dim=-1))
    assert (lengths["released"] - x.norm(dim=-1)).abs().max() > 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test__gradients_equal_finite_differences(variant: RopeVariant) -> None:
    table = rotary_table(torch.rand(2, 3, 2), 8, variant)
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, table), x)


def test__frequencies_run_from_seven_down_to_seven_ten_thousandths() -> None:
    values = frequencies(64)
    assert values.shape == (16,)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values[[0, -1]], torch.tensor([7.0, 7e-4]) * 2 * math.pi)
    ratios = values[1:] / values[:-1]
    torch.testing.assert_close(ratios, ratios[:1].expand(15))


def test__low_precision_positions_are_turned_to_angles_in_float32() -> None:
    table = rotary_table(torch.ones(1, 1, 2, dtype=torch.bfloat16), 16, "axial")
    assert table.cosine.dtype == torch.float32
    torch.testing.assert_close(table.cosine, rotary_table(torch.ones(1, 1, 2), 16, "axial").cosine)


def test__patch_coordinates_are_row_major_with_corners_at_zero_and_one() -> None:
    coordinates = patch_coordinates(3, 5)
    assert coordinates[[0, 4, 10, 14]].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert coordinates[1].tolist() == [0, 0.25]
    assert coordinates[5].tolist() == [0.5, 0]
    assert patch_coordinates(1, 1).tolist() == [[0, 0]]


def test__registers_walk_around_the_bounding_box() -> None:
    corners = torch.tensor([[[0.0, 0.0], [1.0, 1.0]]])
    expected = [[0, 0], [0.5, 0], [1, 0], [1, 0.5], [1, 1], [0.5, 1], [0, 1], [0, 0.5]]
    assert register_coordinates(corners, 8)[0].tolist() == expected
    box = torch.tensor([[[0.2, 0.5], [0.4, 0.6], [0.3, 0.9]]])
    scaled = register_coordinates(box, 8)
    torch.testing.assert_close(scaled.amin(1), torch.tensor([[0.2, 0.5]]))
    torch.testing.assert_close(scaled.amax(1), torch.tensor([[0.4, 0.9]]))


@pytest.mark.parametrize("count", [4, 12, 16])
def test__multiples_of_four_put_equally_many_on_each_side(count: int) -> None:
    side = count // 4
    c = torch.arange(side) / side
    zero, ones = torch.zeros(side), torch.ones(side)
    sides = [(c, zero), (ones, c), (1 - c, ones), (zero, 1 - c)]
    expected = torch.cat([torch.stack(pair, -1) for pair in sides])
    corners = torch.tensor([[[0.0, 0.0], [1.0, 1.0]]])
    assert torch.equal(register_coordinates(corners, count)[0], expected)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 7, 18])
def test__any_other_number_of_registers_lies_evenly_on_the_border(count: int) -> None:
    corners = torch.tensor([[[0.0, 0.0], [1.0, 1.0]]])
    points = register_coordinates(corners, count)[0]
    assert points.shape == (count, 2)
    on_border = (points == 0) | (points == 1)
    assert on_border.any(1).all()
    # The way along the border from one register to the next is the same all around.
    row, column = points.double().unbind(1)
    way = torch.where(
        column == 0, row, torch.where(row == 1, 1 + column, torch.where(column == 1, 3 - row, 4 - column))
    )
    torch.testing.assert_close(way, torch.arange(count, dtype=torch.float64) * 4 / max(count, 1), rtol=0, atol=1e-6)
