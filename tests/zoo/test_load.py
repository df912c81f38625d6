"""Baselines out of files: strict, and with a word about what a file is instead."""

from pathlib import Path

import pytest
import torch

from capi.errors import CapiError
from capi.models.plain_vit import column_first_sincos
from capi.zoo.baselines.load import fitting, load_baseline
from capi.zoo.baselines.registry import BASELINES, Baseline
from tests.zoo.baseline_checkpoints import images, original, random_model, save, small, to_theirs


def _of_shapes(baseline: Baseline) -> dict[str, torch.Tensor]:
    """A checkpoint of a real size that takes no memory: every tensor is one number, repeated."""
    ours = {name: torch.empty(shape, device="meta") for name, shape in baseline.shapes().items()}
    return {name: torch.zeros(1).expand(value.shape) for name, value in to_theirs(ours, baseline.layout).items()}


def test__every_layout_is_recognised_by_its_names_and_shapes() -> None:
    for name in ("dino_vitb16", "beit_vitb16", "data2vec2_vitb16", "dinov2_reg_vits14", "dinov3_vits16plus"):
        assert name in fitting(_of_shapes(BASELINES[name]))


def test__a_checkpoint_of_another_size_says_which_one(tmp_path: Path) -> None:
    path = save({"model": _of_shapes(BASELINES["mae_vitb16"])}, tmp_path / "mae_pretrain_vit_base.pth")
    with pytest.raises(CapiError, match=r"so it is not mae_vitl16: its names and shapes are those of .*mae_vitb16"):
        load_baseline(BASELINES["mae_vitl16"], path)


def test__a_checkpoint_that_repeats_one_number_without_end_is_refused(tmp_path: Path) -> None:
    path = save({"model": _of_shapes(BASELINES["mae_vitb16"])}, tmp_path / "mae_pretrain_vit_base.pth")
    with pytest.raises(CapiError, match="but does not hold its numbers: download it again"):
        load_baseline(BASELINES["mae_vitb16"], path)


def test__a_checkpoint_of_another_method_says_which_one(tmp_path: Path) -> None:
    path = save(_of_shapes(BASELINES["beit_vitb16"]), tmp_path / "beit.pth")
    with pytest.raises(CapiError, match="so it is not dino_vitb16: its names and shapes are those of beit_vitb16"):
        load_baseline(BASELINES["dino_vitb16"], path)
    path = save({"visual.class_embedding": torch.zeros(3)}, tmp_path / "clip.pth")
    with pytest.raises(CapiError, match="is no checkpoint of dino_vitb16: it looks like a checkpoint of CLIP"):
        load_baseline(BASELINES["dino_vitb16"], path)


def test__what_is_no_checkpoint_says_what_was_expected(tmp_path: Path) -> None:
    path = save({"a": torch.zeros(3)}, tmp_path / "odd.pth")
    with pytest.raises(CapiError, match=r"expected dino_vitbase16_pretrain.pth of facebookresearch/dino"):
        load_baseline(BASELINES["dino_vitb16"], path)
    with pytest.raises(CapiError, match="there is no"):
        load_baseline(BASELINES["dino_vitb16"], tmp_path / "nothing.pth")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CapiError, match=r"is a folder without config.json"):
        load_baseline(BASELINES["dino_vitb16"], tmp_path / "folder")


def test__weights_are_frozen_real_numbers_with_their_license(tmp_path: Path) -> None:
    baseline = small("mae_vitl16")
    state = {name: value.half() for name, value in original(baseline, random_model(baseline)).items()}
    model = load_baseline(baseline, save({"model": state}, tmp_path / "half.pth"))
    assert not model.training
    assert all(value.dtype == torch.float32 and not value.requires_grad for value in model.parameters())
    assert model.licence == "CC-BY-NC-4.0 (non-commercial)"
    assert model(images()).feature_map.isfinite().all()


def test__a_part_is_refused_where_there_is_one_network(tmp_path: Path) -> None:
    baseline = small("mae_vitl16")
    path = save({"model": original(baseline, random_model(baseline))}, tmp_path / "mae.pth")
    with pytest.raises(CapiError, match='checkpoints of MAE have no part "teacher"'):
        load_baseline(baseline, path, "teacher")


def test__positions_that_another_method_has_are_doubted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MAE and DINO have the same names and shapes; the former's table is fixed, the latter's learned."""
    mae, dino = small("mae_vitl16"), small("dino_vitb16")
    model = random_model(mae)
    state = original(mae, model)
    load_baseline(mae, save({"model": state}, tmp_path / "learned.pth"))
    assert "has other positions than the fixed ones of MAE" in caplog.text
    caplog.clear()
    state["pos_embed"][:, 1:] = column_first_sincos(5, 5, 24)
    load_baseline(mae, save({"model": state}, tmp_path / "fixed.pth"))
    assert caplog.text == ""
    load_baseline(dino, save(state, tmp_path / "dino.pth"))
    assert "has fixed positions, where DINO learns them" in caplog.text
