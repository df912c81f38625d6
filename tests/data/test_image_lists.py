from pathlib import Path

import pytest
from PIL import Image

from capi.data.locations import ListedImages, list_images
from capi.data.sources import demo_photos
from capi.errors import CapiError


def names(listed: ListedImages) -> list[str]:
    return [listed.images.name(number) for number in range(len(listed.images))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("val/b.png", "val/a é.png", "train/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    return tmp_path


@pytest.fixture
def table(folder: Path) -> Path:
    path = folder / "Table.CSV"
    path.write_text(
        "split,file,label,breed\nval,val/b.png,dog,x\nval,val/a é.png,cat,y\ntrain,train/c.png,dog\n", "utf-8"
    )
    return path


def test__folders_that_are_splits_are_no_labels(folder: Path) -> None:
    assert names(list_images(str(folder))) == ["train/c.png", "val/a é.png", "val/b.png"]
    assert list_images(str(folder)).labels is None


def test__a_split_of_a_folder_is_a_folder_in_it(folder: Path) -> None:
    assert names(list_images(str(folder), "val")) == ["a é.png", "b.png"]


def test__a_csv_is_sorted_by_file_and_read_from_its_own_folder(table: Path) -> None:
    listed = list_images(str(table))
    assert names(listed) == ["train/c.png", "val/a é.png", "val/b.png"]
    assert listed.labels == ["dog", "cat", "dog"]
    assert all(Path(str(listed.images.read(number))).is_file() for number in range(3))


def test__a_csv_has_splits_and_columns_of_labels(table: Path) -> None:
    listed = list_images(str(table), "val", "breed")
    assert (names(listed), listed.labels) == (["val/a é.png", "val/b.png"], ["y", "x"])
    # A row that ends early has an empty label.
    assert list_images(str(table), "train", "breed").labels == [""]


def test__a_csv_needs_no_labels(folder: Path) -> None:
    (folder / "files.csv").write_bytes("\ufefffile\nval/b.png\n".encode())
    listed = list_images(str(folder / "files.csv"))
    assert (names(listed), listed.labels) == (["val/b.png"], None)


def test__the_built_in_photos_have_categories() -> None:
    listed, photos = list_images("demo", "val"), demo_photos("val")
    assert listed.labels == [photos.categories[label] for label in photos.labels]
    assert len(listed.images) == len(photos.labels)
    assert len(list_images("demo").images) == len(demo_photos("train").labels)


@pytest.mark.parametrize(
    ("data", "split", "label", "message"),
    [
        ("nowhere", None, "label", "there is no folder nowhere"),
        ("nowhere.csv", None, "label", "there is no file nowhere.csv: expected a folder of images, a CSV"),
        ("FOLDER", "vall", "label", "vall"),
        ("TABLE", "vall", "label", 'lists no images of the split "vall"'),
        ("TABLE", None, "bred", 'has no column "bred"; did you mean "breed"?'),
        ("SMALL", None, "label", 'has no column "file"; did you mean "files"? (it has files)'),
        ("LIST", "val", "label", 'has no column "split"'),
        ("EMPTY", None, "label", 'has no column "file"'),
        ("HEAD", None, "label", "lists no images"),
        ("LATIN", None, "label", "cannot be read as a CSV in UTF-8"),
        ("demo", "vall", "label", 'have no split "vall"; did you mean "val"?'),
    ],
)
def test__what_lists_no_images_is_reported(
    folder: Path, table: Path, data: str, split: str | None, label: str, message: str
) -> None:
    written = {
        "SMALL": b"files\na\n",
        "LIST": b"file\na\n",
        "EMPTY": b"",
        "HEAD": b"file\n",
        "LATIN": b"file\n\xe9.png\n",
    }
    for name, content in written.items():
        (folder / f"{name}.csv").write_bytes(content)
    places = {"FOLDER": folder, "TABLE": table} | {name: folder / f"{name}.csv" for name in written}
    with pytest.raises(CapiError) as caught:
        list_images(str(places.get(data, data)), split, label)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["cat/1.png", "cat/2.png", "dog/1.png"], ["cat", "cat", "dog"]),
        (["cat/1.png", "dog/deep/1.png"], None),
        (["cat/1.png", "dog/1.png", "2.png"], None),
        (["cat/1.png", "cat/2.png"], None),
        (["1.png", "2.png"], None),
        (["train/cat/1.png", "train/dog/1.png"], None),
        (["train/1.png", "val/1.png"], None),
        (["train/1.png", "bus/1.png"], ["bus", "train"]),
    ],
)
def test__folders_one_deep_are_labels_where_there_are_several(
    tmp_path: Path, names: list[str], labels: list[str] | None
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    assert list_images(str(tmp_path)).labels == labels
