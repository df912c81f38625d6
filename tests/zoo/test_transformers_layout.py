"""Folders of transformers: what their config.json must say, and weights in several files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from capi.errors import CapiError
from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.transformers_layout import INDEX, architecture_in, layout_for, read_weights
from tests.zoo.baseline_checkpoints import assert_same, images, random_model, small, to_theirs

CONFIG = {
    "model_type": "vit",
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "patch_size": 4,
    "image_size": 20,
    "layer_norm_eps": 1e-12,
}


def _folder(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test__the_eps_of_the_file_is_taken(tmp_path: Path) -> None:
    assert architecture_in(CONFIG, small("dino_vitb16"), "x").eps == 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "x has width 48, but dino_vitb16 has 24: it is another size"),
        ({"model_type": "swin"}, 'x is a model of type "swin", but dino_vitb16 is of "vit"'),
        ({"patch_size": None}, "x has no usable config.json"),
    ],
)
def test__another_kind_or_size_is_reported(change: dict[str, object], message: str) -> None:
    with pytest.raises(CapiError, match=message):
        architecture_in(CONFIG | change, small("dino_vitb16"), "x")


def test__weights_in_several_files_are_put_together(tmp_path: Path) -> None:
    baseline = small("dino_vitb16")
    model = random_model(baseline)
    state = {
        f"vit.{name}": value
        for name, value in to_theirs(model.state_dict(), layout_for(baseline.architecture, "vit")).items()
    }
    folder = _folder(tmp_path / "sharded", CONFIG | {"layer_norm_eps": 1e-6})
    halves = dict(list(state.items())[:20]), dict(list(state.items())[20:])
    for number, half in enumerate(halves):
        save_file(half, folder / f"model-{number}.safetensors")
    index = {name: f"model-{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    x = images()
    assert_same(load_baseline(baseline, folder)(x), model(x))


def test__an_index_leads_to_no_other_folder(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "bad", CONFIG)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CapiError, match="outside its folder"):
        read_weights(folder)


def test__a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match=r"holds neither model.safetensors nor pytorch_model.bin"):
        load_baseline(small("dino_vitb16"), _folder(tmp_path / "empty", CONFIG))


def test__pickled_weights_are_read_without_running_them(tmp_path: Path) -> None:
    baseline = small("dino_vitb16")
    model = random_model(baseline)
    folder = _folder(tmp_path / "old", CONFIG | {"layer_norm_eps": 1e-6})
    torch.save(to_theirs(model.state_dict(), layout_for(baseline.architecture, "vit")), folder / "pytorch_model.bin")
    x = images()
    assert_same(load_baseline(baseline, folder)(x), model(x))
