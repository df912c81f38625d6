import json
from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.evals.datasets.inaturalist2021 import load
from capi.evals.tasks import ClassificationData, DataOptions
from tests.evals.datasets.layouts import build_inaturalist2021

SPECIES = ("00000_Animalia_bee", "00001_Plantae_oak", "00002_Animalia_ant")


def named(data: ClassificationData) -> dict[str, int]:
    return {data.train.images.name(index): int(label) for index, label in enumerate(data.train.labels)}


def test__annotations_and_folders_say_the_same(tmp_path: Path) -> None:
    options = build_inaturalist2021(tmp_path)
    annotated = load(tmp_path, options)
    assert annotated.classes == SPECIES
    assert named(annotated)["train_mini/00002_Animalia_ant/9.jpg"] == 2
    for path in tmp_path.glob("*.json"):
        path.unlink()
    folders = load(tmp_path, options)
    assert folders.classes == annotated.classes
    assert named(folders) == named(annotated)
    assert folders.train.images.fingerprint == annotated.train.images.fingerprint
    assert folders.tests["val"].answers.equal(annotated.tests["val"].answers)


def test__labels_come_from_the_annotations_not_from_the_folders(tmp_path: Path) -> None:
    options = build_inaturalist2021(tmp_path)
    content = json.loads((tmp_path / "train_mini.json").read_text())
    for entry in content["annotations"]:
        entry["category_id"] = 2 - entry["category_id"]
    (tmp_path / "train_mini.json").write_text(json.dumps(content))
    assert named(load(tmp_path, options))["train_mini/00002_Animalia_ant/9.jpg"] == 0


def test__the_whole_training_set_is_preferred_to_the_small_one(tmp_path: Path) -> None:
    build_inaturalist2021(tmp_path)
    (tmp_path / "train").symlink_to(tmp_path / "train_mini")
    data = load(tmp_path, DataOptions(verify_counts=False))
    assert data.train.images.name(0) == "train/00000_Animalia_bee/6.jpg"
    assert "12 images of train instead of the official 2686843" in data.notes
    data = load(tmp_path, DataOptions(verify_counts=False, train="train_mini"))
    assert data.train.images.name(0) == "train_mini/00000_Animalia_bee/6.jpg"
    with pytest.raises(CapiError, match='train or train_mini here, not "mini"; did you mean "train_mini"'):
        load(tmp_path, DataOptions(train="mini"))


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON"), ("{}", "format of the competition")])
def test__other_files_are_errors(tmp_path: Path, text: str, message: str) -> None:
    options = build_inaturalist2021(tmp_path)
    (tmp_path / "val.json").write_text(text)
    with pytest.raises(CapiError, match=message):
        load(tmp_path, options)


def test__annotations_without_images_are_an_error(tmp_path: Path) -> None:
    options = build_inaturalist2021(tmp_path)
    (tmp_path / "val").rename(tmp_path / "elsewhere")
    with pytest.raises(CapiError, match=r"val\.json names val/.*, which is not in"):
        load(tmp_path, options)
