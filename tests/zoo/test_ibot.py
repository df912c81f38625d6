"""iBOT: what is read of its files."""

from pathlib import Path

import torch

from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.sources.ibot import BASELINES
from tests.zoo.baseline_checkpoints import assert_same, images, original, random_model, save, small


def test__backbones_under_state_dict_are_read_without_mask_token_and_heads(tmp_path: Path) -> None:
    baseline, x = small("ibot_vitl16"), images(4, 6)
    model = random_model(baseline)
    more = {"masked_embed": torch.zeros(1, 24), "head.last_layer.weight": torch.zeros(2, 2)}
    path = save({"state_dict": original(baseline, model) | more}, tmp_path / "checkpoint_teacher.pth")
    assert_same(load_baseline(baseline, path)(x), model(x))


def test__positions_are_resampled_as_in_dino() -> None:
    assert all(each.architecture.resampling == "offset" for each in BASELINES)
    model, other = random_model(small("ibot_vitl16")), random_model(small("dino_vitb16"))
    other.load_state_dict(model.state_dict())
    x = images(7, 4)
    assert_same(model(x), other(x), tolerance=0)
