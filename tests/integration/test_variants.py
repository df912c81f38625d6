"""Every switch trains, resumes where it was interrupted, and can be loaded and exported."""

import shutil
from pathlib import Path

import pytest
import torch

import capi
from capi.config.schema import Config
from capi.errors import CapiError
from capi.train.checkpoint import Checkpoints, tensors
from capi.zoo.run_folder import read_metrics
from tests.photos import noise_photos
from tests.variants import VARIANTS, learner_of, varied


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them takes longer than training."""
    monkeypatch.setattr("capi.api.training.draw_curves", lambda _: None)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return noise_photos(tmp_path / "photos", 8)


def short(config: Config, *overrides: str) -> Config:
    steps = ["optimization.steps=4", "optimization.learning_rate=0.01", "checkpoint.every_steps=2"]
    return varied(config, *steps, "data.workers=0", "run.log_steps=2", "run.loggers=[]", *overrides)


@pytest.mark.parametrize("name", VARIANTS)
def test__trains_resumes_loads_and_exports(small_config: Config, photos: Path, tmp_path: Path, name: str) -> None:
    config, whole, parts = short(small_config, *VARIANTS[name]), tmp_path / "whole", tmp_path / "parts"
    assert capi.pretrain(config, data=photos, out=whole, device="cpu").finished
    # As it lay there when it was interrupted half-way.
    shutil.copytree(whole, parts)
    shutil.rmtree(max((parts / "checkpoints").iterdir()))
    torch.manual_seed(99)
    assert capi.pretrain(config, data=photos, out=parts, device="cpu", resume=True).finished
    states = []
    for run in (whole, parts):
        learner = learner_of(config)
        assert Checkpoints(run / "checkpoints").load(learner).step == 4
        states.append({key: value.clone() for key, value in tensors(learner).items()})
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert all(torch.isfinite(value).all() for value in states[0].values())
    assert [line["step"] for line in read_metrics(whole / "metrics.jsonl")] == [2, 4]

    images = torch.randn(2, 3, 16, 40)
    features = capi.load(whole)(images)
    assert features.feature_map.shape == (2, 4, 10, 32)
    assert features.pooled.shape == (2, config.model.predictor_width)
    exported = capi.load(capi.export(whole, tmp_path / "encoder.safetensors"))(images)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(exported, features, strict=True))


def test__the_width_of_a_frozen_encoder_stands_in_the_run(small_config: Config, photos: Path, tmp_path: Path) -> None:
    config = short(small_config, *VARIANTS["frozen"])
    capi.pretrain(config, data=photos, out=tmp_path / "run", device="cpu")
    written = capi.load_config(tmp_path / "run" / "config.yaml")
    assert written.target.frozen.width == 3 * 8 * 8
    wrong = varied(config, "target.frozen.width=7")
    with pytest.raises(CapiError, match=r"target\.frozen\.width is 7, but pixels:8 has features of width 192"):
        capi.pretrain(wrong, data=photos, out=tmp_path / "other", device="cpu")
    nowhere = varied(config, "target.frozen.encoder=nowhere")
    with pytest.raises(CapiError, match="there is no encoder nowhere"):
        capi.pretrain(nowhere, data=photos, out=tmp_path / "other", device="cpu")
    assert not (tmp_path / "other").exists()


def test__a_run_can_be_the_frozen_teacher_of_another(small_config: Config, photos: Path, tmp_path: Path) -> None:
    capi.pretrain(short(small_config), data=photos, out=tmp_path / "teacher", device="cpu")
    overrides = ["target.kind=frozen", f"target.frozen.encoder={tmp_path / 'teacher'}", "model.patch_size=8"]
    config = short(small_config, *overrides, "masking.predict=2")
    assert capi.pretrain(config, data=photos, out=tmp_path / "run", device="cpu").finished
    learner = learner_of(config)
    # The teacher's weights are no part of the run.
    assert not any(key.startswith("frozen") for key in tensors(learner))


def test__metrics_and_health_are_those_that_the_target_has(small_config: Config, photos: Path, tmp_path: Path) -> None:
    metrics = {}
    for name in ("features", "pixels", "ema_head"):
        capi.pretrain(short(small_config, *VARIANTS[name]), data=photos, out=tmp_path / name, device="cpu")
        metrics[name] = set(read_metrics(tmp_path / name / "metrics.jsonl")[-1])
    prototypes = {"target_entropy", "prototype_use"}
    assert metrics["ema_head"] >= prototypes | {"student_loss", "effective_rank", "position_share", "teacher_gap"}
    assert metrics["features"] >= {"student_loss", "target_deviation", "effective_rank", "position_share"}
    assert metrics["pixels"] >= {"student_loss", "target_deviation", "teacher_gap", "student_gradient"}
    assert not metrics["features"] & (prototypes | {"clustering_loss", "clustering_gradient", "dead_prototypes"})
    assert not metrics["pixels"] & {"effective_rank", "position_share"}


def test__a_collapsed_ibot_run_ends_as_a_result(small_config: Config, photos: Path, tmp_path: Path) -> None:
    """Without centering, with a hot teacher and a large rate: the targets become one and the same."""
    collapse = ["target.ema_head.center_momentum=1.0", "target.ema_head.first_temperature=0.0005"]
    rates = ["target.ema_head.temperature=0.0005", "optimization.teacher_momentum=0.0", "optimization.steps=12"]
    config = short(small_config, *VARIANTS["ema_head"], *collapse, *rates, "optimization.learning_rate=0.05")
    assert capi.pretrain(config, data=photos, out=tmp_path / "run", device="cpu").finished
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["target_entropy"] < 0.1
    assert last["prototype_use"] < 3 / 24
    assert all(value is not None for key, value in last.items() if "loss" in key or "target" in key)
    assert torch.isfinite(capi.load(tmp_path / "run")(torch.randn(1, 3, 32, 24)).feature_map).all()
