"""An encoder of one's own on the command line: what goes wrong in it is one sentence."""

from pathlib import Path

import pytest

from tests.cli.conftest import RunHere, assert_refused

GOOD = """
import torch
from capi import Features

class Mine:
    width, patch_size = 3, 4

    def __call__(self, images, *, pooled=True):
        patches = torch.nn.functional.avg_pool2d(images, 4).permute(0, 2, 3, 1)
        return Features(None, images.new_zeros(len(images), 0, 3), patches)
"""
BAD = GOOD.replace("patches = ", "patches = self.blocks(")
SENTENCE = "the encoder Mine failed on images (AttributeError: 'Mine' object has no attribute 'blocks'): "


@pytest.fixture
def work(tmp_path: Path, class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "classes").symlink_to(class_folders)
    (tmp_path / "mine.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD.replace("(0, 2, 3, 1)", "(0, 2, 3, 1))"))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "bad.py:Mine", "folder/knn", "data=classes", "image_size=8"],
        ["evaluate", "bad.py:Mine", "folder/linear", "data=classes", "image_size=8", "--out", "out"],
        ["extract", "bad.py:Mine", "classes", "--out", "f.safetensors", "--image-size", "8"],
    ],
    ids=" ".join,
)
def test__an_exception_inside_is_reported_in_one_sentence(run_here: RunHere, work: Path, words: list[str]) -> None:
    assert_refused(run_here(*words), SENTENCE)


def test__an_exception_while_labeling_is_reported_in_one_sentence(run_here: RunHere, work: Path) -> None:
    options = ["folder/knn", "data=classes", "image_size=8", "--out", "out"]
    assert run_here("evaluate", "mine.py:Mine", *options).code == 0
    ran = run_here("predict", "bad.py:Mine", "out/probe.safetensors", "classes/val", "--out", "p")
    assert ran.code == 2
    assert SENTENCE in ran.stderr
    assert "Traceback" not in ran.stderr


def test__an_exception_is_the_failure_of_one_cell(run_here: RunHere, work: Path) -> None:
    words = ["mine.py:Mine", "bad.py:Mine", "--on", "folder/knn", "--out", "cmp", "data=classes", "image_size=8"]
    ran = run_here("compare", *words)
    assert ran.code == 1
    assert f"failed: bad.py:Mine on folder/knn: {SENTENCE}" in ran.stdout
    assert ran.stdout.splitlines()[1].split() == ["mine.py:Mine", "8", "px", "100.00", "%"]


def test__the_traceback_is_there_for_those_who_ask(run_here: RunHere, work: Path) -> None:
    ran = run_here("--traceback", "evaluate", "bad.py:Mine", "folder/knn", "data=classes", "image_size=8")
    assert ran.code == 2
    assert "bad.py" in ran.stderr
    assert "AttributeError: 'Mine' object has no attribute 'blocks'" in ran.stderr


def test__a_grid_that_contradicts_the_patch_size_is_reported(run_here: RunHere, work: Path) -> None:
    (work / "mine.py").write_text(GOOD.replace("patch_size = 3, 4", "patch_size = 3, 8"))
    ran = run_here("evaluate", "mine.py:Mine", "folder/knn", "data=classes", "image_size=8")
    assert_refused(ran, "2 x 2 patches for images of 8 x 8 pixels, but its patch_size of 8 makes 1 x 1")
