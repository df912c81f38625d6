from pathlib import Path

import numpy as np
import pytest

from capi.errors import CapiError
from capi.evals.datasets.pets import load_classification, load_segmentation
from capi.evals.tasks import DataOptions
from tests.evals.datasets.layouts import build_pets, halves, mask_bytes


def test__breeds_are_numbered_by_the_lists_not_by_name(tmp_path: Path) -> None:
    data = load_classification(tmp_path, build_pets(tmp_path))
    assert data.classes == ("Birman", "Abyssinian", "pug")
    labels = {data.train.images.name(i): int(label) for i, label in enumerate(data.train.labels)}
    assert labels["images/Abyssinian_3.jpg"] == 1
    assert labels["images/pug_0.jpg"] == 2
    assert data.tests["test"].answers.flatten().tolist() == [1, 1, 0, 0, 2, 2]
    assert data.train.images.read(0) == tmp_path / "images" / "Abyssinian_0.jpg"


def test__the_foreground_is_the_species_and_the_border_is_ignored(tmp_path: Path) -> None:
    data = load_segmentation(tmp_path, build_pets(tmp_path))
    assert data.classes == {0: "background", 1: "cat", 2: "dog"}
    assert data.ignored == {255}
    for index in range(len(data.test.images)):
        species = 2 if "pug" in data.test.images.name(index) else 1
        assert np.array_equal(data.test.masks.read(index), halves(0, species, 255))


def test__another_number_in_a_trimap_is_an_error(tmp_path: Path) -> None:
    options = build_pets(tmp_path)
    (tmp_path / "annotations/trimaps/pug_7.png").write_bytes(mask_bytes(halves(0, 1), palette=False))
    data = load_segmentation(tmp_path, options)
    with pytest.raises(CapiError, match=r"pug_7\.png holds the label 0"):
        data.test.masks.read(5)


def test__missing_photos_and_trimaps_are_errors(tmp_path: Path) -> None:
    options = build_pets(tmp_path)
    (tmp_path / "annotations/trimaps/pug_7.png").unlink()
    assert len(load_classification(tmp_path, options).train.images) == 18
    with pytest.raises(CapiError, match=r"no mask for 1 of 6 images, the first is .*images/pug_7\.jpg"):
        load_segmentation(tmp_path, options)
    (tmp_path / "images/pug_7.jpg").unlink()
    with pytest.raises(CapiError, match=r"files of the lists that are missing: 1 of 24, the first is .*pug_7\.jpg"):
        load_classification(tmp_path, options)


def test__photos_are_left_out_by_name(tmp_path: Path) -> None:
    build_pets(tmp_path)
    (tmp_path / "out.txt").write_text("images/pug_0.jpg\nimages/pug_7.jpg\n")
    data = load_segmentation(tmp_path, DataOptions(verify_counts=False, exclude=tmp_path / "out.txt"))
    assert (len(data.train.masks), len(data.test.masks)) == (17, 5)
    assert "2 images left out by out.txt" in data.notes


@pytest.mark.parametrize("line", ["pug_1 3 2", "pug_1 three 2 1", "pug_1 3 3 1", "pug_1 1 2 1"])
def test__lines_that_are_not_of_the_official_lists_are_errors(tmp_path: Path, line: str) -> None:
    options = build_pets(tmp_path)
    with (tmp_path / "annotations/test.txt").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CapiError, match=r"expected a name, class, species and breed|class 1 is both"):
        load_classification(tmp_path, options)
