"""Sizes that follow from the options."""

import pytest

from capi.models.plain_vit import count_parameters, vit
from capi.zoo.baselines.registry import BASELINES, shapes_of
from tests.zoo.baseline_checkpoints import small


@pytest.mark.parametrize("name", ["dino_vitb16", "beit_vitl16", "aim_600m", "dinov2_reg_vitg14", "data2vec2_vitl16"])
def test__parameters_are_counted_as_the_model_has_them(name: str) -> None:
    for architecture in (small(name).architecture, BASELINES[name].architecture.changed(depth=2)):
        shapes = shapes_of(architecture)
        total = sum(_product(shape) for shape in shapes.values())
        assert count_parameters(architecture) == total


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for each in shape:
        total *= each
    return total


def test__a_usual_size_has_an_mlp_of_four_widths_and_the_grid_of_its_image() -> None:
    architecture = vit(64, 2, 4, 14, image_size=518)
    assert (architecture.mlp_width, architecture.grid, architecture.native_size) == (256, 37, 518)
