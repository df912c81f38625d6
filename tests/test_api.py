import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capi
from capi.api import build_learner, check, choose_device, least_bytes, mask_sampler
from capi.config.loading import parse_config
from capi.config.schema import Config
from capi.method.masking import Grid
from tests.conftest import REFERENCE

UNUSUAL = {
    "model": {
        "width": 48,
        "depth": 3,
        "heads": 4,
        "patch_size": 8,
        "registers": 5,
        "channels": 2,
        "mlp_ratio": 2.5,
        "rope": "released",
        "stochastic_depth": 0.3,
        "predictor": {"depth": 2, "width": 24, "heads": 3},
    },
    "clustering": {
        "prototypes": 13,
        "bias": False,
        "sinkhorn": "standard",
        "iterations": 4,
        "target_temperature": 0.05,
        "prediction_temperature": 0.2,
        "learning_rate_multiplier": 0.25,
        "weight_decay": 0.02,
        "chunk_mib": 3,
    },
    "optimization": {
        "steps": 200,
        "warmup_share": 0.2,
        "learning_rate": 0.01,
        "cosine_kept": 0.5,
        "weight_decay": 0.3,
        "norm_decay_multiplier": 0.5,
        "patch_embedding_rate_multiplier": 0.7,
        "teacher_momentum": 0.9,
        "student_temperature": 0.3,
    },
}


def test__load_gives_a_vision_encoder(reference_checkpoint: Path) -> None:
    for path in (reference_checkpoint, str(reference_checkpoint)):
        encoder = capi.load(path)
        assert isinstance(encoder, capi.VisionEncoder)
        assert (encoder.width, encoder.patch_size) == (64, 8)
        assert isinstance(encoder(torch.randn(1, 3, 16, 24)), capi.Features)


def test__every_knob_of_the_config_reaches_its_component() -> None:
    config = parse_config(UNUSUAL)
    learner = build_learner(config)
    encoder, predictor = learner.student.encoder, learner.student.predictor
    assert encoder.patch_embedding.weight.shape == (48, 2, 8, 8)
    assert (len(encoder.blocks), encoder.blocks[0].attention.heads, encoder.num_registers) == (3, 4, 5)
    assert encoder.blocks[0].mlp.expand.weight.shape == (120, 48)
    assert predictor.blocks[0].mlp.expand.weight.shape == (60, 24)
    assert predictor.blocks[1].attention.key.weight.shape == (24, 48)
    assert (len(predictor.blocks), predictor.blocks[0].attention.heads) == (2, 3)
    assert encoder.rope == predictor.rope == "released"
    assert encoder.blocks[2].drop_rate == predictor.blocks[1].drop_rate == 0.3
    assert learner.student.head.direction.shape == (13, 24)
    settings = learner.clustering.settings
    assert (settings.sinkhorn, settings.iterations, settings.chunk_bytes) == ("standard", 4, 3 * 2**20)
    assert (settings.target_temperature, settings.prediction_temperature) == (0.05, 0.2)
    assert learner.clustering.prototypes.shape == (13, 48)
    assert learner.clustering.bias is None
    (group,) = learner.clustering_optimizer.param_groups
    assert (group["rate_multiplier"], group["weight_decay"]) == (0.25, 0.02)
    rules = {(group["rate_multiplier"], group["weight_decay"]) for group in learner.student_optimizer.param_groups}
    assert rules == {(1.0, 0.3), (1.0, 0.15), (0.7, 0.3), (0.7, 0.0)}
    assert learner.learning_rate(40) == 0.01
    assert learner.learning_rate(39) == pytest.approx(0.01)
    assert learner.learning_rate(120) == pytest.approx(0.01 * 0.5 * (1 + 2**-0.5))
    assert learner.teacher_momentum(40) == pytest.approx(0.9)
    assert learner.student_temperature == 0.3


@pytest.mark.parametrize(
    "images",
    ["torch.randn(3, 16, 24)", "torch.zeros(1, 3, 16, 24, dtype=torch.uint8)", "torch.zeros(1, 3, 16, 24).double()"],
)
def test__images_of_another_kind_are_refused(images: str) -> None:
    """In a process of its own: here the annotations would speak first."""
    code = f"import torch, capi; capi.load('{REFERENCE / 'student.pth'}')({images})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "CapiError: images must be float32 of shape (batch, channels, height, width)" in result.stderr


def test__the_seed_decides_the_weights(small_config: Config) -> None:
    def weights(seed: int) -> torch.Tensor:
        learner = build_learner(small_config.model_copy(update={"seed": seed}))
        return torch.cat([value.flatten() for value in learner.student.state_dict().values()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test__masks_that_do_not_fit_the_grid_are_refused_at_once(small_config: Config) -> None:
    tree = small_config.model_dump(mode="json")
    tree["masking"]["predict"] = 40
    with pytest.raises(capi.CapiError, match=r"masking\.predict between 1 and 31"):
        mask_sampler(parse_config(tree))


def test__the_least_memory_is_less_than_a_real_step_takes() -> None:
    config = parse_config({"optimization": {"batch_size": 8}, "model": {"depth": 2}, "clustering": {"prototypes": 512}})
    cost = check(config, device="cpu", rounds=1)
    visible, _, _ = mask_sampler(config).counts(Grid(*config.grid))
    assert 1e6 < least_bytes(config, visible) < cost.peak_bytes


def test__a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu").type == "cpu"
    for name in ("cuda:99", "toaster"):
        with pytest.raises(capi.CapiError, match="is not there"):
            choose_device(name)
