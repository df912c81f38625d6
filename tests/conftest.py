"""What the tests share: the reference tensors, and small models."""

import gc
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from capi.config.files import parse_config
from capi.config.schema import Config
from capi.method.teacher import Teacher
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.predictor import CrossPredictor
from capi.runtime.processes import Processes
from capi.train.build import build_learner
from capi.train.checkpoint import Checkpoints
from capi.train.step import Learner
from capi.zoo.build import build_student
from tests.evals.datasets.layouts import build_folder, build_masks

REFERENCE = Path(__file__).parent / "reference" / "tiny"


# A shell that starts the tests in the background has them ignore Ctrl-C, which the processes they start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What has been imported by now stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _without_waiting_for_the_disk() -> Iterator[None]:
    """No test cuts the power: what is written need not reach the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Commands that run within a test may end as their process would: deaf to signals."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def reference() -> dict[str, Tensor]:
    """Inputs and true outputs of the released implementation."""
    return load_file(REFERENCE / "tensors.safetensors")


@pytest.fixture(scope="session")
def reference_config() -> dict[str, Any]:
    return json.loads((REFERENCE / "config.json").read_text())


@pytest.fixture
def reference_checkpoint(tmp_path: Path) -> Path:
    """A copy of the reference checkpoint that a test may change."""
    return Path(shutil.copy(REFERENCE / "student.pth", tmp_path / "student.pth"))


@pytest.fixture(scope="session")
def class_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny photos of three classes, told apart by colour: 6 of each to train on, 2 to test. Not to be changed."""
    root = tmp_path_factory.mktemp("class_folders")
    build_folder(root)
    return root


@pytest.fixture(scope="session")
def mask_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny photos, 12 and 4, with masks of the labels 0, 1, 2 and 255. Not to be changed."""
    root = tmp_path_factory.mktemp("mask_folders")
    build_masks(root)
    return root


@pytest.fixture
def model() -> CapiEncoder:
    """A frozen encoder whose predictor has another width."""
    encoder = Encoder(width=32, depth=2, heads=2, patch_size=4, registers=4, mlp_width=64)
    return CapiEncoder(
        encoder=encoder, predictor=CrossPredictor(width=48, depth=2, heads=4, context_width=32, mlp_width=64)
    ).eval()


@pytest.fixture
def small_config() -> Config:
    """A model that trains in milliseconds, on a grid that is not square."""
    return parse_config(
        {
            "data": {"image_size": [32, 24]},
            "model": {"width": 32, "depth": 2, "heads": 2, "patch_size": 4, "registers": 4},
            "clustering": {"prototypes": 24},
            "masking": {"predict": 5},
            "optimization": {"batch_size": 6, "steps": 20},
        }
    )


@pytest.fixture
def teacher(small_config: Config) -> Teacher:
    """For targets that ask for one and do not look at it."""
    return Teacher(build_student(small_config))


@pytest.fixture
def learner(small_config: Config) -> Learner:
    return build_learner(small_config)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Processes]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Processes()
    dist.destroy_process_group()
