"""MIM-Refiner: a table laid out as a grid, and both kinds of blocks."""

from pathlib import Path

import pytest
import torch

from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.sources.mim_refiner import BASELINES
from tests.zoo.baseline_checkpoints import assert_same, images, original, random_model, save, small


@pytest.mark.parametrize("name", ["dbot_refined_vitl16", "data2vec2_refined_vitl16"])
def test__its_names_and_its_grid_of_positions_are_read(tmp_path: Path, name: str) -> None:
    baseline, x = small(name), images(6, 4)
    model = random_model(baseline)
    state = original(baseline, model)
    assert state["pos_embed.embed"].shape == (1, 5, 5, 24)
    assert ("embed_norm.weight" in state, "norm.weight" in state) == (name[0] == "d" and "data" in name, "dbot" in name)
    assert_same(load_baseline(baseline, save({"state_dict": state}, tmp_path / "refined.th"))(x), model(x))


def test__row_and_column_of_the_table_are_not_exchanged() -> None:
    baseline = small("dbot_refined_vitl16")
    model = random_model(baseline)
    assert model.positions is not None
    torch.testing.assert_close(original(baseline, model)["pos_embed.embed"][0, 3, 1], model.positions[0, 3 * 5 + 1])


def test__every_base_of_the_authors_is_there() -> None:
    assert {each.name.split("_")[0] for each in BASELINES} == {"dbot", "mae", "data2vec2", "crossmae"}
