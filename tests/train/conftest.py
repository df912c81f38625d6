from pathlib import Path

import pytest

from capi.config.schema import Config
from capi.train.build import build_learner
from capi.train.checkpoint import Checkpoints
from capi.train.step import Learner


@pytest.fixture
def learner(small_config: Config) -> Learner:
    return build_learner(small_config)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2)
