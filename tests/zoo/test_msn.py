"""MSN against transformers' ViTMSN, in both layouts, on squares and others."""

from pathlib import Path

import torch

from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.sources.msn import BASELINES
from tests.zoo.baseline_checkpoints import (
    assert_same,
    images,
    original,
    random_model,
    read_back,
    save,
    small,
    through_the_original_layout,
    transformers_model,
)


def test__features_are_those_of_transformers_in_both_layouts(tmp_path: Path) -> None:
    theirs = transformers_model("ViTMSNModel", "ViTMSNConfig")
    baseline = small("msn_vitl16")
    encoder = read_back(baseline, theirs, tmp_path / "folder")
    other = through_the_original_layout(
        baseline, encoder, tmp_path / "msn.pth.tar", lambda state: {"encoder": {}} | {"target_encoder": state}
    )
    for rows, columns in ((5, 5), (8, 8), (3, 7)):
        x = images(rows, columns)
        tokens = theirs(x, interpolate_pos_encoding=True).last_hidden_state
        for each in (encoder, other):
            torch.testing.assert_close(each(x).feature_map.flatten(1, 2), tokens[:, 1:], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(each(x).pooled, tokens[:, 0], atol=1e-5, rtol=1e-5)


def test__the_target_encoder_is_taken_and_the_projection_left_out(tmp_path: Path) -> None:
    baseline, x = small("msn_vitl16"), images()
    target, online = random_model(baseline), random_model(baseline)
    heads = {"module.fc.fc1.weight": torch.zeros(2, 2), "module.pred.weight": torch.zeros(2, 2)}
    contents = {
        name: {f"module.{key}": value for key, value in original(baseline, model).items()} | heads
        for name, model in (("encoder", online), ("target_encoder", target))
    }
    path = save(contents, tmp_path / "vitl16.pth.tar")
    assert_same(load_baseline(baseline, path)(x), target(x))
    assert_same(load_baseline(baseline, path, "encoder")(x), online(x))


def test__the_sizes_are_those_of_the_authors() -> None:
    grids = {each.name: each.architecture.grid for each in BASELINES}
    assert grids == {"msn_vits16": 14, "msn_vitb16": 14, "msn_vitl16": 14, "msn_vitb4": 56, "msn_vitl7": 32}
