from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.evals.datasets.masks import load
from capi.evals.tasks import DataOptions
from tests.evals.datasets.layouts import Tree, build_masks, halves


def small(root: Path, *test_labels: int) -> Path:
    tree = Tree()
    tree.scene("images/train/a.jpg", "masks/train/a.png", halves(0, 1))
    tree.scene("images/val/b.jpg", "masks/val/b.png", halves(*test_labels))
    tree.write(root)
    return root


def test__images_and_masks_are_matched_by_name_in_any_folder(tmp_path: Path) -> None:
    data = load(tmp_path, build_masks(tmp_path))
    assert data.classes == {0: "0", 1: "1", 2: "2"}
    assert data.test_name == "val"
    names = [(data.test.images.name(i), data.test.masks.name(i)) for i in range(4)]
    assert names[0] == ("town 0/0.png", "town 0/0.png")
    assert (data.train.images.name(0), data.train.masks.name(0)) == ("town 0/0.jpg", "town 0/0.png")
    assert data.train.masks.read(1)[0, 0] == 1  # town 0/10


def test__a_label_that_only_test_masks_have_stays_a_class(tmp_path: Path) -> None:
    data = load(small(tmp_path, 0, 7), DataOptions())
    assert data.classes == {0: "0", 1: "1", 7: "7"}
    assert data.notes == ()


def test__names_are_given_to_labels_from_zero(tmp_path: Path) -> None:
    data = load(small(tmp_path, 0, 1), DataOptions(class_names=("sky", "sea", "sand")))
    assert data.classes == {0: "sky", 1: "sea", 2: "sand"}
    data = load(small(tmp_path, 0, 3), DataOptions(class_names=("sky", "sea", "sand")))
    with pytest.raises(CapiError, match=r"b\.png holds the label 3, which is neither a class nor ignored.*ignored="):
        data.test.masks.read(0)


def test__an_image_without_a_mask_is_an_error_and_a_mask_without_an_image_a_note(tmp_path: Path) -> None:
    small(tmp_path, 0, 1)
    (tmp_path / "masks/train/spare.png").write_bytes((tmp_path / "masks/train/a.png").read_bytes())
    assert load(tmp_path, DataOptions()).notes == ("not used: 1 mask without an image: spare.png",)
    (tmp_path / "masks/train/a.png").unlink()
    with pytest.raises(CapiError, match=r"no mask for 1 of 1 image, the first is .*images/train/a\.jpg"):
        load(tmp_path, DataOptions())


def test__two_images_of_one_name_are_an_error(tmp_path: Path) -> None:
    small(tmp_path, 0, 1)
    (tmp_path / "images/train/a.png").write_bytes(b"")
    with pytest.raises(CapiError, match=r"holds both a\.jpg and a\.png"):
        load(tmp_path, DataOptions())


def test__images_are_left_out_by_split_and_name(tmp_path: Path) -> None:
    options = build_masks(tmp_path)
    exclude = tmp_path / "out.txt"
    exclude.write_text("train/town 0/0.jpg\n")
    data = load(tmp_path, DataOptions(ignored=options.ignored, exclude=exclude))
    assert (len(data.train.images), len(data.train.masks), len(data.test.images)) == (11, 11, 4)
    assert data.train.masks.name(0) == "town 0/10.png"


@pytest.mark.parametrize("inner", ["images", "masks"])
def test__the_folder_that_holds_both_is_named_where_one_of_them_is_given(tmp_path: Path, inner: str) -> None:
    with pytest.raises(CapiError, match=rf"{inner} is one of the folders images and masks: give data={tmp_path}, "):
        load(small(tmp_path, 0, 1) / inner, DataOptions())


def test__missing_parts_are_errors(tmp_path: Path) -> None:
    small(tmp_path, 0, 1)
    with pytest.raises(CapiError, match='no folder "trian"; did you mean "train"'):
        load(tmp_path, DataOptions(train="trian"))
    (tmp_path / "images" / "test").mkdir()
    with pytest.raises(CapiError, match=r"masks/test is missing"):
        load(tmp_path, DataOptions())
    (tmp_path / "masks" / "test").mkdir()
    with pytest.raises(CapiError, match=r"images/test holds no images"):
        load(tmp_path, DataOptions())


def test__masks_without_splits_are_divided_in_pairs(tmp_path: Path) -> None:
    tree = Tree()
    for number in range(10):
        tree.scene(f"images/town/{number}.jpg", f"masks/town/{number}.png", halves(0, 1))
    tree.write(tmp_path)
    data = load(tmp_path, DataOptions())
    assert (len(data.train.images), len(data.test.images), data.test_name) == (8, 2, "test")
    for part in (data.train, data.test):
        for number in range(len(part.images)):
            assert part.images.name(number).removesuffix(".jpg") == part.masks.name(number).removesuffix(".png")
    assert f"{tmp_path.name} names no splits: 2 of 10 images are tested on, 20 % by the hash" in data.notes[0]
