"""The model as the library loads, calls and saves it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModel, pipeline

from capi.config.schema import Config
from capi.errors import CapiError
from capi.huggingface import CapiConfig, CapiModel
from capi.models.architecture import build_encoder
from capi.models.features import CapiEncoder
from capi.zoo.build import frozen, statistics
from capi.zoo.huggingface.files import read_transformers, write_transformers
from tests.variants import NETWORKS, TOGETHER, learner_of, varied


@torch.no_grad()
def test__the_library_computes_the_features_of_the_encoder(model: CapiEncoder, folder: Path) -> None:
    opened, images = AutoModel.from_pretrained(folder), torch.randn(2, 3, 24, 32)
    assert isinstance(opened, CapiModel)
    assert not opened.training
    output, features = opened(pixel_values=images), model(images)
    assert torch.equal(output.pooler_output, features.pooled)
    assert torch.equal(output.feature_map, features.feature_map)
    assert torch.equal(output.last_hidden_state[:, :4], features.registers)
    # Row by row: the patch in row 2 and column 5 of 8.
    assert torch.equal(output.last_hidden_state[:, 4 + 2 * 8 + 5], features.feature_map[:, 2, 5])
    assert output.hidden_states is None


@pytest.mark.parametrize("overrides", [*NETWORKS.values(), *TOGETHER.values()], ids=str)
def test__every_variant_survives_the_library(small_config: Config, overrides: list[str], tmp_path: Path) -> None:
    config = varied(small_config, *overrides)
    model = frozen(learner_of(config).student, statistics(config)).eval()
    write_transformers(model, tmp_path / "out", image_size=32)
    opened, loading = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    opened.save_pretrained(tmp_path / "saved")
    saved = read_transformers(tmp_path / "saved")
    assert saved.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved.state_dict()[name])
    assert saved.statistics == model.statistics


def test__a_model_around_an_encoder_shares_its_weights(model: CapiEncoder, tmp_path: Path) -> None:
    around = CapiModel.from_encoder(model, image_size=32)
    assert around.model is model
    around.save_pretrained(tmp_path / "saved")
    read = read_transformers(tmp_path / "saved")
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test__hidden_states_lead_from_the_first_block_to_the_last(model: CapiEncoder, folder: Path) -> None:
    opened, images = AutoModel.from_pretrained(folder), torch.randn(2, 3, 24, 32)
    output = opened(images, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert torch.equal(output.hidden_states[0][:, :4], model.encoder.registers.expand(2, -1, -1))
    last = output.hidden_states[-1]
    normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(normed, output.last_hidden_state)
    opened.config.output_hidden_states = True
    assert len(opened(images).hidden_states) == 3
    # Nothing stays behind that would record the next call.
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in opened.model.encoder.blocks)


@torch.no_grad()
def test__half_precision_is_loaded_when_asked_for(model: CapiEncoder, folder: Path) -> None:
    opened, images = AutoModel.from_pretrained(folder, dtype=torch.float16), torch.randn(2, 3, 24, 32)
    assert {value.dtype for value in opened.state_dict().values()} == {torch.float16}
    output = opened(images)
    assert output.pooler_output.dtype is torch.float16
    torch.testing.assert_close(output.pooler_output.float(), model(images).pooled, rtol=0.02, atol=0.02)


def test__tuples_are_given_where_asked_for(folder: Path) -> None:
    opened, images = AutoModel.from_pretrained(folder), torch.randn(1, 3, 8, 8)
    last, pooled, feature_map = opened(images, return_dict=False)
    assert (last.shape, pooled.shape, feature_map.shape) == ((1, 8, 32), (1, 48), (1, 2, 2, 32))


def test__it_can_be_trained(folder: Path) -> None:
    opened = AutoModel.from_pretrained(folder).train()
    opened(torch.randn(1, 3, 8, 8)).pooler_output.sum().backward()
    assert opened.model.encoder.registers.grad.abs().sum() > 0


def test__calls_that_cannot_be_answered_are_refused(folder: Path) -> None:
    opened = AutoModel.from_pretrained(folder)
    with pytest.raises(CapiError, match="needs pixel_values"):
        opened()
    with pytest.raises(CapiError, match="no attentions"):
        opened(torch.randn(1, 3, 8, 8), output_attentions=True)
    with pytest.raises(CapiError, match="multiples of the patch size 4"):
        opened(torch.randn(1, 3, 30, 32))


@pytest.mark.parametrize(
    "overrides", [[], ["model.positions=learned", "model.head=mlp"], ["target.kind=pixels"]], ids=str
)
def test__a_model_from_a_config_begins_as_our_own_does(small_config: Config, overrides: list[str]) -> None:
    """Means and deviations of each weight, which the library initializes."""
    config = varied(small_config, *overrides)
    encoder = frozen(learner_of(config).student, statistics(config))
    made = CapiModel(CapiConfig.from_encoder(encoder, image_size=32)).model
    ours = build_encoder(CapiConfig.from_encoder(encoder, image_size=32).architecture())
    for (name, value), own in zip(made.state_dict().items(), ours.state_dict().values(), strict=True):
        if value.numel() > 300 or own.std() == 0 or value.numel() == 1:
            # Two means of 1024 numbers with a deviation of 0.18 differ by 0.008 (standard error).
            torch.testing.assert_close(value.mean(), own.mean(), atol=0.03, rtol=0, msg=name)
            torch.testing.assert_close(value.std(), own.std(), atol=1e-3, rtol=0.15, msg=name, equal_nan=True)


def test__weights_that_a_file_lacks_are_initialized(folder: Path) -> None:
    """The library warns and goes on; what it did find must stay as it was."""
    state = load_file(folder / "model.safetensors")
    gone = {name: state.pop(name) for name in ("model.encoder.patch_embedding.bias", "model.predictor.mask_token")}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    opened, loading = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert loading["missing_keys"] == gone.keys()
    for name, value in opened.state_dict().items():
        assert value.isfinite().all()
        assert name in gone or torch.equal(value, state[name])
    assert opened.model.predictor.mask_token.abs().max() < 0.2


@torch.no_grad()
def test__the_pipeline_gives_the_features_of_a_file(model: CapiEncoder, folder: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    extract = pipeline("image-feature-extraction", model=str(folder))
    tokens = torch.tensor(extract(str(tmp_path / "photo.png")))
    pooled = torch.tensor(extract(Image.open(tmp_path / "photo.png"), pool=True))
    images = AutoImageProcessor.from_pretrained(folder)(Image.fromarray(pixels), return_tensors="pt")
    features = model(images["pixel_values"])
    assert torch.equal(tokens, torch.cat([features.registers, features.feature_map.flatten(1, 2)], 1))
    assert torch.equal(pooled, features.pooled)


def test__a_folder_that_a_config_does_not_fit_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"depth": -1}))
    with pytest.raises(CapiError, match='"depth": -1'):
        AutoModel.from_pretrained(folder)
