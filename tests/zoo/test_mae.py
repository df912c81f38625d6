"""MAE against transformers' ViTMAE, in both layouts, on squares and others."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from capi.errors import CapiError
from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.sources.mae import BASELINES
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

_DECODER = {
    "decoder_hidden_size": 8,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 8,
}


def test__features_are_those_of_transformers_in_both_layouts(tmp_path: Path) -> None:
    theirs = transformers_model("ViTMAEForPreTraining", "ViTMAEConfig", mask_ratio=0.0, layer_norm_eps=1e-6, **_DECODER)
    baseline = small("mae_vitl16")
    encoder = read_back(baseline, theirs, tmp_path / "folder")
    other = through_the_original_layout(baseline, encoder, tmp_path / "mae.pth", lambda state: {"model": state})
    for rows, columns in ((5, 5), (8, 8), (3, 7)):
        x = images(rows, columns)
        # Nothing is masked, but patches are shuffled unless the noise is in order.
        noise = torch.arange(rows * columns).float().expand(2, -1)
        tokens = theirs.vit(x, noise=noise, interpolate_pos_encoding=True).last_hidden_state
        for each in (encoder, other):
            torch.testing.assert_close(each(x).feature_map.flatten(1, 2), tokens[:, 1:], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(each(x).pooled, tokens[:, 0], atol=1e-5, rtol=1e-5)


def test__the_decoder_of_a_whole_checkpoint_is_left_out(tmp_path: Path) -> None:
    baseline, x = small("mae_vitl16"), images()
    model = random_model(baseline)
    decoder = {"mask_token": torch.zeros(1, 1, 8), "decoder_blocks.0.attn.qkv.weight": torch.zeros(24, 8)}
    contents = {"model": original(baseline, model) | decoder, "args": Namespace(mask_ratio=0.75), "epoch": 1}
    assert_same(load_baseline(baseline, save(contents, tmp_path / "mae.pth"))(x), model(x))


def test__a_fine_tuned_classifier_is_told(tmp_path: Path) -> None:
    baseline = small("mae_vitl16")
    state = original(baseline, random_model(baseline)) | {"head.weight": torch.zeros(10, 24)}
    path = save({"model": state}, tmp_path / "tuned.pth")
    with pytest.raises(CapiError, match=r'has "head.weight", which the layout of MAE does not know'):
        load_baseline(baseline, path)


def test__the_sizes_are_those_of_the_authors() -> None:
    known = {each.name: (each.architecture.depth, each.architecture.heads, each.parameters) for each in BASELINES}
    assert known["mae_vitl16"] == (24, 16, 303_301_632)
    assert known["mae_vith14"] == (32, 16, 630_764_800)
