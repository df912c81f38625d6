import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from capi.api.evaluation import evaluate
from capi.data.sources import find_images
from capi.errors import CapiError
from capi.evals import prediction as module
from capi.evals.features import Encoding
from capi.evals.fitted_probes import load_probe
from capi.evals.prediction import Prediction
from capi.models.features import PixelEncoder
from capi.report.predictions import Predicted, color_of, picture_names, write_predictions
from capi.runtime.atomic import Output
from tests.data.pictures import noise

Rows = list[dict[str, str]]


def rows(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    """Images of three classes that can hardly be distinguished, so that some answers are wrong."""
    for number in range(60):
        split, kind = ("val", number % 3) if number < 30 else ("train", number % 3)
        path = tmp_path / "noisy" / split / "abc"[kind] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = noise(8, 8, 3, seed=number) // 2 + 20 * kind
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return tmp_path / "noisy"


def label(probe: Path, images: list[Path], out: Path, patch_size: int = 4, **options: Any) -> Predicted:
    encoding = Encoding(batch_size=options.pop("batch_size", 7), workers=options.pop("workers", 0))
    prediction = Prediction(PixelEncoder(patch_size), load_probe(probe), find_images(images), encoding)
    return write_predictions(prediction, Output(out, **options))


@pytest.mark.parametrize("protocol", ["knn", "linear", "attentive"])
def test__labels_are_those_that_the_evaluation_was_scored_by(noisy: Path, tmp_path: Path, protocol: str) -> None:
    few = ["neighbors=[5]"] if protocol == "knn" else ["iterations=30", "learning_rates=[0.01]"]
    done = evaluate("pixels:4", f"folder/{protocol}", [f"data={noisy}", "image_size=8", *few], out=tmp_path / "out")
    labeled = label(tmp_path / "out" / "probe.safetensors", [noisy / "val"], tmp_path / "labels")
    assert labeled == Predicted(tmp_path / "labels", 30, {})
    assert [path.name for path in labeled.folder.iterdir()] == ["labels.csv"]
    table = rows(labeled.folder / "labels.csv")
    assert [row["file"] for row in table] == sorted(f"{'abc'[number % 3]}/{number}.png" for number in range(30))
    right = sum(row["label"] == row["file"][0] for row in table)
    assert right / 30 == done.record["scores"]["val"]
    assert 0.2 < right / 30 < 1
    assert all(1 / 3 <= float(row["confidence"]) <= 1 for row in table)
    assert len({row["confidence"] for row in table}) > 2


@pytest.fixture
def classifier(noisy: Path, tmp_path: Path) -> Path:
    evaluate("pixels:4", "folder/knn", [f"data={noisy}", "image_size=8", "neighbors=[3]"], out=tmp_path / "knn")
    return tmp_path / "knn" / "probe.safetensors"


@pytest.fixture
def segmenter(mask_folders: Path, tmp_path: Path) -> Path:
    options = [f"data={mask_folders}", "image_size=8", "ignored=[255]", "neighbors=[1]", "distances=[l2]"]
    evaluate("pixels:4", "masks/knn-segmentation", options, out=tmp_path / "masks")
    return tmp_path / "masks" / "probe.safetensors"


def test__batches_and_workers_change_nothing(classifier: Path, noisy: Path, tmp_path: Path) -> None:
    tables = [
        rows(
            label(classifier, [noisy / "val"], tmp_path / str(size), batch_size=size, workers=workers).folder
            / "labels.csv"
        )
        for size, workers in ((1, 0), (64, 0), (7, 1))
    ]
    assert tables[0] == tables[1] == tables[2]


def test__a_broken_image_is_listed_and_the_rest_is_labeled(classifier: Path, noisy: Path, tmp_path: Path) -> None:
    folder = noisy / "val"
    whole = rows(label(classifier, [folder], tmp_path / "whole").folder / "labels.csv")
    (folder / "b" / "broken.png").write_bytes((folder / "a" / "0.png").read_bytes()[:50])
    (folder / "no image.jpg").write_text("text")
    labeled = label(classifier, [folder], tmp_path / "rest")
    assert labeled.images == 30
    assert rows(tmp_path / "rest" / "labels.csv") == whole
    listed = rows(tmp_path / "rest" / "failed.csv")
    assert [row["file"] for row in listed] == ["b/broken.png", "no image.jpg"]
    # As in the terminal, without the place on this machine.
    assert {row["file"]: row["reason"] for row in listed} == {
        name: reason.replace(f"{(folder / name).parent}/", "") for name, reason in labeled.failed.items()
    }
    assert all("cannot be read" in row["reason"] for row in listed)
    # Once they are mended, nothing is said of them any more.
    for name in ("b/broken.png", "no image.jpg"):
        (folder / name).unlink()
    label(classifier, [folder], tmp_path / "rest", overwrite=True)
    assert not (tmp_path / "rest" / "failed.csv").exists()


def test__masks_and_overlays_have_the_size_of_the_photo(segmenter: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    (photos / "nested").mkdir(parents=True)
    sizes = {"a.jpg": (31, 17), "nested/b é.PNG": (8, 24), "c.tif": (9, 9)}
    for name, size in sizes.items():
        Image.fromarray(noise(size[1], size[0], 3, seed=size[0])).save(photos / name)
    Image.fromarray(noise(12, 10, seed=3)).save(photos / "grey.png")
    Image.fromarray(noise(12, 10, dtype=np.uint16, seed=3)).save(photos / "deep.png")
    turned = Image.fromarray(noise(10, 20, 3, seed=4))
    turned.getexif()[274] = 6
    turned.save(photos / "turned.jpg", exif=turned.getexif())
    sizes |= {"grey.png": (10, 12), "deep.png": (10, 12), "turned.jpg": (10, 20)}
    labeled = label(segmenter, [photos], tmp_path / "out")
    assert (labeled.images, labeled.failed) == (6, {})
    for name, size in sizes.items():
        for kind, mode in (("labels", "P"), ("overlays", "RGB")):
            with Image.open(tmp_path / "out" / kind / Path(name).with_suffix(".png")) as picture:
                assert (picture.size, picture.mode) == (size, mode), name
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "classes.csv",
        "labels",
        "legend.png",
        "overlays",
    ]
    # Ignored labels have a vote by default, and what they win is named.
    assert [row["class"] for row in rows(tmp_path / "out" / "classes.csv")] == ["0", "1", "2", "ignored"]
    assert not list((tmp_path / "out").rglob("*.partial"))


def test__masks_are_those_that_the_evaluation_was_scored_by(mask_folders: Path, tmp_path: Path) -> None:
    """One patch an image: no training patch has the halves of a test image, so that half of the pixels are wrong."""
    options = [f"data={mask_folders}", "image_size=8", "ignored=[255]"]
    scores = evaluate("pixels:8", "masks/knn-segmentation", options, out=tmp_path / "masks").record["scores"]
    label(tmp_path / "masks" / "probe.safetensors", [mask_folders / "images" / "val"], tmp_path / "out", patch_size=8)
    right = total = 0
    for path in (mask_folders / "masks" / "val").rglob("*.png"):
        truth = np.asarray(Image.open(path))
        pixels = np.asarray(Image.open(tmp_path / "out" / "labels" / path.relative_to(mask_folders / "masks" / "val")))
        right += int((truth == pixels)[truth != 255].sum())
        total += int((truth != 255).sum())
    assert right / total == scores["val pixel accuracy"]
    assert 0.1 < right / total < 0.9


def test__an_overlay_is_the_photo_under_the_colors_of_the_legend(segmenter: Path, tmp_path: Path) -> None:
    photo = np.full((8, 8, 3), 200, np.uint8)
    Image.fromarray(photo).save(tmp_path / "x.png")
    label(segmenter, [tmp_path / "x.png"], tmp_path / "out")
    labels = np.asarray(Image.open(tmp_path / "out" / "labels" / "x.png"))
    shown = np.asarray(Image.open(tmp_path / "out" / "overlays" / "x.png")).astype(float)
    colors = np.array([(255, 255, 255) if value == 255 else color_of(int(value)) for value in labels.flatten()])
    np.testing.assert_allclose(shown.reshape(-1, 3), 0.45 * 200 + 0.55 * colors, atol=1)
    with Image.open(tmp_path / "out" / "legend.png") as legend:
        colors_shown = {color for _, color in legend.convert("RGB").getcolors(2**20)}
    assert {color_of(value) for value in (0, 1, 2)} <= colors_shown


def test__images_that_differ_in_their_ending_alone_get_pictures_of_their_own(segmenter: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, size in (("a.png", 8), ("a.bmp", 12), ("b.png", 8)):
        Image.fromarray(noise(size, size, 3)).save(tmp_path / "in" / name)
    label(segmenter, [tmp_path / "in"], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out" / "labels").iterdir()) == [
        "a.bmp.png",
        "a.png.png",
        "b.png.png",
    ]
    assert picture_names(find_images([tmp_path / "in" / "a.bmp", tmp_path / "in" / "b.png"])) == ["a.png", "b.png"]


def test__a_name_that_is_no_text_stays_what_it_is(classifier: Path, tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "odd")
    os.mkdir(folder)
    name = b"\xff photo.png"
    with open(os.path.join(folder, name), "wb") as file:
        Image.new("RGB", (8, 8)).save(file, "PNG")
    label(classifier, [tmp_path / "odd"], tmp_path / "out")
    assert [os.fsencode(row["file"]) for row in rows(tmp_path / "out" / "labels.csv")] == [name]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["nowhere"], "there is no image or folder"),
        (["text.txt"], "is no image: expected a file that ends in .jpg"),
        (["empty"], "holds no images"),
        (["a.png", "in/a.png"], 'two of the images are called "a.png": label them one folder at a time'),
        (["in", "other/in"], 'two of the images are called "in/a.png"'),
        (["in", "in"], 'two of the images are called "in/a.png"'),
        ([], "there are no images to label"),
    ],
)
def test__places_without_images_are_refused_before_anything_is_written(
    classifier: Path, tmp_path: Path, places: list[str], message: str
) -> None:
    for name in ("a.png", "in/a.png", "other/in/a.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(CapiError) as caught:
        label(classifier, [tmp_path / place for place in places], tmp_path / "out")
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test__what_is_in_the_folder_is_kept_unless_asked(classifier: Path, noisy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("")
    with pytest.raises(CapiError, match="is not empty: choose another `out`, or give `overwrite=True`"):
        label(classifier, [noisy / "val"], out)
    label(classifier, [noisy / "val"], out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["labels.csv", "mine.txt"]
    for place, message in ((out / "mine.txt", "is a file"), (out / "mine.txt" / "x", "cannot be written")):
        with pytest.raises(CapiError, match=message):
            label(classifier, [noisy / "val"], place, overwrite=True)


def test__an_interruption_leaves_no_half_table(
    classifier: Path, noisy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label(classifier, [noisy / "val"], tmp_path / "out")
    before = (tmp_path / "out" / "labels.csv").read_bytes()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "encode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        label(classifier, [noisy / "val"], tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "labels.csv").read_bytes() == before
