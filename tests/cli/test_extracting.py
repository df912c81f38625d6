"""Extraction as a user meets it: labels, sizes, and what an interruption leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capi import api
from capi.evals.feature_files import read_features
from tests.cli.conftest import RunHere

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
    # A split above the class folders: which of the two is the class cannot be told.
    assert run_here("extract", "pixels:4", "classes", "--image-size", "8", "--out", "g.safetensors").code == 0
    assert read_features(work / "g.safetensors").labels is None


def test__images_need_not_be_square(run_here: RunHere, work: Path) -> None:
    words = ["extract", "pixels:4", "classes", "--kind", "patch", "--out", "f.safetensors"]
    assert run_here(*words, "--image-size", "8x16").code == 0
    facts = read_features(work / "f.safetensors").facts
    assert facts.framing.size == (8, 16)
    assert facts.shapes["patch"] == (2, 4, 48)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["extract", "pixels:4", "classes", "--out", "f.safetensors"], "extract"),
        (["compare", "pixels:4", "--on", "folder/knn", "--out", "cmp", "data=classes"], "compare"),
    ],
    ids=["extract", "compare"],
)
def test__an_interruption_says_how_to_go_on(
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


def test__an_extraction_goes_on_after_control_c(run_here: RunHere, work: Path) -> None:
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
