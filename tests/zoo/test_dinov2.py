"""DINOv2 against transformers, with and without registers, MLP and SwiGLU, in both layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from capi.types import Features
from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.sources.dinov2 import BASELINES
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


@pytest.mark.parametrize(
    ("name", "options", "mlp_width"),
    [
        ("dinov2_reg_vitl14", {"mlp_ratio": 2}, 48),
        ("dinov2_reg_vitg14", {"mlp_ratio": 3, "use_swiglu_ffn": True}, 48),
    ],
)
def test__features_are_those_of_transformers_in_both_layouts(
    tmp_path: Path, name: str, options: dict[str, Any], mlp_width: int
) -> None:
    theirs = transformers_model(
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", num_register_tokens=4, **options
    )
    baseline = small(name, mlp_width=mlp_width)
    encoder = read_back(baseline, theirs, tmp_path / "folder")
    other = through_the_original_layout(baseline, encoder, tmp_path / "dinov2.pth")
    for rows, columns in ((5, 5), (3, 3), (8, 6)):
        x = images(rows, columns)
        tokens = theirs(x).last_hidden_state
        expected = Features(tokens[:, 0], tokens[:, 1:5], tokens[:, 5:].unflatten(1, (rows, columns)))
        for each in (encoder, other):
            assert_same(each(x), expected)


def test__without_registers_it_is_transformers_at_its_own_size(tmp_path: Path) -> None:
    theirs = transformers_model("Dinov2Model", "Dinov2Config", mlp_ratio=2)
    encoder, x = read_back(small("dinov2_vitl14", mlp_width=48), theirs, tmp_path / "folder"), images()
    tokens = theirs(x).last_hidden_state
    assert_same(encoder(x), Features(tokens[:, 0], tokens[:, 1:1], tokens[:, 1:].unflatten(1, (5, 5))))


def test__blocks_in_chunks_and_heads_of_training_are_understood(tmp_path: Path) -> None:
    baseline, x = small("dinov2_reg_vitl14"), images()
    model = random_model(baseline)
    chunked = {
        name.replace("blocks.", f"blocks.{int(name.split('.')[1]) // 2}.", 1)
        if name.startswith("blocks.")
        else name: value
        for name, value in original(baseline, model).items()
    }
    contents = {f"backbone.{name}": value for name, value in chunked.items()}
    contents |= {"backbone.mask_token": torch.zeros(1, 24), "dino_head.mlp.0.weight": torch.zeros(2, 2)}
    path = save({"teacher": contents}, tmp_path / "teacher_checkpoint.pth")
    assert_same(load_baseline(baseline, path)(x), model(x))


def test__the_sizes_are_those_of_the_authors() -> None:
    known = {each.name: each for each in BASELINES}
    giant = known["dinov2_reg_vitg14"].architecture
    assert (giant.width, giant.depth, giant.heads, giant.mlp_width, giant.registers) == (1536, 40, 24, 4096, 4)
    assert known["dinov2_reg_vitl14"].architecture.native_size == 518
    assert known["dinov2_reg_vitl14"].parameters == 304_372_736 - 1024
