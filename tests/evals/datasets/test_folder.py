from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.evals.datasets.files import chosen_tests
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
        (["images/1.png", "masks/1.png"], DataOptions(), "holds images and masks, not a folder for each class"),
    ],
)
def test__what_a_folder_lacks_is_an_error(tmp_path: Path, names: list[str], options: DataOptions, message: str) -> None:
    with pytest.raises(CapiError, match=message):
        load(written(tmp_path, *names), options)


def test__where_there_is_no_split_at_all_the_layout_is_reported() -> None:
    with pytest.raises(CapiError, match="photos has no test, no val and no other split: `capi datasets show`"):
        chosen_tests((), DataOptions(), Path("photos"))


def test__a_link_that_leads_back_is_not_followed(tmp_path: Path) -> None:
    written(tmp_path, "train/cat/1.png", "test/cat/2.png")
    (tmp_path / "train" / "cat" / "again").symlink_to(tmp_path / "train")
    (tmp_path / "train" / "dog").symlink_to(tmp_path / "test" / "cat")
    data = load(tmp_path, DataOptions())
    assert [data.train.images.name(i) for i in range(len(data.train.images))] == ["cat/1.png", "dog/2.png"]


def of_kinds(count: int) -> list[str]:
    return [f"{kind}/{number}.png" for kind in ("cat", "dog", "emu") for number in range(count)]


def names_of(data: ClassificationData) -> tuple[set[str], set[str]]:
    train = {data.train.images.name(number) for number in range(len(data.train.images))}
    return train, set(named(data, "test"))


def test__class_folders_without_splits_are_divided_by_names_the_same_way_each_time(tmp_path: Path) -> None:
    first, second = (load(written(tmp_path / place, *of_kinds(20)), DataOptions()) for place in ("a", "b"))
    train, test = names_of(first)
    assert train | test == set(of_kinds(20))
    assert not train & test
    assert (train, test) == names_of(second)
    assert [sum(name.startswith(kind) for name in test) for kind in first.classes] == [4, 4, 4]
    # By an order of our own: the first twentieth of a sorted list would be one scene or one day.
    assert test != {f"{kind}/{number}.png" for kind in first.classes for number in range(4)}
    assert first.notes == (
        "a names no splits: 12 of 60 images are tested on, 20 % of each class by the hash of their names "
        "(test_share=0.2)",
    )


def test__an_image_that_is_added_moves_one_other_at_most(tmp_path: Path) -> None:
    root = written(tmp_path, *of_kinds(20))
    before = names_of(load(root, DataOptions()))[1]
    after = names_of(load(written(root, "cat/new.png"), DataOptions()))[1]
    assert len(before ^ after) <= 2


def test__the_share_is_what_is_asked_for_and_each_class_has_both_where_it_can(tmp_path: Path) -> None:
    written(tmp_path, *of_kinds(8), "fox/1.png", "fox/2.png", "gnu/1.png")
    data = load(tmp_path, DataOptions(test_share=0.5))
    tested = list(named(data, "test").values())
    assert [tested.count(kind) for kind in ("cat", "dog", "emu", "fox", "gnu")] == [4, 4, 4, 1, 0]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["train/cat/1.png", "val/cat/1.png"], DataOptions(test_share=0.1), "has train, val: leave it out"),
        (of_kinds(2), DataOptions(test_share=0.1, train="cat"), "leave one out"),
        (of_kinds(1), DataOptions(), "no image to test on is left of 3 images in 3 classes"),
        (of_kinds(2), DataOptions(tests=("tets",)), 'no folder "train"'),
    ],
)
def test__what_cannot_be_divided_is_an_error(
    tmp_path: Path, names: list[str], options: DataOptions, message: str
) -> None:
    with pytest.raises(CapiError, match=message):
        load(written(tmp_path, *names), options)
