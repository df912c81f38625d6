"""Folders in the layout of transformers, without transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

from capi.config.schema import Config
from capi.errors import CapiError
from capi.models.features import CapiEncoder
from capi.types import Statistics
from capi.zoo.build import frozen, statistics
from capi.zoo.huggingface.files import read_transformers, write_transformers
from capi.zoo.released import load_released
from tests.variants import VARIANTS, learner_of, varied

FILES = {"config.json", "model.safetensors", "preprocessor_config.json"}


@pytest.fixture
def folder(model: CapiEncoder, tmp_path: Path) -> Path:
    return write_transformers(model, tmp_path / "out", image_size=32)


def changed_config(folder: Path, **changes: Any) -> Path:
    """With these values in config.json; ... takes one out."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    return folder


def changed_weights(folder: Path, name: str, value: torch.Tensor | None) -> Path:
    state = load_file(folder / "model.safetensors") | {name: value}
    save_file({key: part for key, part in state.items() if part is not None}, folder / "model.safetensors")
    return folder


def assert_equal(ours: CapiEncoder, theirs: CapiEncoder) -> None:
    """The same weights, bit for bit, and so the same features."""
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name
    images = torch.randn(2, ours.encoder.patch_embedding.weight.shape[1], 3 * ours.patch_size, 2 * ours.patch_size)
    with torch.no_grad():
        for tensor, other in zip(ours(images), theirs(images), strict=True):
            assert torch.equal(tensor, other)


@pytest.mark.parametrize("overrides", [[], ["model.positions=released"], *VARIANTS.values()], ids=str)
def test__every_variant_comes_back_bit_by_bit(small_config: Config, overrides: list[str], tmp_path: Path) -> None:
    config = varied(small_config, *overrides)
    model = frozen(learner_of(config).student, statistics(config)).eval()
    assert_equal(model, read_transformers(write_transformers(model, tmp_path / "out", image_size=32)))


def test__reference_checkpoint_comes_back_bit_by_bit(reference_checkpoint: Path, tmp_path: Path) -> None:
    model = load_released(reference_checkpoint)
    assert_equal(model, read_transformers(write_transformers(model, tmp_path / "out", image_size=8 * model.patch_size)))


def test__what_is_read_is_frozen_and_normalizes_as_before(model: CapiEncoder, tmp_path: Path) -> None:
    model.statistics = Statistics((0.1, 0.2, 1 / 3), (0.5, 0.6, 0.7))
    read = read_transformers(write_transformers(model, tmp_path / "a" / "b", image_size=32))
    assert read.statistics == model.statistics
    assert not read.training
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in read.parameters())


def test__half_precision_is_read_as_float32(model: CapiEncoder, tmp_path: Path) -> None:
    read = read_transformers(write_transformers(model.half(), tmp_path / "out", image_size=32))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    assert_equal(model.float(), read)


def test__a_folder_holds_three_files_alike(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test__the_core_install_is_enough() -> None:
    code = "import sys, capi.zoo.huggingface.files; print('transformers' in sys.modules, 'capi.config' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.split() == ["False", "False"]


def test__a_folder_with_something_in_it_is_kept(model: CapiEncoder, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CapiError, match=r"is not empty \(config.json lies there\)"):
        write_transformers(model, folder, image_size=64)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(CapiError, match=r"holds thesis.tex, which no export wrote"):
        write_transformers(model, folder, image_size=64, overwrite=True)
    assert before.items() <= {path.name: path.read_bytes() for path in folder.iterdir()}.items()
    with pytest.raises(CapiError, match="is a file"):
        write_transformers(model, folder / "config.json", image_size=64)


def test__overwriting_replaces_an_export_as_a_whole(model: CapiEncoder, folder: Path) -> None:
    torch.nn.init.normal_(model.encoder.registers)
    write_transformers(model, folder, image_size=64, overwrite=True)
    assert_equal(model, read_transformers(folder))
    assert json.loads((folder / "config.json").read_text())["image_size"] == 64
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test__an_empty_folder_is_filled(model: CapiEncoder, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert_equal(model, read_transformers(write_transformers(model, tmp_path / "out", image_size=32)))


@pytest.mark.parametrize("overwrite", [False, True])
def test__a_full_disk_leaves_all_as_it_was(
    model: CapiEncoder, folder: Path, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(state: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    place = folder if overwrite else folder.with_name("another")
    with pytest.raises(CapiError, match=r"cannot be written \(No space left on device\)"):
        write_transformers(model, place, image_size=32, overwrite=overwrite)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert_equal(model, read_transformers(folder))


@pytest.mark.parametrize(("size", "words"), [(30, "take 32"), (1, "take 4"), (0, "take 4"), (-8, "take 4")])
def test__image_sizes_that_patches_do_not_fill_are_refused(
    model: CapiEncoder, tmp_path: Path, size: int, words: str
) -> None:
    with pytest.raises(CapiError, match=f"an image size of {size} is no multiple of the model's patch size 4: {words}"):
        write_transformers(model, tmp_path / "out", image_size=size)
    assert not list(tmp_path.iterdir())


def test__statistics_of_another_number_of_channels_are_refused(model: CapiEncoder, tmp_path: Path) -> None:
    model.statistics = Statistics((0.5,), (0.5,))
    with pytest.raises(CapiError, match=r"image_mean \(0.5,\), expected a number for each of 3 channels"):
        write_transformers(model, tmp_path / "out", image_size=32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "vit"}, "has model_type 'vit': expected a folder of a CAPI model"),
        ({"model_type": ...}, "has model_type None"),
        ({"depth": ...}, 'lacks "depth"'),
        ({"depth": 3}, "has depth=3, but its weights have 2 blocks in the encoder"),
        ({"depth": 1}, 'has "model.encoder.blocks.1.attention.key.weight" and 7 more'),
        ({"mlp_width": 68}, '"model.encoder.blocks.0.mlp.expand.weight" of shape (64, 32), but config.json asks for'),
        ({"heads": 5}, "need a multiple of 4"),
        ({"image_mean": [0.5]}, "expected a number for each of 3 channels"),
        ({"image_std": [1, 1, 0]}, "expected a number above 0 for each of 3 channels"),
        ({"image_std": [1, 1, float("nan")]}, "expected a number above 0"),
        ({"image_std": ...}, "image_std None"),
        ({"image_size": "large"}, "an image size of 'large' is no whole number of pixels"),
        ({"image_size": [32, 32, 32]}, "an image size of [32, 32, 32] is no whole number"),
        ({"image_size": [32, 30]}, "an image size of 30 is no multiple of the model's patch size 4: take 32"),
        ({"image_size": 2**40}, "is too large: expected at most 16384 pixels"),
    ],
    ids=str,
)
def test__configs_that_do_not_fit_are_refused_by_name(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CapiError) as error:
        read_transformers(changed_config(folder, **changes))
    assert words in str(error.value)
    assert "heads" in changes or str(folder) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "null", '"capi"'])
def test__a_config_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CapiError, match=r"config.json (is not valid JSON|has model_type None|holds|is nested deeper)"):
        read_transformers(folder)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.encoder.registers", None, 'lacks "model.encoder.registers"'),
        ("registers", torch.ones(2), 'has "registers", which config.json beside it does not know'),
        ("model.predictor.mask_token", torch.ones(1, 7), '"model.predictor.mask_token" of shape (1, 7)'),
        ("model.predictor.mask_token", torch.ones(1, 48, dtype=torch.int64), "holds no real numbers"),
    ],
)
def test__weights_that_do_not_fit_are_refused_by_name(
    folder: Path, name: str, value: torch.Tensor | None, words: str
) -> None:
    with pytest.raises(CapiError) as error:
        read_transformers(changed_weights(folder, name, value))
    assert words in str(error.value)


def test__weights_that_are_cut_off_or_absent_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CapiError, match="cut off"):
        read_transformers(folder)
    weights.unlink()
    with pytest.raises(CapiError, match=r"has no model.safetensors"):
        read_transformers(folder)
