from pathlib import Path

import pytest
from PIL import Image

from capi.data import sources
from capi.data.demo import LabelledPhotos
from capi.data.sources import Encoded
from capi.errors import CapiError
from capi.evals.features import evaluation_images
from capi.evals.labelled import LabelledImages, labelled_split


def write_images(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(root / name)


def write_table(path: Path, *rows: str) -> str:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(path)


def named_classes(part: LabelledImages) -> dict[str, str]:
    """The class of each image, by name."""
    labels = part.labels.tolist()
    assert len(labels) == len(part.images)
    return {part.images.name(index): part.classes[label] for index, label in enumerate(labels)}


def test__folders_directly_under_a_split_are_classes(tmp_path: Path) -> None:
    write_images(tmp_path, "train/dog/1.png", "train/cat/deep/down/2.png", "train/cat/3.jpg", "val/dog/4.png")
    part = labelled_split(str(tmp_path), "train")
    assert named_classes(part) == {"cat/3.jpg": "cat", "cat/deep/down/2.png": "cat", "dog/1.png": "dog"}
    assert part.images.read(2) == tmp_path / "train" / "dog" / "1.png"


def test__a_class_folder_has_one_number_in_all_splits(tmp_path: Path) -> None:
    write_images(tmp_path, "train/bee/1.png", "train/cat/2.png", "val/ant/3.png", "val/cat/4.png", "val/.ape/5.png")
    train, val = (labelled_split(str(tmp_path), split) for split in ("train", "val"))
    assert train.classes == val.classes == ["ant", "bee", "cat"]
    assert train.labels.tolist() == [1, 2]
    assert val.labels.tolist() == [0, 2]


def test__a_folder_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path, *(f"train/cat/{number}.png" for number in range(5)))
    searched, search = [], sources._image_names
    monkeypatch.setattr(sources, "_image_names", lambda root: searched.append(root) or search(root))
    assert len(labelled_split(str(tmp_path), "train").images) == 5
    assert searched == [tmp_path / "train"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train/cat/1.png"], "there is no folder .*val"),
        (["val/1.png"], "no folder for each class"),
    ],
)
def test__folders_without_the_split_or_without_classes_are_errors(
    tmp_path: Path, names: list[str], message: str
) -> None:
    write_images(tmp_path, *names)
    with pytest.raises(CapiError, match=message):
        labelled_split(str(tmp_path), "val")


def test__a_table_names_files_relative_to_itself_in_sorted_order(tmp_path: Path) -> None:
    write_images(tmp_path, "photos/b.png", "photos/a.png", "c.png")
    table = write_table(
        tmp_path / "table.CSV",
        "split,file,label,kind",
        "train,photos/b.png,cat,pet",
        "train,photos/a.png,wolf,wild",
        "val,c.png,bear,wild",
    )
    train, val = (labelled_split(table, split) for split in ("train", "val"))
    assert [train.images.name(index) for index in range(2)] == ["photos/a.png", "photos/b.png"]
    assert named_classes(train) == {"photos/a.png": "wolf", "photos/b.png": "cat"}
    assert train.images.read(0) == tmp_path / "photos" / "a.png"
    assert train.classes == val.classes == ["bear", "cat", "wolf"]
    assert val.labels.tolist() == [0]
    assert named_classes(labelled_split(table, "train", "kind")) == {"photos/a.png": "wild", "photos/b.png": "pet"}


def test__a_table_saved_by_a_spreadsheet_is_read(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_bytes('\ufefffile,label,split\r\n"a, b.png",Bär,val\r\n'.encode())
    assert named_classes(labelled_split(str(table), "val")) == {"a, b.png": "Bär"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["fiel,label,split", "a.png,cat,val"], 'no column "file"; did you mean "fiel"'),
        (["file,labels,split", "a.png,cat,val"], 'no column "label"; did you mean "labels"'),
        (["file,label,spilt"], r'no column "split"; did you mean "spilt"\? \(it has file, label, spilt\)'),
        (["file,label", "a.png,cat,val"], 'no column "split" '),
        ([""], 'no column "file"'),
        (["file,label,split", "a.png,cat,train", "b.png,cat,test"], 'split "val", but of test, train'),
        (["file,split,label", "a.png,train,cat", "b.png,val"], 'nothing in the column "label" for b.png'),
    ],
)
def test__what_a_table_lacks_is_named(tmp_path: Path, rows: list[str], message: str) -> None:
    table = write_table(tmp_path / "table.csv", *rows)
    with pytest.raises(CapiError, match=message):
        labelled_split(table, "val")


def test__a_missing_table_and_a_missing_image_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match=r"there is no file .*absent\.csv"):
        labelled_split(str(tmp_path / "absent.csv"), "val")
    part = labelled_split(write_table(tmp_path / "table.csv", "file,label,split", "gone.png,cat,val"), "val")
    with pytest.raises(CapiError, match=r"gone\.png cannot be read"):
        evaluation_images(part.images, [0], (8, 8))


def test__the_built_in_photos_come_with_their_categories(monkeypatch: pytest.MonkeyPatch) -> None:
    def photos(split: str) -> LabelledPhotos:
        return LabelledPhotos(Encoded([f"{split}/1", f"{split}/2"], [b"one", b"two"]), [2, 0], ["ant", "bee", "cat"])

    monkeypatch.setattr("capi.evals.labelled.demo_photos", photos)
    part = labelled_split("demo", "val")
    assert named_classes(part) == {"val/1": "cat", "val/2": "ant"}
    assert part.images.read(1) == b"two"
    with pytest.raises(CapiError, match='no split "valid", but train, val, test'):
        labelled_split("demo", "valid")
