from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.evals.datasets.imagenet22k import every_so_many, load
from capi.evals.tasks import DataOptions
from tests.evals.datasets.layouts import build_imagenet22k


def test__a_list_says_what_is_tested_on(tmp_path: Path) -> None:
    data = load(tmp_path, build_imagenet22k(tmp_path))
    assert data.classes == ("n00000001", "n00000002", "n00000003")
    test = data.tests["test"].images
    assert [test.name(index) for index in range(2)] == ["n00000001/n00000001_0.JPEG", "n00000001/n00000001_5.JPEG"]
    assert (len(data.train.images), len(test)) == (12, 6)
    assert any("tested on the images of test.txt" in note for note in data.notes)


def test__otherwise_every_fiftieth_image_of_a_class_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(f"{kind}/{number:03d}", kind) for kind, count in [("a", 49), ("b", 149)] for number in range(count)]
    assert every_so_many(rows) == {"b/049", "b/099"}
    build_imagenet22k(tmp_path)
    with pytest.raises(CapiError, match="18 images to train on and 0 to test on"):
        load(tmp_path, DataOptions(verify_counts=False))
    monkeypatch.setattr("capi.evals.datasets.imagenet22k.EVERY", 3)
    data = load(tmp_path, DataOptions(verify_counts=False))
    assert data.tests["test"].images.name(0) == "n00000001/n00000001_2.JPEG"
    assert data.tests["test"].answers.flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert any("every 3th image" in note for note in data.notes)


def test__unknown_names_and_folders_are_errors(tmp_path: Path) -> None:
    options = build_imagenet22k(tmp_path)
    (tmp_path / "lists" / "test.txt").write_text("n00000001/no.JPEG\n")
    with pytest.raises(CapiError, match=r"names n00000001/no\.JPEG, which is not there"):
        load(tmp_path, options)
    (tmp_path / "n00000001").rename(tmp_path / "cat")
    with pytest.raises(CapiError, match='"cat" is no WordNet id'):
        load(tmp_path, options)
