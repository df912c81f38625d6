from pathlib import Path

import numpy as np
import pytest
import scipy.io

from capi.errors import CapiError
from capi.evals.datasets.imagenet import load
from capi.evals.tasks import DataOptions
from tests.evals.datasets.layouts import KIT, WNIDS, answers_by_name, build_imagenet, val_name


def flat(root: Path) -> None:
    """Move the validation images out of their class folders."""
    for path in list((root / "val").glob("*/*")):
        path.rename(root / "val" / path.name)
    for folder in list((root / "val").iterdir()):
        if folder.is_dir():
            folder.rmdir()


EXPECTED = {val_name(number): {(number - 1) % 12} for number in range(1, 25)}


def test__classes_are_sorted_ids_and_images_lie_in_their_folders(tmp_path: Path) -> None:
    data = load(tmp_path, build_imagenet(tmp_path))
    assert data.classes == tuple(WNIDS)
    assert data.train.labels.tolist() == [kind for kind in range(12) for _ in range(4)]
    assert list(data.tests) == ["val", "real", "v2", "a", "r", "sketch", "objectnet"]
    assert answers_by_name(data.tests["val"]) == EXPECTED


def test__flat_validation_images_are_found_in_the_solution_by_number(tmp_path: Path) -> None:
    build_imagenet(tmp_path)
    flat(tmp_path)
    rows = [
        f"ILSVRC2012_val_{number:08d},{WNIDS[(number - 1) % 12]} 1 2 3 4 n99999999 1" for number in range(24, 0, -1)
    ]
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *rows]) + "\n")
    data = load(tmp_path, DataOptions(verify_counts=False, more={"real": tmp_path / "real.json"}))
    assert answers_by_name(data.tests["val"]) == EXPECTED
    assert len(data.tests["real"].images) == 23


def test__numbers_of_the_development_kit_are_not_those_of_the_sorted_ids(tmp_path: Path) -> None:
    build_imagenet(tmp_path)
    flat(tmp_path)
    folder = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    folder.mkdir(parents=True)
    numbers = [KIT[WNIDS[(number - 1) % 12]] for number in range(1, 25)]
    assert numbers[:12] != list(range(1, 13))
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{number}\n" for number in numbers))
    kinds = [("ILSVRC2012_ID", "i4"), ("WNID", object), ("words", object)]
    synsets = [(number, wnid, "thing") for wnid, number in KIT.items()] + [(13, "n00000099", "things")]
    scipy.io.savemat(folder / "meta.mat", {"synsets": np.array(synsets, dtype=kinds).reshape(-1, 1)})
    data = load(tmp_path, DataOptions(verify_counts=False))
    assert answers_by_name(data.tests["val"]) == EXPECTED


def test__flat_validation_images_without_a_list_are_an_error(tmp_path: Path) -> None:
    build_imagenet(tmp_path)
    flat(tmp_path)
    with pytest.raises(CapiError, match=r"not sorted into class folders: .*LOC_val_solution\.csv"):
        load(tmp_path, DataOptions(verify_counts=False))


def test__numbers_need_the_whole_list_of_classes(tmp_path: Path) -> None:
    options = build_imagenet(tmp_path)
    (tmp_path / "LOC_synset_mapping.txt").unlink()
    for name in ("real", "v2", "objectnet"):
        with pytest.raises(CapiError, match=f"{name} numbers the 1000 classes: .*LOC_synset_mapping.txt"):
            load(tmp_path, DataOptions(verify_counts=False, more={name: options.more[name]}))
    assert len(load(tmp_path, DataOptions(verify_counts=False, more={"a": options.more["a"]})).tests) == 2


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("real.json", "[[0], [12]]", "2 entries, none for"),
        ("real.json", str([[12]] * 24), "a class that is not below 12"),
        ("real.json", "{", "is not valid JSON"),
        ("objectnet/mappings/objectnet_to_imagenet_1k.json", '{"Clock": "clock"}', 'does not lead from "clock"'),
        ("objectnet/mappings/folder_to_objectnet_label.json", "{}", 'says nothing of the folder "chair_folder"'),
        ("LOC_synset_mapping.txt", "n00000100 thing\n", "the class n00000101 is not among the 1 classes"),
        ("LOC_synset_mapping.txt", "tench n00000100\n", '"tench" is no WordNet id'),
    ],
)
def test__files_that_do_not_fit_are_errors(tmp_path: Path, path: str, text: str, message: str) -> None:
    options = build_imagenet(tmp_path)
    (tmp_path / path).write_text(text)
    with pytest.raises(CapiError, match=message):
        load(tmp_path, options)


@pytest.mark.parametrize(
    ("name", "folder", "message"),
    [
        ("v2", "v2/12", 'the folder "12", expected class numbers below 12'),
        ("v2", "v2/n00000100", "expected class numbers"),
        ("a", "a/n99999999", "none of the 12 classes"),
    ],
)
def test__folders_that_are_no_classes_are_errors(tmp_path: Path, name: str, folder: str, message: str) -> None:
    options = build_imagenet(tmp_path)
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "b.jpg").write_bytes(b"")
    with pytest.raises(CapiError, match=message):
        load(tmp_path, DataOptions(verify_counts=False, more={name: options.more[name]}))


def test__the_kaggle_release_is_found_in_its_folders(tmp_path: Path) -> None:
    build_imagenet(tmp_path / "built")
    home = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    home.mkdir(parents=True)
    for name in ("train", "val"):
        (tmp_path / "built" / name).rename(home / name)
    (tmp_path / "built" / "LOC_synset_mapping.txt").rename(tmp_path / "LOC_synset_mapping.txt")
    data = load(tmp_path, DataOptions(verify_counts=False, more={"v2": tmp_path / "built" / "v2"}))
    assert len(data.train.images) == 48
    assert len(data.tests["v2"].images) == 12
