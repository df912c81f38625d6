from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.evals.datasets.csv import load_classification, load_segmentation
from capi.evals.tasks import DataOptions, LabeledImages
from tests.evals.datasets.layouts import build_csv


def table(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def named(part: LabeledImages, classes: tuple[str, ...]) -> dict[str, str]:
    return {part.images.name(i): classes[int(label)] for i, label in enumerate(part.labels)}


def test__a_table_names_files_relative_to_itself_in_sorted_order(tmp_path: Path) -> None:
    rows = ["split,file,label,kind", "train,p/b.png,cat,pet", "train,p/a.png,wolf,wild", "val,c.png,bear,wild"]
    path = table(tmp_path / "table.CSV", *rows)
    data = load_classification(path, DataOptions())
    assert data.classes == ("bear", "cat", "wolf")
    assert [data.train.images.name(i) for i in range(2)] == ["p/a.png", "p/b.png"]
    assert named(data.train, data.classes) == {"p/a.png": "wolf", "p/b.png": "cat"}
    assert data.train.images.read(0) == tmp_path / "p" / "a.png"
    assert data.tests["val"].answers.tolist() == [[0]]
    assert data.notes == ()
    kinds = load_classification(path, DataOptions(label="kind"))
    assert named(kinds.train, kinds.classes) == {"p/a.png": "wild", "p/b.png": "pet"}


def test__a_table_saved_by_a_spreadsheet_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes('\ufefffile,label,split\r\n"a, b.png",Bär,train\r\nc.png,Bär,val\r\n'.encode())
    data = load_classification(path, DataOptions())
    assert named(data.train, data.classes) == {"a, b.png": "Bär"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["fiel,label,split", "a.png,cat,val"], 'no column "file"; did you mean "fiel"'),
        (["file,labels,split", "a.png,cat,val"], 'no column "label"; did you mean "labels"'),
        (["file,label,spilt"], r'no column "split"; did you mean "spilt"\? \(it has file, label, spilt\)'),
        ([""], 'no column "file"'),
        (["file,label,split", "a.png,cat,train"], "neither test nor val, but train"),
        (["file,label,split", "a.png,cat,tran", "b.png,cat,val"], 'split "train"; did you mean "tran"'),
        (["file,split,label", "a.png,train,cat", "b.png,val"], 'nothing in the column "label" for b.png'),
        (["file,split,label", "a.png,train,cat", "a.png,val,cat"], "names a.png twice"),
    ],
)
def test__what_a_table_lacks_is_named(tmp_path: Path, rows: list[str], message: str) -> None:
    with pytest.raises(CapiError, match=message):
        load_classification(table(tmp_path / "table.csv", *rows), DataOptions())


def test__images_are_left_out_by_a_list_with_remarks(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", "file,label,split", "a.png,x,train", "b.png,x,train", "c.png,x,test")
    exclude = table(tmp_path / "out.txt", "# broken", "b.png")
    data = load_classification(path, DataOptions(exclude=exclude))
    assert named(data.train, data.classes) == {"a.png": "x"}
    assert data.notes == ("1 image left out by out.txt",)
    with pytest.raises(CapiError, match=r'names "d\.png", which is no image'):
        load_classification(path, DataOptions(exclude=table(tmp_path / "out.txt", "d.png")))


def test__labels_of_masks_are_found_and_void_is_a_class_until_it_is_ignored(tmp_path: Path) -> None:
    build_csv(tmp_path)
    data = load_segmentation(tmp_path / "table.csv", DataOptions())
    assert data.classes == {0: "0", 1: "1", 2: "2", 255: "255"}
    assert "say ignored=[255]" in data.notes[0]
    data = load_segmentation(tmp_path / "table.csv", DataOptions(ignored=frozenset({255})))
    assert data.classes == {0: "0", 1: "1", 2: "2"}
    assert data.ignored == {255}
    assert data.test_name == "test"
    assert data.notes == ()


def test__a_label_without_a_name_is_an_error_with_a_hint(tmp_path: Path) -> None:
    build_csv(tmp_path)
    names = ("ant", "bee", "cat")
    data = load_segmentation(tmp_path / "table.csv", DataOptions(class_names=names))
    with pytest.raises(CapiError, match=r"labels/1\.png holds the label 255, .*say ignored="):
        data.test.masks.read(1)
    data = load_segmentation(tmp_path / "table.csv", DataOptions(class_names=names, ignored=frozenset({0, 255})))
    assert data.classes == {1: "bee", 2: "cat"}
    assert set(data.test.masks.read(1).flatten().tolist()) == {1, 2, 255}


def test__missing_masks_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    build_csv(tmp_path)
    for name in ("4", "5"):
        (tmp_path / "labels" / f"{name}.png").unlink()
    with pytest.raises(CapiError, match=r"no mask for 2 of 18 images, the first is .*photos/4\.png"):
        load_segmentation(tmp_path / "table.csv", DataOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DataOptions(label="kind"), "label= means nothing for the segmentation"),
        (DataOptions(tests=("test", "other")), "tested on one split, but tests= names 2"),
        (DataOptions(ignored=frozenset({0, 1, 2, 255})), "no label of the masks counts"),
    ],
)
def test__options_that_make_no_segmentation_are_errors(tmp_path: Path, options: DataOptions, message: str) -> None:
    build_csv(tmp_path)
    with pytest.raises(CapiError, match=message):
        load_segmentation(tmp_path / "table.csv", options)


def test__options_about_masks_mean_nothing_for_classes(tmp_path: Path) -> None:
    build_csv(tmp_path)
    with pytest.raises(CapiError, match="class_names= means nothing for the classification"):
        load_classification(tmp_path / "table.csv", DataOptions(class_names=("a",)))


def test__a_table_without_splits_is_divided(tmp_path: Path) -> None:
    rows = [f"{kind}{number}.png,{kind},x" for kind in "ab" for number in range(10)]
    data = load_classification(table(tmp_path / "t.csv", "file,label,species", *rows), DataOptions())
    train = named(data.train, data.classes)
    assert sorted(train.values()) == ["a"] * 8 + ["b"] * 8
    assert all(name.startswith(kind) for name, kind in train.items())
    assert "t.csv names no splits: 4 of 20 images are tested on" in data.notes[0]
    with pytest.raises(CapiError, match='no column "split": add it, or leave out train='):
        load_classification(tmp_path / "t.csv", DataOptions(tests=("val",)))


def test__masks_of_a_table_without_splits_are_divided(tmp_path: Path) -> None:
    build_csv(tmp_path)
    lines = (tmp_path / "table.csv").read_text().splitlines()
    column = lines[0].split(",").index("split")
    without_split = [
        ",".join(cell for number, cell in enumerate(line.split(",")) if number != column) for line in lines
    ]
    data = load_segmentation(table(tmp_path / "table.csv", *without_split), DataOptions(test_share=0.5))
    assert abs(len(data.train.images) - len(data.test.images)) <= 1
    assert len(data.train.images) + len(data.test.images) == len(lines) - 1
