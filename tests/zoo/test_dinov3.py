"""DINOv3 against transformers, with MLP and SwiGLU, in both layouts, on squares and others."""

from pathlib import Path

import pytest
import torch

from capi.errors import CapiError
from capi.types import Features
from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.sources.dinov3 import BASELINES
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


@pytest.mark.parametrize(("name", "gated"), [("dinov3_vitl16", False), ("dinov3_vith16plus", True)])
def test__features_are_those_of_transformers_in_both_layouts(tmp_path: Path, name: str, gated: bool) -> None:
    theirs = transformers_model("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=4, use_gated_mlp=gated)
    if gated:
        theirs.config.hidden_act = "silu"
        for module in theirs.modules():
            if hasattr(module, "act_fn"):
                module.act_fn = torch.nn.SiLU()
    baseline = small(name)
    encoder = read_back(baseline, theirs, tmp_path / "folder")
    other = through_the_original_layout(baseline, encoder, tmp_path / "dinov3.pth")
    for rows, columns in ((5, 5), (8, 6)):
        x = images(rows, columns)
        tokens = theirs(x).last_hidden_state
        expected = Features(tokens[:, 0], tokens[:, 1:5], tokens[:, 5:].unflatten(1, (rows, columns)))
        for each in (encoder, other):
            assert_same(each(x), expected)


def test__periods_and_masks_are_those_of_the_file(tmp_path: Path) -> None:
    baseline, x = small("dinov3_vitl16"), images()
    model = random_model(baseline)
    state = original(baseline, model)
    periods = torch.tensor([1.0, 3.15625])
    mask = torch.cat([torch.ones(24), torch.zeros(24), torch.full((24,), 0.5)])
    more = {"rope_embed.periods": periods, "mask_token": torch.zeros(1, 24), "local_cls_norm.weight": torch.ones(24)}
    more |= {"blocks.0.attn.qkv.bias_mask": mask}
    loaded = load_baseline(baseline, save(state | more, tmp_path / "dinov3.pth"))
    assert (loaded(x).feature_map - model(x).feature_map).abs().max() > 1e-3
    model.rotary_periods = periods
    with torch.no_grad():
        model.blocks[0].attention.value.bias *= 0.5
    assert_same(loaded(x), model(x))


def test__without_periods_of_the_file_they_are_computed_and_misshapen_ones_are_refused(tmp_path: Path) -> None:
    baseline, x = small("dinov3_vitl16"), images()
    model = random_model(baseline)
    state = original(baseline, model)
    # The part of keys is not used: whatever stands there must not matter.
    state["blocks.0.attn.qkv.bias"][24:48] = float("nan")
    assert_same(load_baseline(baseline, save(state, tmp_path / "dinov3.pth"))(x), model(x))
    state["rope_embed.periods"] = torch.ones(5)
    with pytest.raises(CapiError, match=r'"rope_embed.periods" of shape \(5,\), expected \(2,\)'):
        load_baseline(baseline, save(state, tmp_path / "other.pth"))


def test__the_sizes_are_those_of_the_authors() -> None:
    known = {each.name: (each.architecture.mlp_width, each.architecture.eps) for each in BASELINES}
    assert known["dinov3_vits16plus"] == (1536, 1e-5)
    assert known["dinov3_vit7b16"] == (8192, 1e-5)
