"""I-JEPA against transformers' IJepa, in both layouts, on squares and others."""

from pathlib import Path

import torch

from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.sources.ijepa import BASELINES
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
    theirs = transformers_model("IJepaModel", "IJepaConfig", layer_norm_eps=1e-6)
    baseline = small("ijepa_vith14_in1k")
    encoder = read_back(baseline, theirs, tmp_path / "folder")
    other = through_the_original_layout(
        baseline, encoder, tmp_path / "ijepa.pth.tar", lambda state: {"target_encoder": state}
    )
    for rows, columns in ((5, 5), (8, 8), (3, 7)):
        x = images(rows, columns)
        tokens = theirs(x, interpolate_pos_encoding=True).last_hidden_state
        for each in (encoder, other):
            torch.testing.assert_close(each(x).feature_map.flatten(1, 2), tokens, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(each(x).pooled, tokens.mean(1), atol=1e-5, rtol=1e-5)


def test__the_target_encoder_is_taken_unless_the_other_is_asked_for(tmp_path: Path) -> None:
    baseline, x = small("ijepa_vith14_in1k"), images()
    target, context = random_model(baseline), random_model(baseline)
    contents = {
        "encoder": {f"module.{name}": value for name, value in original(baseline, context).items()},
        "predictor": {"module.predictor_embed.weight": torch.zeros(2, 2)},
        "target_encoder": {f"module.{name}": value for name, value in original(baseline, target).items()},
        "opt": {},
        "epoch": 300,
    }
    path = save(contents, tmp_path / "ijepa.pth.tar")
    assert_same(load_baseline(baseline, path)(x), target(x))
    assert_same(load_baseline(baseline, path, "encoder")(x), context(x))


def test__there_is_no_class_token_so_patches_are_averaged() -> None:
    features = random_model(small("ijepa_vith14_in1k"))(images())
    torch.testing.assert_close(features.pooled, features.feature_map.mean((1, 2)))
    assert features.registers.shape == (2, 0, 24)


def test__the_sizes_are_those_of_the_authors() -> None:
    known = {each.name: (each.architecture.grid, each.architecture.patch_size) for each in BASELINES}
    assert known["ijepa_vith14_in1k"] == (16, 14)
    assert known["ijepa_vith16_448"] == (28, 16)
