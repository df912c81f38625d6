"""A run to share."""

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from capi.config.files import dump_config, load_config
from capi.train.build import build_learner
from capi.train.checkpoint import Checkpoints, Position
from tests.report.run_folders import add_pictures, make_run, records

SMALL = ["model.width=32", "model.depth=1", "model.heads=2", "clustering.prototypes=8", "optimization.steps=60"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint whose teacher is not its student, metrics and pictures; not to be changed."""
    run = make_run(tmp_path_factory.mktemp("runs") / "run", records())
    config = load_config("demo", SMALL)
    (run / "config.yaml").write_text(dump_config(config))
    learner = build_learner(config)
    with torch.no_grad():
        learner.student.encoder.registers += 1
    Checkpoints(run / "checkpoints").save(learner, Position(step=60))
    add_pictures(run)
    Image.new("RGB", (600, 200)).save(run / "pictures" / "curves.png")
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))
