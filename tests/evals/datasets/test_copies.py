"""Photos that lie in training and in a test."""

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capi.data.sources import EncodedImages, Files
from capi.evals.datasets import copies as copies_module
from capi.evals.datasets import load_classification, load_segmentation
from capi.evals.datasets.copies import copies
from capi.evals.tasks import DataOptions
from tests.evals.datasets.layouts import build_csv, build_folder, build_masks


def written(root: Path, **contents: bytes) -> Files:
    root.mkdir()
    for name, content in contents.items():
        (root / name).write_bytes(content)
    return Files(root, sorted(contents))


def test__files_with_the_same_bytes_are_found_under_any_name(tmp_path: Path) -> None:
    long = bytes(range(256)) * 64
    train = written(tmp_path / "train", a=b"one", b=long, c=b"one", d=b"two", e=b"end" + long[3:])
    test = written(tmp_path / "test", v=b"four", w=long, x=b"one", y=long[:-1] + b"!", z=b"!" + long[1:])
    assert copies(test, train) == {
        tmp_path / "test" / "w": tmp_path / "train" / "b",
        tmp_path / "test" / "x": tmp_path / "train" / "a",
    }


def test__the_comparison_agrees_with_comparing_all_pairs(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    contents = [bytes(random.integers(0, 2, int(random.integers(1, 6)), dtype=np.uint8)) for _ in range(120)]
    train = written(tmp_path / "train", **{f"{number:03}": content for number, content in enumerate(contents[:60])})
    test = written(tmp_path / "test", **{f"{number:03}": content for number, content in enumerate(contents[60:])})
    slow = {}
    for path in sorted(test.root.iterdir()):
        equal = [other for other in sorted(train.root.iterdir()) if other.read_bytes() == path.read_bytes()]
        if equal:
            slow[path] = equal[0]
    assert slow
    assert list(copies(test, train).items()) == list(slow.items())


def test__only_files_of_equal_size_are_opened_and_few_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, whole = [], []
    end, digest = copies_module._end, copies_module._digest
    monkeypatch.setattr(copies_module, "_end", lambda path: opened.append(path.name) or end(path))
    monkeypatch.setattr(copies_module, "_digest", lambda path: whole.append(path.name) or digest(path))
    train = written(tmp_path / "train", a=b"one", b=b"three", c=b"x" * 9)
    test = written(tmp_path / "test", d=b"two", e=b"seven", f=b"three", g=b"longest")
    assert len(copies(test, train)) == 1
    assert sorted(opened) == ["a", "b", "d", "e", "f"]
    assert sorted(whole) == ["b", "f"]


def test__what_is_no_file_or_cannot_be_read_is_left_to_others(tmp_path: Path) -> None:
    train = written(tmp_path / "train", a=b"one")
    assert copies(EncodedImages(["a"], [b"one"]), train) == {}
    assert copies(Files(tmp_path, ["missing", "train/a"]), train) == {
        tmp_path / "train" / "a": tmp_path / "train" / "a"
    }


def test__a_photo_in_both_splits_of_a_folder_is_noted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_folder(tmp_path)
    assert load_classification("folder", tmp_path, DataOptions()).notes == ()
    copied, linked = tmp_path / "val" / "bee" / "copy.png", tmp_path / "val" / "cat" / "link.png"
    shutil.copy(tmp_path / "train" / "ant" / "3.png", copied)
    os.symlink(tmp_path / "train" / "cat" / "0.png", linked)
    monkeypatch.setattr(logging.getLogger("capi"), "propagate", True)
    (note,) = load_classification("folder", tmp_path, DataOptions()).notes
    assert note.startswith("2 of 8 val images are also training images (the same bytes), for example ")
    assert "for example val/bee/copy.png and train/ant/3.png: " in note
    load_classification("folder", tmp_path, DataOptions())
    assert [record.getMessage() for record in caplog.records] == [note]


def test__a_photo_that_was_encoded_again_is_not_found(tmp_path: Path) -> None:
    build_folder(tmp_path)
    with Image.open(tmp_path / "train" / "ant" / "3.png") as image:
        image.save(tmp_path / "val" / "bee" / "copy.bmp")
    assert load_classification("folder", tmp_path, DataOptions()).notes == ()


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test__rows_of_a_csv_are_compared(tmp_path: Path, task: str) -> None:
    build_csv(tmp_path)
    with (tmp_path / "table.csv").open() as file:
        head, *rows = file.read().splitlines()
    split = head.split(",").index("split")
    moved = next(row for row in rows if row.split(",")[split] == "train").split(",")
    name = moved[0]
    shutil.copy(tmp_path / name, tmp_path / "other.jpg")
    test = next(row.split(",")[split] for row in rows if row.split(",")[split] != "train")
    moved[0], moved[split] = "other.jpg", test
    (tmp_path / "table.csv").write_text("\n".join([head, *rows, ",".join(moved)]) + "\n")
    load = load_classification if task == "classification" else load_segmentation
    notes = load("csv", tmp_path / "table.csv", DataOptions(tests=(test,))).notes
    assert any(f"for example other.jpg and {name}: scores" in note for note in notes)


def test__a_photo_in_both_splits_of_masked_images_is_noted(tmp_path: Path) -> None:
    build_masks(tmp_path)
    assert not any("also training" in note for note in load_segmentation("masks", tmp_path, DataOptions()).notes)
    train = sorted(path for path in (tmp_path / "images" / "train").rglob("*") if path.is_file())[0]
    mask = next(path for path in (tmp_path / "masks" / "train").rglob("*") if path.stem == train.stem)
    shutil.copy(train, tmp_path / "images" / "val" / f"copy{train.suffix}")
    shutil.copy(mask, tmp_path / "masks" / "val" / "copy.png")
    notes = load_segmentation("masks", tmp_path, DataOptions()).notes
    assert any(note.startswith("1 of 5 val images are also training images") for note in notes)
