"""Extraction as a user meets it: labels, sizes, and what an interruption leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from capi import api
from capi.evals.feature_files import read_features
from tests.cli.conftest import RunHere
from tests.data.pictures import photo

SLOW = """
import time
from capi.models.features import PixelEncoder

class Slow(PixelEncoder):
    def __init__(self):
        super().__init__(4)

    def forward(self, images, *, pooled=True):
        print("encoding", flush=True)
        time.sleep(0.2)
        return super().forward(images, pooled=pooled)
"""


@pytest.fixture
def work(tmp_path: Path, class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "classes").symlink_to(class_folders)
    return tmp_path


def test__class_folders_give_labels(run_here: RunHere, work: Path) -> None:
    words = ["extract", "pixels:4", "classes", "--split", "train", "--image-size", "8", "--out", "f.safetensors"]
    assert run_here(*words).code == 0
    file = read_features(work / "f.safetensors")
    assert file.facts.classes == ["ant", "bee", "cat"]
    assert file.labels == [name.split("/")[0] for name in file.names]
    # A split above the class folders: which of the two is the class cannot be known.
    assert run_here("extract", "pixels:4", "classes", "--image-size", "8", "--out", "g.safetensors").code == 0
    assert read_features(work / "g.safetensors").labels is None


def test__images_need_not_be_square(run_here: RunHere, work: Path) -> None:
    words = ["extract", "pixels:4", "classes", "--kind", "patch", "--out", "f.safetensors"]
    assert run_here(*words, "--image-size", "8x16").code == 0
    facts = read_features(work / "f.safetensors").facts
    assert facts.framing.size == (8, 16)
    assert facts.shapes["patch"] == (2, 4, 48)


def test__maps_of_large_images_come_with_their_pictures(run_here: RunHere, work: Path) -> None:
    (work / "scenes").mkdir()
    Image.fromarray(photo(37, 50)).save(work / "scenes" / "one.png")
    words = ["extract", "pixels:4", "scenes", "--tile", "16", "--overlap", "4", "--out", "maps"]
    ran = run_here(*words)
    assert ran.stdout == "wrote maps/one.png.safetensors: 9 x 12 patches; one.png.pca.png shows it\n"
    assert read_features(work / "maps" / "one.png.safetensors").array("patch").shape == (1, 9, 12, 48)
    with Image.open(work / "maps" / "one.png.pca.png") as picture:
        assert (picture.width / 12, picture.height / 9) == (57, 57)
    assert "(it was there already)" in run_here(*words).stdout
    # One image, named by itself, is the same map in a place of its own.
    assert (
        run_here("extract", "pixels:4", "scenes/one.png", "--tile", "16", "--overlap", "4", "--out", "alone").code == 0
    )
    patches, other = (read_features(work / name / "one.png.safetensors").array("patch") for name in ("maps", "alone"))
    assert patches.equal(other)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tile", "16", "--overlap", "16"], "an overlap of 16 pixels does not fit tiles of 16"),
        (["--tile", "16", "--image-size", "32"], "--image-size has no effect with --tile"),
        (["--tile", "16", "--kind", "pooled"], "--kind has no effect with --tile"),
        (["--overlap", "4"], "--overlap is that of tiles: give --tile too"),
        (["--tile", "16", "--dtype", "int8"], "--dtype"),
        (["--tile", "0"], '--tile cannot be "0"'),
    ],
    ids=" ".join,
)
def test__options_of_tiles_that_do_not_fit_are_reported(
    run_here: RunHere, work: Path, words: list[str], sentence: str
) -> None:
    ran = run_here("extract", "pixels:4", "classes", "--out", "maps", *words)
    assert (ran.code, ran.stderr.count("\n")) == (2, 1)
    assert sentence in ran.stderr
    assert not (work / "maps").exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["extract", "pixels:4", "classes", "--out", "f.safetensors"], "extract"),
        (["extract", "pixels:4", "classes", "--tile", "16", "--out", "maps"], "extract_tiles"),
        (["compare", "pixels:4", "--on", "folder/knn", "--out", "cmp", "data=classes"], "compare"),
    ],
    ids=["extract", "tiles", "compare"],
)
def test__an_interruption_says_how_to_continue(
    run_here: RunHere, work: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], name: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, name, interrupted)
    ran = run_here(*words)
    assert ran.code == 130
    assert ran.stdout.startswith("Stopped. ")
    assert ran.stdout.endswith(" saved: the same command resumes.\n")
    assert ran.stderr == ""


def test__an_extraction_continues_after_control_c(run_here: RunHere, work: Path) -> None:
    (work / "slow.py").write_text(SLOW)
    words = ["extract", "slow.py:Slow", "classes", "--image-size", "8", "--batch-size", "1", "--out", "f.safetensors"]
    command = [sys.executable, "-m", "capi", *words, "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert output.splitlines()[-1] == "Stopped. What was extracted is saved: the same command resumes."
    assert "Traceback" not in errors
    (work / "slow.py").write_text(SLOW.replace("time.sleep(0.2)", "pass"))
    ran = run_here(*words)
    assert ran.code == 0
    assert 0 < ran.stdout.count("encoding") < 24
    assert len(read_features(work / "f.safetensors")) == 24
