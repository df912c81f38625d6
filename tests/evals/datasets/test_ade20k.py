from pathlib import Path

import numpy as np
import pytest

from capi.errors import CapiError
from capi.evals.datasets.ade20k import load
from tests.evals.datasets.layouts import build_ade20k, halves, mask_bytes


def test__other_objects_are_ignored_and_classes_keep_their_numbers(tmp_path: Path) -> None:
    data = load(tmp_path, build_ade20k(tmp_path))
    assert data.ignored == {0, 255}
    assert sorted(data.classes) == list(range(1, 151))
    assert data.classes[150] == "150"
    assert data.test_name == "validation"
    assert np.array_equal(data.train.masks.read(0), halves(2, 150, 0))


def test__names_come_from_the_list_of_the_challenge(tmp_path: Path) -> None:
    options = build_ade20k(tmp_path)
    rows = [f"{number} \t0.1\t10\t1\tthing {number}, stuff " for number in range(1, 151)]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *rows]) + "\n")
    classes = load(tmp_path, options).classes
    assert (classes[1], classes[22], classes[150]) == ("thing 1, stuff", "thing 22, stuff", "thing 150, stuff")
    (tmp_path / "objectInfo150.txt").write_text("\n".join(rows[:-1]) + "\n")
    with pytest.raises(CapiError, match="does not name the classes 1 to 150"):
        load(tmp_path, options)


def test__a_missing_mask_and_a_label_out_of_range_are_errors(tmp_path: Path) -> None:
    options = build_ade20k(tmp_path)
    path = tmp_path / "annotations/validation/ADE_val_00000002.png"
    path.write_bytes(mask_bytes(halves(1, 151), palette=False))
    with pytest.raises(CapiError, match=r"ADE_val_00000002\.png holds the label 151"):
        load(tmp_path, options).test.masks.read(1)
    path.unlink()
    with pytest.raises(CapiError, match=r"no mask for 1 of 4 images, the first is .*ADE_val_00000002\.jpg"):
        load(tmp_path, options)
