from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import capi
from capi.config.files import parse_config
from capi.config.schema import Config
from capi.data.crops import crop_draws, flips, random_box
from capi.data.loader import LoadedBatch
from capi.data.sources import image_folder
from capi.errors import CapiError
from capi.models.heads import MlpHead
from capi.models.predictor import FusedPredictor, SelfPredictor
from capi.runtime.randomness import sample_keys
from capi.train import build
from capi.train.build import build_learner, mask_sampler
from capi.train.step import train_step
from capi.types import IMAGENET, MaskedBatch, Statistics, statistics_of
from capi.zoo.build import build_student, frozen, statistics
from tests.data.pictures import noise

UNUSUAL = {
    "data": {
        "image_size": [16, 24],
        "crop_scale": [0.3, 0.9],
        "crop_aspect": [0.5, 1.5],
        "flip": False,
        "mean": [0.1, 0.2],
        "std": [0.3, 0.4],
        "max_megapixels": 5.0,
        "reduced_decoding": False,
        "cache_mib": 7,
    },
    "masking": {"predict": 2},
    "checkpoint": {"every_steps": 17, "every_minutes": 3.5},
    "run": {"log_steps": 3, "non_finite": "skip", "non_finite_limit": 4},
    "seed": 11,
    "model": {
        "width": 48,
        "depth": 3,
        "heads": 4,
        "patch_size": 8,
        "registers": 5,
        "channels": 2,
        "mlp_ratio": 2.5,
        "positions": "released",
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
        "precision": "bfloat16",
    },
    "optimization": {
        "batch_size": 12,
        "micro_batches": 3,
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


def test__a_single_image_is_warned_of() -> None:
    warning = build.few_warning(1)
    assert warning is not None
    assert "the data set is a single image" in warning
    assert build.few_warning(2) is None


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
    assert encoder.positions.kind == predictor.positions.kind == "released"
    assert encoder.blocks[2].drop_rate == predictor.blocks[1].drop_rate == 0.3
    assert learner.student.head.direction.shape == (13, 24)
    settings = learner.target.settings
    assert (settings.sinkhorn, settings.iterations, settings.chunk_bytes) == ("standard", 4, 3 * 2**20)
    assert settings.precision == "bfloat16"
    assert (settings.target_temperature, settings.prediction_temperature) == (0.05, 0.2)
    assert learner.target.prototypes.shape == (13, 48)
    assert learner.target.bias is None
    (group,) = learner.target_optimizer.param_groups
    assert (group["rate_multiplier"], group["weight_decay"]) == (0.25, 0.02)
    rules = {(group["rate_multiplier"], group["weight_decay"]) for group in learner.student_optimizer.param_groups}
    assert rules == {(1.0, 0.3), (1.0, 0.15), (0.7, 0.3), (0.7, 0.0)}
    assert learner.learning_rate(40) == 0.01
    assert learner.learning_rate(39) == pytest.approx(0.01)
    assert learner.learning_rate(120) == pytest.approx(0.01 * 0.5 * (1 + 2**-0.5))
    assert learner.teacher_momentum(40) == pytest.approx(0.9)
    assert learner.target.student_temperature == 0.3


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ({"predictor": {"kind": "self", "mask_tokens": "masked", "width": 24, "heads": 3}}, SelfPredictor),
        ({"predictor": {"kind": "fused"}}, FusedPredictor),
    ],
)
def test__the_predictor_is_the_one_of_the_config(small_config: Config, model: dict, kind: type) -> None:
    tree = small_config.model_dump(mode="json")
    tree["model"] |= model | {"positions": "learned", "head": "mlp"}
    student = build_student(parse_config(tree))
    assert type(student.predictor) is kind
    assert isinstance(student.head, MlpHead)
    assert student.encoder.positions.table.shape == (8, 6, 32)
    if isinstance(student.predictor, SelfPredictor):
        assert student.predictor.mask_tokens == "masked"
        assert student.predictor.projection.weight.shape == (24, 32)
        assert student.predictor.positions.table.shape == (8, 6, 24)


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


def test__every_knob_of_the_data_reaches_the_loader(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((30, 40), dtype=np.uint8)).save(tmp_path / "a.png")
    config = parse_config(UNUSUAL)
    batches = build.training_batches(config, image_folder(tmp_path), workers=2)
    assert (batches.cropping.size, batches.cropping.flip) == ((16, 24), False)
    assert (batches.cropping.scale, batches.cropping.aspect) == ((0.3, 0.9), (0.5, 1.5))
    assert (batches.share.batch_size, batches.share.micro_size, batches.seed) == (12, 4, 11)
    decoder = batches.reader.decoder
    assert (decoder.channels, decoder.max_pixels, decoder.smallest_side, decoder.reduced) == (2, 5_000_000, 8, False)
    assert batches.reader.cache_bytes == 7 * 2**20 // 2
    loaded = batches[0]
    assert loaded.images.shape == (4, 2, 16, 24)
    assert loaded.predict_index.shape == (4, 2)


def test__every_knob_of_the_run_reaches_the_loop() -> None:
    settings = build.loop_settings(parse_config(UNUSUAL))
    expected = replace(settings, total_steps=200, batch_size=12, seed=11, log_steps=3, save_steps=17, save_minutes=3.5)
    assert settings == replace(expected, non_finite="skip", non_finite_limit=4)


def test__images_are_normalized_on_their_way_to_the_device(small_config: Config) -> None:
    index = torch.zeros(1, 1, dtype=torch.int64)
    white = LoadedBatch(torch.full((1, 3, 4, 4), 255, dtype=torch.uint8), index, index, {})
    images = build.device_mover(small_config, torch.device("cpu"))(white).images
    expected = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(images[0, :, 2, 3], expected)


def test__with_color_jitter_the_student_alone_sees_other_colors(small_config: Config, tmp_path: Path) -> None:
    Image.fromarray(noise(50, 70, 3)).save(tmp_path / "image.png")

    def batch(jitter: float) -> MaskedBatch:
        config = parse_config(small_config.model_dump(mode="json"), [f"data.color_jitter={jitter}"])
        loaded = build.training_batches(config, image_folder(tmp_path), workers=0)[0]
        return build.device_mover(config, torch.device("cpu"))(loaded)

    plain, jittered = batch(0.0), batch(1.0)
    assert plain.recolored is None
    assert plain.student_images is plain.images
    assert torch.equal(jittered.images, plain.images)
    assert not torch.allclose(jittered.student_images, plain.images, atol=0.05)
    outputs = []
    for images in (plain.images, jittered.student_images):
        learner = build_learner(small_config)
        given = MaskedBatch(plain.images, plain.visible_index, plain.predict_index, images)
        outputs.append(train_step(learner, [given], 0))
    # The teacher, and what it clusters, is the same; the student's loss is that of what it saw.
    assert outputs[0].target_loss == outputs[1].target_loss
    assert outputs[0].student_loss != outputs[1].student_loss


def test__auto_statistics_are_those_of_the_images(small_config: Config, tmp_path: Path) -> None:
    for number, value in enumerate((50, 150)):
        Image.fromarray(np.full((20, 20, 3), value, dtype=np.uint8)).save(tmp_path / f"{number}.png")
    tree = small_config.model_dump(mode="json")
    tree["data"] |= {"mean": "auto", "std": "auto"}
    config = parse_config(tree)
    with pytest.raises(capi.CapiError, match="only a run with images"):
        statistics(config)
    mean, std = statistics(build.resolve_statistics(config, image_folder(tmp_path)))
    assert mean == pytest.approx([100 / 255] * 3)
    assert std == pytest.approx([50 / 255] * 3)
    assert build.resolve_statistics(small_config, image_folder(tmp_path)) is small_config


def test__precision_follows_the_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert build.choose_precision("auto", cpu) == torch.float32
    assert build.choose_precision("bfloat16", cpu) == torch.bfloat16
    assert build.choose_precision("float32", cuda) == torch.float32


def test__a_frozen_encoder_shares_the_weights_and_knows_its_statistics(small_config: Config) -> None:
    student = build_learner(small_config).student
    encoder = frozen(student, Statistics((0.1,) * 3, (0.2,) * 3))
    assert encoder.encoder is student.encoder
    assert statistics_of(encoder) == ((0.1,) * 3, (0.2,) * 3)
    assert statistics(small_config) == IMAGENET


def test__training_crops_are_cut_before_they_are_resized(small_config: Config, tmp_path: Path) -> None:
    image = noise(50, 70, 3)
    Image.fromarray(image).save(tmp_path / "image.png")
    config = parse_config(small_config.model_dump(mode="json") | {"seed": 5})
    loaded = build.training_batches(config, image_folder(tmp_path), workers=0)[0].images
    keys = sample_keys(5, 0, torch.arange(len(loaded)))
    height, width = config.data.height_and_width
    for cropped, draws, mirrored in zip(loaded, crop_draws(keys), flips(keys), strict=True):
        box = random_box((50, 70), draws, config.data.crop_scale, config.data.crop_aspect)
        cut = Image.fromarray(image).crop(tuple(map(int, box))).resize((width, height), Image.Resampling.BICUBIC)
        expected = torch.tensor(np.asarray(cut)).permute(2, 0, 1)
        assert torch.equal(cropped, expected.flip(2) if mirrored else expected)


@pytest.mark.parametrize(("images", "epochs", "steps"), [(100, 3, 75), (101, 1, 26), (3, 0.5, 1), (10, 2.0, 5)])
def test__epochs_become_the_steps_that_see_every_image_so_often(
    small_config: Config, images: int, epochs: float, steps: int
) -> None:
    overrides = [f"optimization.epochs={epochs}", "optimization.batch_size=4"]
    config = parse_config(small_config.model_dump(mode="json"), overrides)
    optimization = build.resolve_steps(config, images).optimization
    assert (optimization.steps, optimization.epochs) == (steps, None)
    assert build.resolve_steps(small_config, images) is small_config


def test__epochs_without_images_are_reported_and_not_passed_over(small_config: Config) -> None:
    config = parse_config(small_config.model_dump(mode="json"), ["optimization.epochs=2"])
    with pytest.raises(CapiError, match="epochs counts passes over images, and here it is not known"):
        build_learner(config)
