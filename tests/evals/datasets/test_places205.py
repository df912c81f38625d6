from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.evals.datasets.places205 import load
from tests.evals.datasets.layouts import build_places205


def test__classes_have_the_numbers_of_the_lists(tmp_path: Path) -> None:
    data = load(tmp_path, build_places205(tmp_path))
    assert data.classes == ("z/zoo", "a/abbey", "a/alley/indoor")
    assert data.train.images.name(0) == "a/abbey/gsun_0.jpg"
    assert data.train.labels.tolist() == [1] * 4 + [2] * 4 + [0] * 4
    assert data.tests["val"].answers.flatten().tolist() == [1, 1, 2, 2, 0, 0]
    path = data.train.images.read(0)
    assert isinstance(path, Path)
    assert path.is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a/abbey/gsun_4.jpg\n", "expected the name of an image and the number"),
        ("a/abbey/gsun_4.jpg one\n", "expected the name of an image and the number"),
        ("a/abbey/gsun_4.jpg 0\n", "call class 0 both z/zoo and a/abbey"),
        ("\n", "names no images"),
    ],
)
def test__other_lists_are_errors(tmp_path: Path, text: str, message: str) -> None:
    options = build_places205(tmp_path)
    (tmp_path / "trainvalsplit_places205/val_places205.csv").write_text(text)
    with pytest.raises(CapiError, match=message):
        load(tmp_path, options)


def test__images_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    options = build_places205(tmp_path)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    with pytest.raises(CapiError, match=r"images256/a/abbey/gsun_0\.jpg"):
        load(tmp_path, options)
