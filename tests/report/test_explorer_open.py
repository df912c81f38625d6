from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import capi
from capi.config.files import parse_config
from capi.config.schema import Config
from capi.models.features import CapiEncoder
from capi.report.explorer import page


@pytest.fixture
def run(small_config: Config, tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (30, 36), "red").save(tmp_path / "images" / "red.png")
    tree = small_config.model_dump(mode="json")
    tree["optimization"] |= {"steps": 1, "student_temperature": 0.2}
    tree["masking"] |= {"kind": "random"}
    tree["run"] |= {"loggers": [], "report": False, "snapshots": 0}
    tree["data"] |= {"workers": 0}
    return capi.pretrain(parse_config(tree), data=tmp_path / "images", out=tmp_path / "run", device="cpu").path


def test__a_run_brings_prototypes_temperature_and_masks(run: Path) -> None:
    parts = page.run_parts(run)
    assert parts["prototypes"].weight.shape == (24, 32)
    assert parts["temperature"] == 0.2
    assert parts["masks"].kind == "random"


def test__a_file_brings_none(reference_checkpoint: Path) -> None:
    assert page.run_parts(reference_checkpoint) == {"prototypes": None}


def test__the_page_gets_what_is_known(run: Path, model: CapiEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict[str, Any] = {}

    def note(*arguments: Any, **named: Any) -> None:
        got.update(named, arguments=arguments)

    monkeypatch.setattr(page, "serve", note)
    capi.explore(run, device="cpu", size=64, port=1234)
    assert got["arguments"][0] == str(run)
    assert (got["size"], got["port"], got["host"], got["temperature"]) == (64, 1234, "127.0.0.1", 0.2)
    capi.explore(model, device="cpu")
    assert got["arguments"][0] == "CapiEncoder"
    assert got["prototypes"] is None
    assert torch.is_tensor(next(got["arguments"][1].parameters()))
