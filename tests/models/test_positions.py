import pytest
import torch
import torch.nn.functional as F

from capi.models.encoder import Encoder
from capi.models.positions import POSITIONS, LearnedPositions, Positions, patch_coordinates


def learned(grid: tuple[int, int] = (5, 3), width: int = 8) -> LearnedPositions:
    return LearnedPositions(width=width, head_width=4, grid=grid)


@pytest.mark.parametrize("kind", POSITIONS)
def test__every_kind_keeps_the_contract(kind) -> None:
    positions = POSITIONS[kind](width=8, head_width=4, grid=(2, 3))
    assert isinstance(positions, Positions)
    assert positions.kind == kind
    assert positions.place(torch.randn(3, 6, 8), patch_coordinates(2, 3)[None]).shape == (3, 6, 8)


@pytest.mark.parametrize("kind", ["axial", "released"])
def test__rotary_positions_add_nothing_and_learned_ones_turn_nothing(kind) -> None:
    tokens, coordinates = torch.randn(1, 6, 8), patch_coordinates(2, 3)[None]
    rotary = POSITIONS[kind](width=8, head_width=4, grid=None)
    assert rotary.place(tokens, coordinates) is tokens
    assert rotary.rotary(coordinates).cosine.shape == (1, 6, 1, 4)
    assert learned().rotary(coordinates) is None
    assert not torch.allclose(learned().place(tokens, coordinates), tokens)


def test__at_native_resolution_each_patch_has_its_own_vector() -> None:
    positions = learned()
    placed = positions.place(torch.zeros(1, 15, 8), patch_coordinates(5, 3)[None])
    torch.testing.assert_close(placed[0], positions.table.flatten(0, 1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("grid", [(10, 6), (3, 2), (5, 9)])
def test__on_other_grids_the_table_is_resampled_bicubically(grid: tuple[int, int]) -> None:
    positions = learned()
    placed = positions.place(torch.zeros(1, grid[0] * grid[1], 8), patch_coordinates(*grid)[None])
    table = positions.table.permute(2, 0, 1)[None]
    expected = F.interpolate(table, size=grid, mode="bicubic", align_corners=True)
    torch.testing.assert_close(placed[0], expected[0].flatten(1).T, rtol=1e-4, atol=1e-6)


def test__each_image_has_the_vectors_of_its_own_patches() -> None:
    positions, index = learned(), torch.tensor([[0, 7], [14, 2]])
    placed = positions.place(torch.zeros(2, 2, 8), patch_coordinates(5, 3)[index])
    torch.testing.assert_close(placed, positions.table.flatten(0, 1)[index], rtol=1e-5, atol=1e-7)


def test__the_table_starts_small_and_learns_where_it_is_read() -> None:
    positions = learned((40, 50), 16)
    assert float(positions.table.detach().std()) == pytest.approx(0.02, rel=0.05)
    positions.place(torch.zeros(1, 1, 16), patch_coordinates(40, 50)[None, 51:52]).sum().backward()
    gradient = positions.table.grad.flatten(0, 1).sum(1)
    assert gradient[51] == pytest.approx(16, rel=1e-4)
    assert gradient.abs().sum() == pytest.approx(16, rel=1e-3)


def test__an_encoder_without_positions_would_not_tell_places_apart_but_with_learned_ones_it_does() -> None:
    model = Encoder(
        width=16, depth=1, heads=2, patch_size=4, registers=2, mlp_width=32, positions="learned", grid=(3, 3)
    ).eval()
    images = torch.ones(1, 3, 12, 12)
    patches = model.patches(model(images))[0]
    assert patches.std(0).max() > 1e-4
    torch.nn.init.zeros_(model.positions.table)
    patches = model.patches(model(images))[0]
    torch.testing.assert_close(patches, patches[:1].expand_as(patches))


def test__an_encoder_with_learned_positions_reads_other_resolutions() -> None:
    model = Encoder(
        width=16, depth=1, heads=2, patch_size=4, registers=2, mlp_width=32, positions="learned", grid=(3, 3)
    )
    assert model(torch.randn(1, 3, 20, 8)).tokens.shape == (1, 2 + 10, 16)
    assert model.state_dict()["positions.table"].shape == (3, 3, 16)
