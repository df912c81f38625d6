from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.evals.datasets.folder import load
from capi.evals.tasks import ClassificationData, DataOptions
from tests.evals.datasets.layouts import Tree


def written(root: Path, *names: str) -> Path:
    tree = Tree()
    for name in names:
        tree.photo(name, 0)
    tree.write(root)
    return root


def named(data: ClassificationData, test: str) -> dict[str, str]:
    part = data.tests[test]
    return {part.images.name(i): data.classes[int(row[0])] for i, row in enumerate(part.answers)}


def test__folders_directly_under_a_split_are_classes(tmp_path: Path) -> None:
    names = ["train/dog/1.png", "train/cat/deep/down/2.png", "train/cat/3.jpg", "val/dog/4.png", "val/.ape/5.png"]
    data = load(written(tmp_path, *names), DataOptions())
    assert data.classes == ("cat", "dog")
    assert [data.train.images.name(i) for i in range(3)] == ["cat/3.jpg", "cat/deep/down/2.png", "dog/1.png"]
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.train.images.read(2) == tmp_path / "train" / "dog" / "1.png"
    assert named(data, "val") == {"dog/4.png": "dog"}
    assert data.notes == ()


def test__test_is_preferred_to_val_and_others_are_named(tmp_path: Path) -> None:
    written(tmp_path, *(f"{split}/{kind}/1.png" for split in ("train", "val", "test", "new") for kind in "ab"))
    assert list(load(tmp_path, DataOptions()).tests) == ["test"]
    data = load(tmp_path, DataOptions(train="val", tests=("new", "test")))
    assert list(data.tests) == ["new", "test"]
    assert data.train.images.read(0) == tmp_path / "val" / "a" / "1.png"


def test__a_class_that_only_test_images_have_keeps_a_number(tmp_path: Path) -> None:
    data = load(written(tmp_path, "train/bee/1.png", "train/cat/2.png", "test/ant/3.png"), DataOptions())
    assert data.classes == ("ant", "bee", "cat")
    assert data.train.labels.tolist() == [1, 2]
    assert data.tests["test"].answers.tolist() == [[0]]
    # The warning of the outcome tells it.
    assert data.notes == ()


def test__an_image_beside_the_class_folders_is_an_error_that_names_it(tmp_path: Path) -> None:
    written(tmp_path, "train/cat/1.png", "train/stray.png", "test/cat/1.png")
    with pytest.raises(CapiError, match=r"stray\.png lies beside the class folders"):
        load(tmp_path, DataOptions())


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["train/cat/1.png"], DataOptions(), "neither test nor val, but train"),
        (["train/cat/1.png", "tets/cat/1.png"], DataOptions(tests=("test",)), 'no folder "test"; did you mean "tets"'),
        (["test/cat/1.png"], DataOptions(), 'no folder "train"'),
        (["train/cat/1.png", "test/1.png"], DataOptions(), "no folder for each class"),
        (["train/cat/1.png", "test/cat/.1.png"], DataOptions(), "test holds no images"),
        (["train/cat/1.png"], DataOptions(tests=("train",)), "both trained and tested on"),
        (["train/cat/1.png"], DataOptions(tests=()), "names no split"),
    ],
)
def test__what_a_folder_lacks_is_an_error(tmp_path: Path, names: list[str], options: DataOptions, message: str) -> None:
    with pytest.raises(CapiError, match=message):
        load(written(tmp_path, *names), options)


def test__a_link_that_leads_back_is_not_followed(tmp_path: Path) -> None:
    written(tmp_path, "train/cat/1.png", "test/cat/2.png")
    (tmp_path / "train" / "cat" / "again").symlink_to(tmp_path / "train")
    (tmp_path / "train" / "dog").symlink_to(tmp_path / "test" / "cat")
    data = load(tmp_path, DataOptions())
    assert [data.train.images.name(i) for i in range(len(data.train.images))] == ["cat/1.png", "dog/2.png"]
