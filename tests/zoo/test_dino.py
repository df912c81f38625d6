"""DINO against transformers' ViT, in both layouts."""

import math
from argparse import Namespace
from pathlib import Path

import torch
import torch.nn.functional as F

from capi.types import Features
from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.sources.dino import BASELINES
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
    theirs = transformers_model("ViTModel", "ViTConfig", layer_norm_eps=1e-6)
    baseline = small("dino_vitb16")
    x = images()
    tokens = theirs(x).last_hidden_state
    expected = Features(tokens[:, 0], tokens[:, 1:1], tokens[:, 1:].unflatten(1, (5, 5)))
    encoder = read_back(baseline, theirs, tmp_path / "folder")
    assert_same(encoder(x), expected)
    assert_same(through_the_original_layout(baseline, encoder, tmp_path / "dino.pth")(x), expected)


def test__resampled_without_the_offset_it_is_transformers_again(tmp_path: Path) -> None:
    """Their code leaves out the 0.1 that DINO's authors add."""
    theirs = transformers_model("ViTModel", "ViTConfig", layer_norm_eps=1e-6)
    encoder = read_back(small("dino_vitb16", resampling="bicubic"), theirs, tmp_path / "folder")
    for rows, columns in ((7, 7), (3, 8)):
        x = images(rows, columns)
        tokens = theirs(x, interpolate_pos_encoding=True).last_hidden_state
        torch.testing.assert_close(encoder(x).feature_map.flatten(1, 2), tokens[:, 1:], atol=1e-5, rtol=1e-5)


def test__positions_are_resampled_by_the_ratio_of_the_grids_with_an_offset() -> None:
    model = random_model(small("dino_vitb16"))
    assert model.positions is not None
    table = model.positions[:, 1:].reshape(1, 5, 5, 24).permute(0, 3, 1, 2)
    ratio = (3 + 0.1) / math.sqrt(25), (8 + 0.1) / math.sqrt(25)
    placed = F.interpolate(table, scale_factor=ratio, mode="bicubic").permute(0, 2, 3, 1).reshape(1, 24, 24)
    x = images(3, 8)
    embedded = model._embed(x, 3, 8)[:, 1:]
    torch.testing.assert_close(embedded - model.patch_embedding(x).flatten(2).transpose(1, 2), placed.expand(2, -1, -1))


def test__the_teacher_of_a_training_checkpoint_is_taken_and_its_head_left_out(tmp_path: Path) -> None:
    baseline, x = small("dino_vitb16"), images()
    teacher, student = random_model(baseline), random_model(baseline)
    contents = {
        "teacher": _with_head(original(baseline, teacher), "backbone."),
        "student": _with_head(original(baseline, student), "module.backbone."),
        "args": Namespace(arch="vit_base"),
    }
    path = save(contents, tmp_path / "checkpoint.pth")
    assert_same(load_baseline(baseline, path)(x), teacher(x))
    assert_same(load_baseline(baseline, path, "student")(x), student(x))


def _with_head(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    head = prefix.replace("backbone", "head")
    return {prefix + name: value for name, value in state.items()} | {f"{head}mlp.0.weight": torch.zeros(2, 2)}


def test__the_sizes_are_those_of_the_authors() -> None:
    known = {each.name: (each.architecture.width, each.architecture.heads, each.parameters) for each in BASELINES}
    assert known["dino_vitb16"] == (768, 12, 85_798_656)
    assert known["dino_vits16"] == (384, 6, 21_665_664)
