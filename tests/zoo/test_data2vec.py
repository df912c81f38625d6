"""data2vec 2.0 against a block written out by hand; data2vec 1 against transformers."""

from pathlib import Path

import torch
import torch.nn.functional as F

from capi.types import Features
from capi.zoo.baselines.load import load_baseline
from tests.zoo.baseline_checkpoints import (
    assert_same,
    images,
    original,
    random_model,
    read_back,
    save,
    small,
    transformers_model,
)

_IMAGE = "modality_encoders.IMAGE"


def test__positions_come_before_the_class_token_and_norms_after_the_sums(tmp_path: Path) -> None:
    baseline, x = small("data2vec2_vitl16"), images()
    model = random_model(baseline)
    state = original(baseline, model)
    path = save({"model": state | {f"{_IMAGE}.decoder.proj.weight": torch.zeros(2, 2)}}, tmp_path / "large.pt")
    tokens = F.conv2d(x, state[f"{_IMAGE}.local_encoder.proj.weight"], state[f"{_IMAGE}.local_encoder.proj.bias"], 4)
    tokens = tokens.flatten(2).transpose(1, 2) + state[f"{_IMAGE}.fixed_positional_encoder.positions"]
    tokens = torch.cat([state[f"{_IMAGE}.extra_tokens"].expand(2, -1, -1), tokens], dim=1)
    tokens = _norm(tokens, state, f"{_IMAGE}.context_encoder.norm")
    for number in range(3):
        tokens = _block(tokens, state, f"blocks.{number}")
    expected = Features(tokens[:, 0], tokens[:, 1:1], tokens[:, 1:].unflatten(1, (5, 5)))
    assert_same(load_baseline(baseline, path)(x), expected)


def test__blocks_of_the_context_encoder_come_first(tmp_path: Path) -> None:
    """As in fairseq's config of the base size, whose first two blocks lie there."""
    baseline, x = small("data2vec2_vitb16"), images()
    model = random_model(baseline)
    moved = {}
    for name, value in original(baseline, model).items():
        number = name.split(".")[1] if name.startswith("blocks.") else ""
        rest = name.removeprefix(f"blocks.{number}.")
        if number in ("0", "1"):
            moved[f"{_IMAGE}.context_encoder.blocks.{number}.{rest}"] = value
        else:
            moved[f"blocks.{int(number) - 2}.{rest}" if number else name] = value
    assert_same(load_baseline(baseline, save({"model": moved}, tmp_path / "base.pt"))(x), model(x))


def _block(x: torch.Tensor, state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """One block as it is described: attention with explicit logits, norms after the sums."""
    query, key, value = _linear(x, state, f"{name}.attn.qkv").reshape(2, -1, 3, 3, 8).permute(2, 0, 3, 1, 4)
    logits = (query * 8**-0.5) @ key.transpose(-2, -1)
    attended = (logits.softmax(-1) @ value).transpose(1, 2).reshape(2, -1, 24)
    x = _norm(x + _linear(attended, state, f"{name}.attn.proj"), state, f"{name}.norm1")
    hidden = _linear(F.gelu(_linear(x, state, f"{name}.mlp.fc1")), state, f"{name}.mlp.fc2")
    return _norm(x + hidden, state, f"{name}.norm2")


def _linear(x: torch.Tensor, state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def _norm(x: torch.Tensor, state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def test__the_student_is_taken_unless_the_average_is_asked_for(tmp_path: Path) -> None:
    baseline, x = small("data2vec2_vitl16"), images()
    student, average = random_model(baseline), random_model(baseline)
    contents = {"model": {**original(baseline, student), "_ema": original(baseline, average)}, "cfg": {"task": None}}
    path = save(contents, tmp_path / "large.pt")
    assert_same(load_baseline(baseline, path)(x), student(x))
    assert_same(load_baseline(baseline, path, "_ema")(x), average(x))


def test__the_first_data2vec_is_that_of_transformers(tmp_path: Path) -> None:
    theirs = transformers_model("Data2VecVisionModel", "Data2VecVisionConfig", use_shared_relative_position_bias=True)
    encoder, x = read_back(small("data2vec1_vitl16"), theirs, tmp_path / "folder"), images()
    tokens = theirs(x).last_hidden_state
    assert_same(encoder(x), Features(tokens[:, 0], tokens[:, 1:1], tokens[:, 1:].unflatten(1, (5, 5))))
