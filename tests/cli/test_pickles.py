"""A run folder holds no pickle and needs none; one of an older version, which does, is read and runs nothing."""

import _pickle
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import capi
from capi.train.build import build_learner
from capi.train.checkpoint import Checkpoints, Position
from capi.zoo.checkpoint_files import StoredTensors
from tests.cli.conftest import RunHere, assert_refused
from tests.old_runs import FOLDER, checksum, hostile_index, unpack_old_run

SMALL = [
    "data.image_size=16",
    "data.workers=0",
    "model.patch_size=4",
    "model.width=16",
    "model.depth=1",
    "model.heads=2",
    "model.registers=4",
    "masking.predict=5",
    "clustering.prototypes=9",
    "optimization.batch_size=4",
    "optimization.steps=4",
    "checkpoint.every_steps=2",
    "run.loggers=[]",
    "run.snapshots=0",
]
LOADERS = [
    (pickle, "load"),
    (pickle, "loads"),
    (pickle, "Unpickler"),
    (pickle, "_Unpickler"),
    (_pickle, "load"),
    (_pickle, "loads"),
    (_pickle, "Unpickler"),
    (torch, "load"),
    (torch.serialization, "load"),
]


@pytest.fixture
def without_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function that loads a pickle raises."""

    class Refuse:
        """A class, since others make classes from it when they are imported."""

        def __init__(self, *_: Any, **__: Any) -> None:
            raise AssertionError("a pickle is loaded")

    for module, name in LOADERS:
        monkeypatch.setattr(module, name, Refuse)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for number in range(8):
        Image.linear_gradient("L").rotate(45 * number).resize((16, 16)).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


def succeeded(run_here: RunHere, *words: object) -> None:
    ran = run_here(*words, "--device", "cpu") if words[0] not in ("export", "push", "doctor") else run_here(*words)
    assert ran.code == 0, (words, ran)


@pytest.mark.usefixtures("without_pickle")
def test__every_command_works_on_a_run_without_pickle(
    run_here: RunHere, photos: Path, class_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ("pretrain", "tiny4", *SMALL, "--data", photos, "--out")
    succeeded(run_here, *train, "run")
    encoder = capi.load("run")
    shutil.rmtree("run/checkpoints/step_00000004")
    succeeded(run_here, *train, "run", "--resume")
    for name, value in capi.load("run").state_dict().items():
        assert torch.equal(value, encoder.state_dict()[name]), name
    succeeded(run_here, *train, "second", "init.encoder=run")
    succeeded(run_here, "report", "run")
    assert run_here("doctor", "run").stdout
    succeeded(run_here, "evaluate", "run", "folder/knn", f"data={class_folders}", "image_size=16", "--out", "scores")
    on = ("--on", "folder/knn", f"data={class_folders}", "image_size=16", "--out", "comparison")
    succeeded(run_here, "compare", "run", "second", *on)
    succeeded(run_here, "extract", "run", photos, "--image-size", 16, "--out", "features.safetensors")
    pictures = ("--kind", "pca", "--kind", "prototypes", "--size", 16, "--out", "pictures")
    succeeded(run_here, "visualize", "run", photos, *pictures)
    succeeded(run_here, "export", "run")
    Path("data.md").write_text("Gradients.")
    succeeded(run_here, "push", "run", "ana/run", "--dry-run", "--licence", "mit", "--data-description", "data.md")
    files = {path.name for path in Path("run/checkpoints").rglob("*") if path.is_file()}
    assert files == {"state.json", "process_00000.safetensors"}


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return unpack_old_run(tmp_path)


def all_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    stored = StoredTensors(checkpoint)
    return stored.take(stored.weightless)


def test__an_old_run_is_read_bit_by_bit(old_run: Path) -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())
    assert checksum(all_tensors(old_run / "checkpoints/step_00000002")) == expected["step_2_sha256"]
    encoder = capi.load(old_run)
    assert encoder(torch.zeros(1, 3, 16, 16)).pooled.isfinite().all()


def test__an_old_run_is_resumed_as_one_of_this_format(run_here: RunHere, old_run: Path) -> None:
    copy = old_run.with_name("copy")
    shutil.copytree(old_run, copy)
    # The same state, in the present format.
    config = capi.load_config(old_run / "config.yaml")
    learner = build_learner(config)
    checkpoints = Checkpoints(copy / "checkpoints")
    position = checkpoints.load(learner)
    shutil.rmtree(copy / "checkpoints")
    checkpoints.save(learner, Position(**vars(position)))
    for run in (old_run, copy):
        words = ("pretrain", run / "config.yaml", "--data", old_run.with_name("photos"), "--out", run, "--resume")
        assert run_here(*words, "--device", "cpu").code == 0
    ended = [all_tensors(run / "checkpoints/step_00000004") for run in (old_run, copy)]
    assert checksum(ended[0]) == checksum(ended[1])
    for name, value in load_file(FOLDER / "continued.safetensors").items():
        torch.testing.assert_close(ended[0][name], value, rtol=1e-3, atol=1e-5, msg=name)


def crafted(run: Path, name: str, *, called: bool = False) -> None:
    """Put a hostile index in the place of a run's own, as a stranger would: complete, and with its right size."""
    checkpoint = run / "checkpoints/step_00000002"
    index = hostile_index((checkpoint / ".metadata").read_bytes(), name, called=called)
    (checkpoint / ".metadata").write_bytes(index)
    state = json.loads((checkpoint / "state.json").read_text())
    state["files"][".metadata"] = len(index)
    (checkpoint / "state.json").write_text(json.dumps(state))


COMMANDS: dict[str, Callable[[Path], list[object]]] = {
    "evaluate": lambda run: ["evaluate", run, "folder/knn", "data=photos", "--out", "scores"],
    "export": lambda run: ["export", run],
    "extract": lambda run: ["extract", run, "photos", "--out", "f.safetensors"],
    "resume": lambda run: ["pretrain", run / "config.yaml", "--data", "photos", "--out", run, "--resume"],
    "visualize": lambda run: ["visualize", run, "photos", "--out", "pictures"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("pathlib.PosixPath", False),
        ("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", False),
        ("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", True),
        ("torch.serialization._get_layout", False),
    ],
)
def test__a_hostile_index_changes_nothing_and_is_reported(
    run_here: RunHere, old_run: Path, name: str, called: bool, command: str
) -> None:
    crafted(old_run, name, called=called)
    before = {path for path in old_run.parent.rglob("*")}
    ran = run_here(*COMMANDS[command](old_run))
    assert_refused(ran, "step_00000002 is damaged (.metadata ")
    for kind in (PosixPath, _MEM_FORMAT_ENCODING, _MEM_FORMAT_ENCODING(0), torch.serialization._get_layout):
        assert not hasattr(kind, "owned")
    assert {path for path in old_run.parent.rglob("*") if path.name != ".lock"} <= before
    # Reports are drawn without the checkpoint, and change nothing either.
    assert run_here("report", old_run, "--device", "cpu").code == 0
    assert not hasattr(PosixPath, "owned")
