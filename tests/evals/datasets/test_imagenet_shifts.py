import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capi.evals.datasets.imagenet import load, padded
from tests.evals.datasets.layouts import REAL, answers_by_name, build_imagenet, val_name


def test__reassessed_labels_go_by_the_number_in_the_name(tmp_path: Path) -> None:
    data = load(tmp_path, build_imagenet(tmp_path))
    real = answers_by_name(data.tests["real"])
    assert real == {val_name(number): set(labels) for number, labels in enumerate(REAL, start=1) if labels}
    assert val_name(3) not in real
    assert real[val_name(2)] == {1, 7}
    # Folders put image 13 before image 2, so that going by position would be wrong.
    first = [Path(data.tests["real"].images.name(index)).name for index in range(3)]
    assert first == [val_name(1), val_name(13), val_name(2)]


def test__folders_of_v2_are_numbers_whatever_their_order_as_text(tmp_path: Path) -> None:
    test = load(tmp_path, build_imagenet(tmp_path)).tests["v2"]
    names = [test.images.name(index) for index in range(12)]
    assert names[:4] == ["0/a.jpeg", "1/a.jpeg", "10/a.jpeg", "11/a.jpeg"]
    assert test.answers.flatten().tolist() == [int(name.split("/")[0]) for name in names]
    assert test.answer_of_class is None


@pytest.mark.parametrize(("name", "own"), [("a", [2, 5]), ("r", [3, 11])])
def test__a_and_r_choose_among_their_own_classes(tmp_path: Path, name: str, own: list[int]) -> None:
    test = load(tmp_path, build_imagenet(tmp_path)).tests[name]
    assert test.answers.flatten().tolist() == own
    assert test.restricted
    assert test.answer_of_class is not None
    assert test.answer_of_class.tolist() == [kind if kind in own else -1 for kind in range(12)]


def test__sketch_chooses_among_all_classes(tmp_path: Path) -> None:
    test = load(tmp_path, build_imagenet(tmp_path)).tests["sketch"]
    assert test.answers.flatten().tolist() == list(range(12))
    assert not test.restricted


def test__objectnet_counts_every_class_of_an_object_and_skips_what_imagenet_lacks(tmp_path: Path) -> None:
    test = load(tmp_path, build_imagenet(tmp_path)).tests["objectnet"]
    assert [test.images.name(index) for index in range(2)] == ["chair_folder/a.png", "clock_folder/a.png"]
    assert [set(row.tolist()) for row in test.answers] == [{9, -1}, {1, 4}]
    assert test.restricted
    assert test.answer_of_class is not None
    assert [kind for kind in test.answer_of_class.tolist() if kind >= 0] == [1, 4, 9]


def test__the_red_frame_of_objectnet_is_cut_off(tmp_path: Path) -> None:
    test = load(tmp_path, build_imagenet(tmp_path)).tests["objectnet"]
    content = test.images.read(0)
    assert isinstance(content, bytes)
    with Image.open(tmp_path / "objectnet/images/chair_folder/a.png") as image, Image.open(io.BytesIO(content)) as cut:
        assert image.size == (12, 12)
        assert np.array_equal(np.asarray(cut), np.asarray(image)[2:-2, 2:-2])


def test__rows_of_answers_are_filled_up_with_minus_one() -> None:
    assert padded([[3], [], [1, 2]]).tolist() == [[3, -1], [-1, -1], [1, 2]]
