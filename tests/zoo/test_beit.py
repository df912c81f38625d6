"""BEiT against transformers' Beit, in both layouts, with the table shared or in each block."""

from pathlib import Path

import pytest
import torch

from capi.errors import CapiError
from capi.types import Features, Statistics
from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.sources.beit import BASELINES
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


@pytest.mark.parametrize("option", ["use_shared_relative_position_bias", "use_relative_position_bias"])
def test__features_are_those_of_transformers_in_both_layouts(tmp_path: Path, option: str) -> None:
    theirs = transformers_model(
        "BeitForMaskedImageModeling",
        "BeitConfig",
        layer_norm_eps=1e-6,
        use_mask_token=True,
        vocab_size=7,
        **{option: True},
    )
    baseline, x = small("beit_vitl16"), images()
    tokens = theirs.layernorm(theirs.beit(x).last_hidden_state)
    expected = Features(tokens[:, 0], tokens[:, 1:1], tokens[:, 1:].unflatten(1, (5, 5)))
    encoder = read_back(baseline, theirs, tmp_path / "folder")
    assert_same(encoder(x), expected)
    other = through_the_original_layout(baseline, encoder, tmp_path / "beit.pth", lambda state: {"model": state})
    assert_same(other(x), expected)


def test__what_belongs_to_pretraining_is_left_out(tmp_path: Path) -> None:
    baseline, x = small("beit_vitl16"), images()
    model = random_model(baseline)
    more = {
        "mask_token": torch.zeros(1, 1, 24),
        "lm_head.weight": torch.zeros(8, 24),
        "rel_pos_bias.relative_position_index": torch.zeros(26, 26, dtype=torch.long),
    }
    path = save({"model": original(baseline, model) | more}, tmp_path / "beit.pth")
    assert_same(load_baseline(baseline, path)(x), model(x))


def test__another_size_is_refused_as_its_authors_do() -> None:
    model = random_model(small("beit_vitl16"))
    with pytest.raises(CapiError, match="takes images of 20 x 20 pixels only"):
        model(images(5, 6))


def test__images_are_normalised_as_in_its_training() -> None:
    assert all(each.statistics == Statistics((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)) for each in BASELINES)
