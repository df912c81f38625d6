import json
from pathlib import Path

import pytest
import torch

import capi
from capi.config.schema import Config
from capi.errors import CapiError
from capi.runtime.atomic import Output
from capi.zoo.encoders import open_capi_encoder
from capi.zoo.export import ExportFormat, ExportOptions, write_export
from tests.conftest import REFERENCE
from tests.zoo.test_weights import make_run

BACK: list[ExportFormat] = ["safetensors", "released", "transformers"]


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 24, 32)


def same(first: capi.VisionEncoder, second: capi.VisionEncoder, images: torch.Tensor) -> bool:
    """Bit for bit, all three features."""
    return all(torch.equal(ours, theirs) for ours, theirs in zip(first(images), second(images), strict=True))


@pytest.mark.parametrize("second", BACK)
@pytest.mark.parametrize("first", BACK)
def test__from_format_to_format_features_stay_bit_equal(
    small_config: Config, tmp_path: Path, images: torch.Tensor, first: ExportFormat, second: ExportFormat
) -> None:
    run = make_run(small_config, tmp_path / "run")
    once = write_export(run, Output(tmp_path / "once"), format=first).path
    twice = write_export(once, Output(tmp_path / "twice"), format=second).path
    assert same(open_capi_encoder(once), open_capi_encoder(run), images)
    assert same(open_capi_encoder(twice), open_capi_encoder(run), images)


@pytest.mark.parametrize("format", BACK)
def test__a_released_checkpoint_goes_into_every_format(tmp_path: Path, format: ExportFormat) -> None:
    images = torch.randn(1, 3, 64, 48)
    checkpoint = REFERENCE / "student.pth"
    done = write_export(checkpoint, Output(tmp_path / "out"), format=format)
    assert same(open_capi_encoder(done.path), open_capi_encoder(checkpoint), images)


def test__statistics_go_along_where_there_is_no_config(small_config: Config, tmp_path: Path) -> None:
    data = small_config.data.model_copy(update={"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)})
    run = make_run(small_config.model_copy(update={"data": data}), tmp_path / "run")
    folder = write_export(run, Output(tmp_path / "folder"), format="transformers").path
    file = write_export(folder, Output(tmp_path / "file"), format="safetensors").path
    assert open_capi_encoder(file).statistics == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        ("safetensors", ExportOptions(opset=18), "opset is an option of `format` onnx"),
        ("onnx", ExportOptions(image_size=224), "image_size is an option of `format` transformers"),
        ("transformers", ExportOptions(image_size=225), "multiple"),
        ("onnx", ExportOptions(opset=9), "opset"),
    ],
)
def test__what_does_not_go_together_is_refused(
    small_config: Config, tmp_path: Path, format: ExportFormat, options: ExportOptions, message: str
) -> None:
    run = make_run(small_config, tmp_path / "run")
    with pytest.raises(CapiError, match=message):
        write_export(run, Output(tmp_path / "out"), format=format, options=options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", BACK)
def test__nothing_is_replaced_unless_that_is_asked_for(
    small_config: Config, tmp_path: Path, format: ExportFormat
) -> None:
    run = make_run(small_config, tmp_path / "run")
    place = tmp_path / "out"
    write_export(run, Output(place), format=format)
    with pytest.raises(CapiError, match=r"is there already.*`overwrite=True`"):
        write_export(run, Output(place), format=format)
    assert write_export(run, Output(place, overwrite=True), format=format).path.exists()


def test__a_run_s_own_size_goes_to_transformers(small_config: Config, tmp_path: Path) -> None:
    run = make_run(small_config, tmp_path / "run")
    folder = write_export(run, Output(tmp_path / "out"), format="transformers").path
    height, width = small_config.data.height_and_width
    configs = [json.loads((folder / name).read_text()) for name in ("config.json", "preprocessor_config.json")]
    assert [configs[0]["image_size"], configs[1]["size"]] == [[height, width], {"height": height, "width": width}]
