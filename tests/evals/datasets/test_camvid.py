from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capi.errors import CapiError
from capi.evals.datasets.camvid import load
from capi.evals.tasks import DataOptions
from tests.evals.datasets.layouts import build_camvid, halves

COLORS = {"Animal": (64, 128, 64), "Void": (0, 0, 0), "Wall": (64, 192, 0)}


def as_published(root: Path) -> Path:
    for folder in ("701_StillsRaw_full", "LabeledApproved_full"):
        (root / folder).mkdir(parents=True)
    palette = np.array(list(COLORS.values()), np.uint8)
    for name in ("b", "a", "c"):
        Image.new("RGB", (8, 8)).save(root / f"701_StillsRaw_full/{name}.png")
        Image.fromarray(palette[halves(0, 2, 1)]).save(root / f"LabeledApproved_full/{name}_L.png")
    lines = [f"{red} {green} {blue}\t\t{name}" for name, (red, green, blue) in COLORS.items()]
    (root / "label_colors.txt").write_text("\r\n".join(lines) + "\r\n")
    (root / "train.txt").write_text("b\na\n")
    (root / "test.txt").write_text("c\n")
    return root


def test__the_layout_of_the_tutorial_has_eleven_classes_and_a_label_that_is_ignored(tmp_path: Path) -> None:
    options = build_camvid(tmp_path)
    data = load(tmp_path, options)
    assert len(data.classes) == 11
    assert data.ignored == {11}
    assert (len(data.train.images), len(data.test.images), data.test_name) == (12, 4, "test")
    assert np.array_equal(data.train.masks.read(1), halves(1, 10, 11))
    other = load(tmp_path, DataOptions(verify_counts=False, train="test", tests=("val",)))
    assert (len(other.train.images), len(other.test.images), other.test_name) == (4, 3, "val")
    with pytest.raises(CapiError, match="found 12 train images, but the official data set has 367"):
        load(tmp_path, DataOptions())


def test__colors_become_the_classes_of_the_file_of_colors(tmp_path: Path) -> None:
    data = load(as_published(tmp_path), DataOptions())
    assert data.classes == {0: "Animal", 2: "Wall"}
    assert data.ignored == {1}
    assert [data.train.images.name(i) for i in range(2)] == ["701_StillsRaw_full/a.png", "701_StillsRaw_full/b.png"]
    assert np.array_equal(data.train.masks.read(0), halves(0, 2, 1))
    assert "no official splits" in data.notes[0]


def test__a_color_that_is_not_named_is_an_error(tmp_path: Path) -> None:
    as_published(tmp_path)
    Image.new("RGB", (8, 8), (64, 128, 65)).save(tmp_path / "LabeledApproved_full/c_L.png")
    with pytest.raises(CapiError, match=r"c_L\.png holds the colour 64 128 65"):
        load(tmp_path, DataOptions()).test.masks.read(0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("test.txt", "c\na\n", r"a is in both train\.txt and test\.txt"),
        ("test.txt", "d\n", r"files of the lists that are missing: 1 of 1, the first is .*d\.png"),
        ("label_colors.txt", "64 128 Animal\n", "expected red, green, blue"),
        ("label_colors.txt", "1 2 3 Animal\n1 2 3 Wall\n", "names a colour twice"),
    ],
)
def test__wrong_lists_are_errors(tmp_path: Path, name: str, text: str, message: str) -> None:
    (as_published(tmp_path) / name).write_text(text)
    with pytest.raises(CapiError, match=message):
        load(tmp_path, DataOptions())
