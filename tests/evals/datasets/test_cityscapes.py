from pathlib import Path

import numpy as np
import pytest

from capi.errors import CapiError
from capi.evals.datasets.cityscapes import load, train_ids
from tests.evals.datasets.layouts import build_cityscapes, halves, mask_bytes


def test__label_ids_become_train_ids_and_all_others_are_void() -> None:
    table = train_ids()
    assert sorted(table) == list(range(34))
    assert [label for label, number in table.items() if number != 255] == [
        *(7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
    ]
    assert sorted(set(table.values())) == [*range(19), 255]
    assert (table[7], table[26], table[33], table[0]) == (0, 13, 18, 255)


def test__masks_are_read_as_train_ids(tmp_path: Path) -> None:
    data = load(tmp_path, build_cityscapes(tmp_path))
    assert len(data.classes) == 19
    assert (data.classes[0], data.classes[13], data.classes[18]) == ("road", "car", "bicycle")
    assert data.ignored == {255}
    assert data.train.images.name(0) == "aachen/aachen_000000_000019_leftImg8bit.png"
    assert data.train.masks.name(0) == "aachen/aachen_000000_000019_gtFine_labelIds.png"
    assert np.array_equal(data.train.masks.read(0), halves(0, 18, 255))
    assert len(data.train.images) == 12


def test__masks_with_train_ids_are_taken_where_there_are_no_others(tmp_path: Path) -> None:
    options = build_cityscapes(tmp_path)
    for path in (tmp_path / "gtFine").rglob("*_labelIds.png"):
        path.with_name(path.name.replace("labelIds", "labelTrainIds")).write_bytes(
            mask_bytes(halves(3, 18, 255), palette=False)
        )
        path.unlink()
    data = load(tmp_path, options)
    assert np.array_equal(data.test.masks.read(0), halves(3, 18, 255))
    name = data.test.masks.name(0)
    (tmp_path / "gtFine/val" / name).write_bytes(mask_bytes(halves(3, 33), palette=False))
    with pytest.raises(CapiError, match="holds the label 33"):
        data.test.masks.read(0)


def test__an_image_without_a_mask_is_an_error(tmp_path: Path) -> None:
    options = build_cityscapes(tmp_path)
    (tmp_path / "gtFine/val/bonn/bonn_000002_000019_gtFine_labelIds.png").unlink()
    with pytest.raises(CapiError, match=r"no mask for 1 of 4 images, the first is .*bonn_000002_000019_leftImg8bit"):
        load(tmp_path, options)
