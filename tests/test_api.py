import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import capi
from capi.api import as_config, choose_device
from capi.config.schema import Config
from capi.evaluation import similar
from capi.models.features import CapiEncoder
from tests.conftest import REFERENCE


def test__load_gives_a_vision_encoder(reference_checkpoint: Path) -> None:
    for path in (reference_checkpoint, str(reference_checkpoint)):
        encoder = capi.load(path)
        assert isinstance(encoder, capi.VisionEncoder)
        assert (encoder.width, encoder.patch_size) == (64, 8)
        assert isinstance(encoder(torch.randn(1, 3, 16, 24)), capi.Features)


@pytest.mark.parametrize(
    "images",
    ["torch.randn(3, 16, 24)", "torch.zeros(1, 3, 16, 24, dtype=torch.uint8)", "torch.zeros(1, 3, 16, 24).double()"],
)
def test__images_of_another_kind_are_refused(images: str) -> None:
    """In a process of its own: here the annotations would speak first."""
    code = f"import torch, capi; capi.load('{REFERENCE / 'student.pth'}')({images})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "CapiError: images must be float32 of shape (batch, channels, height, width)" in result.stderr


def test__a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu").type == "cpu"
    for name in ("cuda:99", "toaster"):
        with pytest.raises(capi.CapiError, match="is not there"):
            choose_device(name)


def test__overrides_go_with_a_recipe(small_config: Config) -> None:
    assert as_config("tiny4", ["seed=5"]).seed == 5
    assert as_config(small_config) is small_config
    with pytest.raises(capi.CapiError, match="overrides go with a recipe"):
        as_config(small_config, ["seed=5"])


def test__evaluation_from_python_needs_no_files(
    class_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = capi.evaluate("pixels:4", "folder/knn", [f"data={class_folders}", "image_size=8"], device="cpu")
    assert done.record["scores"] == {"val": 1.0}
    assert done.record["device"] == "cpu"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [str, Path, lambda path: [path]])
def test__a_single_name_is_a_list_of_one(class_folders: Path, tmp_path: Path, given: Callable[[Path], Any]) -> None:
    options = [f"data={class_folders}", "image_size=8", "neighbours=[1]"]
    capi.evaluate("pixels:4", "folder/knn", options, out=tmp_path / "out", device="cpu")
    probe, images = tmp_path / "out" / "probe.safetensors", given(class_folders / "val")
    done = capi.predict("pixels:4", probe, images, out=tmp_path / "p", device="cpu")
    assert done.images == 6
    compared = capi.compare("pixels:4", "folder/knn", options, out=tmp_path / "cmp", device="cpu")
    assert (compared.models, len(compared.columns), compared.failed) == (("pixels:4",), 1, [])


def test__an_encoder_of_one_s_own_goes_all_the_way(
    model: CapiEncoder, class_folders: Path, mask_folders: Path, tmp_path: Path
) -> None:
    """As an object: no file ever names it."""
    model.train()
    options = [f"data={mask_folders}", "image_size=[8, 12]", "ignored=[255]"]
    out = tmp_path / "out"
    capi.evaluate(model, "masks/knn-segmentation", options, out=out, device="cpu")
    assert not model.training
    images = mask_folders / "images" / "val"
    assert capi.predict(model, out / "probe.safetensors", images, out=tmp_path / "p", device="cpu").images == 4
    file = tmp_path / "f.safetensors"
    made = capi.extract(model, class_folders, out=file, kinds="pooled", image_size=(8, 12), batch_size=5, device="cpu")
    assert made.images == 24
    image = class_folders / "val" / "bee" / "deep" / "1.jpg"
    with pytest.raises(capi.CapiError, match="does not say which model made it: name the model"):
        capi.nearest(file, image)
    found = capi.nearest(file, image, model=model, count=2, out=tmp_path / "new" / "sheet.webp")
    assert (found[0].name, found[0].itself) == ("val/bee/deep/1.jpg", True)
    assert (tmp_path / "new" / "sheet.webp").is_file()


def test__photos_of_the_demo_are_shown_whatever_their_split(
    tmp_path: Path, class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capi.extract("pixels:16", "demo", out=tmp_path / "f.safetensors", split="val", image_size=32, device="cpu")
    asked: list[Any] = []
    sheet = similar.similarity_sheet

    def watched(query: Path, matches: Any, images: Any, **options: Any) -> Any:
        asked.extend(images.name(match.number) == match.name for match in matches)
        return sheet(query, matches, images, **options)

    monkeypatch.setattr(similar, "similarity_sheet", watched)
    photo = class_folders / "train" / "ant" / "0.png"
    capi.nearest(tmp_path / "f.safetensors", photo, out=tmp_path / "x.png", device="cpu")
    assert asked == [True] * 10


def test__a_picture_that_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for name in ("x.txt", "x", "folder.png"):
        with pytest.raises(capi.CapiError, match="cannot be a picture"):
            capi.nearest(tmp_path / "nowhere", tmp_path / "nowhere.png", out=tmp_path / name)
