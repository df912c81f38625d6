from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.evals.datasets.sun397 import load
from capi.evals.tasks import DataOptions
from tests.evals.datasets.layouts import build_sun397


def test__a_class_is_the_folder_of_an_image_however_deep(tmp_path: Path) -> None:
    data = load(tmp_path, build_sun397(tmp_path))
    assert data.classes == ("a/abbey", "a/apartment_building/outdoor", "z/zoo")
    assert data.train.images.name(4) == "a/apartment_building/outdoor/sun_0.jpg"
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.tests["Testing_01"].answers.flatten().tolist() == [0, 0, 1, 1, 2, 2]


def test__lists_of_different_partitions_are_an_error_where_they_share_images(tmp_path: Path) -> None:
    build_sun397(tmp_path)
    with pytest.raises(CapiError, match=r"Training_02\.txt and Testing_01\.txt both name a/abbey/sun_4\.jpg"):
        load(tmp_path, DataOptions(verify_counts=False, train="Training_02"))


def test__a_class_that_is_not_listed_and_a_missing_list_are_errors(tmp_path: Path) -> None:
    options = build_sun397(tmp_path)
    with pytest.raises(CapiError, match=r"Testing_03\.txt is missing"):
        load(tmp_path, DataOptions(verify_counts=False, tests=("Testing_03",)))
    (tmp_path / "ClassName.txt").write_text("/a/abbey\n/z/zoo\n")
    with pytest.raises(CapiError, match='"a/apartment_building/outdoor" is not one of the 2 classes'):
        load(tmp_path, options)
    (tmp_path / "ClassName.txt").write_text("/a/abbey\n/z/zoo\n/a/apartment_building/outdoor\n")
    assert load(tmp_path, options).classes[1] == "z/zoo"
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(CapiError, match=r"there is no .*a/abbey/sun_0\.jpg"):
        load(tmp_path, options)
