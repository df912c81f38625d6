from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import capi
from capi.models.features import CapiEncoder
from capi.report.pictures import matches as module


def test__evaluation_from_python_needs_no_files(
    class_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = capi.evaluate("pixels:4", "folder/knn", [f"data={class_folders}", "image_size=8"], device="cpu")
    assert done.record["scores"] == {"val": 1.0}
    assert done.record["device"] == "cpu"
    assert list(tmp_path.iterdir()) == []


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
    matches = capi.nearest(file, image, model=model, count=2, out=tmp_path / "new" / "sheet.webp")
    assert matches.left_out is not None
    assert matches.left_out.name == "val/bee/deep/1.jpg"
    assert len(matches) == 2
    assert "val/bee/deep/1.jpg" not in {match.name for match in matches}
    assert (tmp_path / "new" / "sheet.webp").is_file()


def test__a_file_of_features_runs_no_python_of_its_own_accord(
    class_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wrote the file chose the name in it; whoever gives the model has chosen it themselves."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("from capi.models.features import PixelEncoder\nmake = lambda: PixelEncoder(4)\n")
    capi.extract("own.py:make", class_folders, out="f.safetensors", image_size=8, device="cpu")
    Path("own.py").write_text("raise SystemExit('run')")
    image = class_folders / "val" / "bee" / "deep" / "1.jpg"
    with pytest.raises(capi.CapiError, match=r"says that own\.py:make made it, which is Python that would be run"):
        capi.nearest("f.safetensors", image, device="cpu")
    assert capi.nearest("f.safetensors", image, model="pixels:4", count=1, device="cpu").left_out is not None


def test__photos_of_the_demo_are_shown_whatever_their_split(
    tmp_path: Path, class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capi.extract("pixels:16", "demo", out=tmp_path / "f.safetensors", split="val", image_size=32, device="cpu")
    asked: list[Any] = []
    sheet = module.similarity_sheet

    def watched(query: Path, matches: Any, images: Any, **options: Any) -> Any:
        asked.extend(images.name(match.number) == match.name for match in matches)
        return sheet(query, matches, images, **options)

    monkeypatch.setattr(module, "similarity_sheet", watched)
    photo = class_folders / "train" / "ant" / "0.png"
    capi.nearest(tmp_path / "f.safetensors", photo, out=tmp_path / "x.png", device="cpu")
    assert asked == [True] * 10


def test__a_picture_that_cannot_be_written_is_reported_first(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for name in ("x.txt", "x", "folder.png"):
        with pytest.raises(capi.CapiError, match="cannot be a picture"):
            capi.nearest(tmp_path / "nowhere", tmp_path / "nowhere.png", out=tmp_path / name)


@pytest.mark.parametrize("given", [str, Path, lambda path: [path]])
def test__a_single_name_is_a_list_of_one(class_folders: Path, tmp_path: Path, given: Callable[[Path], Any]) -> None:
    options = [f"data={class_folders}", "image_size=8", "neighbors=[1]"]
    capi.evaluate("pixels:4", "folder/knn", options, out=tmp_path / "out", device="cpu")
    probe, images = tmp_path / "out" / "probe.safetensors", given(class_folders / "val")
    done = capi.predict("pixels:4", probe, images, out=tmp_path / "p", device="cpu")
    assert done.images == 6
    compared = capi.compare("pixels:4", "folder/knn", options, out=tmp_path / "cmp", device="cpu")
    assert (compared.models, len(compared.columns), compared.failed) == (("pixels:4",), 1, [])
