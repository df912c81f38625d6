"""What single baselines compute, against a second computation: positions, norms, biases, the layer that is read."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from capi.errors import CapiError
from capi.types import Features
from capi.zoo.baselines.load import load_baseline
from tests.zoo.baseline_checkpoints import assert_same, images, original, random_model, save, small


def _wave(first: int, second: int, channel: int) -> float:
    """A quarter of 24 channels each: sine of the first, cosine of it, sine of the second, cosine of it."""
    quarter, within = divmod(channel, 6)
    angle = (first if quarter < 2 else second) / 10_000 ** (within / 6)
    return math.cos(angle) if quarter % 2 else math.sin(angle)


def test__aim_adds_sines_and_cosines_of_the_column_and_then_of_the_row() -> None:
    model, x = random_model(small("aim_600m")), images(2, 4)
    assert model.patch_norm is not None
    patches = model.patch_norm(model.patch_embedding(x, None))
    expected = [[_wave(column, row, channel) for channel in range(24)] for row in range(2) for column in range(4)]
    torch.testing.assert_close((model._embed(x, 2, 4) - patches)[0], torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test__mocov3_adds_sines_and_cosines_of_the_row_first_on_squares_only() -> None:
    model, x = random_model(small("mocov3_vitb16")), images(3, 3)
    added = model._embed(x, 3, 3)[:, 1:] - model.patch_embedding(x, None)
    expected = [[_wave(row, column, channel) for channel in range(24)] for row in range(3) for column in range(3)]
    torch.testing.assert_close(added[0], torch.tensor(expected), atol=1e-5, rtol=1e-5)
    with pytest.raises(CapiError, match="takes square images only"):
        model(images(3, 4))


def test__aim_reads_features_after_the_layer_of_the_paper_without_a_norm() -> None:
    model, x = random_model(small("aim_600m", depth=4, blocks_used=2)), images()
    tokens = model._embed(x, 5, 5)
    for block in model.blocks[:2]:
        tokens = block(tokens, None, None)
    torch.testing.assert_close(model(x).feature_map.flatten(1, 2), tokens)


def test__dino_resamples_positions_by_the_ratio_of_the_grids_with_an_offset_and_ibot_too() -> None:
    model = random_model(small("dino_vitb16"))
    assert model.positions is not None
    table = model.positions[:, 1:].reshape(1, 5, 5, 24).permute(0, 3, 1, 2)
    ratio = (3 + 0.1) / math.sqrt(25), (8 + 0.1) / math.sqrt(25)
    placed = F.interpolate(table, scale_factor=ratio, mode="bicubic").permute(0, 2, 3, 1).reshape(1, 24, 24)
    x = images(3, 8)
    embedded = model._embed(x, 3, 8)[:, 1:]
    torch.testing.assert_close(embedded - model.patch_embedding(x, None), placed.expand(2, -1, -1))
    other = random_model(small("ibot_vitl16"))
    other.load_state_dict(model.state_dict())
    assert_same(other(x), model(x), tolerance=0)


def test__beit_refuses_another_size_as_its_authors_do() -> None:
    with pytest.raises(CapiError, match="takes images of 20 x 20 pixels only"):
        random_model(small("beit_vitl16"))(images(5, 6))


def test__mim_refiner_lays_out_its_table_as_a_grid_and_has_one_of_two_norms() -> None:
    for name, norm in (("dbot_refined_vitl16", "norm.weight"), ("data2vec2_refined_vitl16", "embed_norm.weight")):
        baseline = small(name)
        model = random_model(baseline)
        assert model.positions is not None
        state = original(baseline, model)
        torch.testing.assert_close(state["pos_embed.embed"][0, 3, 1], model.positions[0, 3 * 5 + 1])
        assert {"norm.weight", "embed_norm.weight"} & state.keys() == {norm}


def test__dinov3_takes_periods_and_masks_of_biases_from_the_file(tmp_path: Path) -> None:
    baseline, x = small("dinov3_vitl16"), images()
    model = random_model(baseline)
    state = original(baseline, model)
    # The part of keys is not used: whatever stands there must not matter.
    state["blocks.0.attn.qkv.bias"][24:48] = float("nan")
    assert_same(load_baseline(baseline, save(state, tmp_path / "computed.pth"))(x), model(x))
    state["blocks.0.attn.qkv.bias"][24:48] = 0
    periods = torch.tensor([1.0, 3.15625])
    mask = torch.cat([torch.ones(24), torch.zeros(24), torch.full((24,), 0.5)])
    more = {"rope_embed.periods": periods, "blocks.0.attn.qkv.bias_mask": mask}
    loaded = load_baseline(baseline, save(state | more, tmp_path / "dinov3.pth"))
    assert (loaded(x).feature_map - model(x).feature_map).abs().max() > 1e-3
    model.rotary_periods = periods
    with torch.no_grad():
        model.blocks[0].attention.value.bias *= 0.5
    assert_same(loaded(x), model(x))
    with pytest.raises(CapiError, match=r'"rope_embed.periods" of shape \(5,\), expected \(2,\)'):
        load_baseline(baseline, save(state | {"rope_embed.periods": torch.ones(5)}, tmp_path / "other.pth"))


_IMAGE = "modality_encoders.IMAGE"


def test__data2vec_2_puts_positions_before_the_class_token_and_norms_after_the_sums(tmp_path: Path) -> None:
    """Against its description: attention with explicit logits, x = norm(x + attention(x)), x = norm(x + mlp(x))."""
    baseline, x = small("data2vec2_vitl16"), images()
    state = original(baseline, random_model(baseline))
    tokens = F.conv2d(x, state[f"{_IMAGE}.local_encoder.proj.weight"], state[f"{_IMAGE}.local_encoder.proj.bias"], 4)
    tokens = tokens.flatten(2).transpose(1, 2) + state[f"{_IMAGE}.fixed_positional_encoder.positions"]
    tokens = torch.cat([state[f"{_IMAGE}.extra_tokens"].expand(2, -1, -1), tokens], dim=1)
    tokens = _norm(tokens, state, f"{_IMAGE}.context_encoder.norm")
    for name in ("blocks.0", "blocks.1", "blocks.2"):
        query, key, value = _linear(tokens, state, f"{name}.attn.qkv").reshape(2, -1, 3, 3, 8).permute(2, 0, 3, 1, 4)
        attended = ((query * 8**-0.5) @ key.transpose(-2, -1)).softmax(-1) @ value
        attended = _linear(attended.transpose(1, 2).reshape(2, -1, 24), state, f"{name}.attn.proj")
        tokens = _norm(tokens + attended, state, f"{name}.norm1")
        hidden = _linear(F.gelu(_linear(tokens, state, f"{name}.mlp.fc1")), state, f"{name}.mlp.fc2")
        tokens = _norm(tokens + hidden, state, f"{name}.norm2")
    expected = Features(tokens[:, 0], tokens[:, 1:1], tokens[:, 1:].unflatten(1, (5, 5)))
    assert_same(load_baseline(baseline, save({"model": state}, tmp_path / "large.pt"))(x), expected)


def _linear(x: torch.Tensor, state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def _norm(x: torch.Tensor, state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    scaled = centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]
