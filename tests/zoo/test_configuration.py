"""The config of a model as the library keeps it."""

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from capi.errors import CapiError
from capi.huggingface import CapiConfig
from capi.models.architecture import architecture_of
from capi.models.features import CapiEncoder


def test__the_library_reads_and_writes_what_we_write(model: CapiEncoder, folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, CapiConfig)
    assert config.architecture() == architecture_of(model)
    assert config.statistics() == model.statistics
    config.save_pretrained(tmp_path / "saved")
    ours = json.loads((folder / "config.json").read_text())
    theirs = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert ours.items() <= theirs.items()
    assert theirs.keys() - ours.keys() == {"transformers_version"}


def test__defaults_are_written_out_too(tmp_path: Path) -> None:
    CapiConfig().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["width"] == 1024


def test__usual_names_are_known(model: CapiEncoder) -> None:
    config = CapiConfig.from_encoder(model, image_size=32)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 2, 2)
    assert (config.num_channels, config.intermediate_size, config.num_register_tokens) == (3, 64, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_size": 225}, "an image size of 225 is no multiple of the model's patch size 14: take 224"),
        ({"image_size": "large"}, "'large' is no whole number"),
        ({"positions": "sideways"}, "\"positions\": 'sideways', expected one of axial"),
        ({"hidden_size": 3.5}, '"width": 3.5, expected a whole number'),
        ({"image_std": [1.0, 2.0]}, "expected a number above 0 for each of 3 channels"),
    ],
    ids=str,
)
def test__impossible_values_are_refused_by_name(changes: dict, words: str) -> None:
    with pytest.raises(CapiError) as error:
        CapiConfig(**changes)
    assert words in str(error.value)


def test__without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "capi.huggingface")
    with pytest.raises(CapiError, match=r"pip install 'capi\[transformers\]'"):
        import capi.huggingface  # noqa: F401
