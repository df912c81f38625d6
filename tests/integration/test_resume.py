"""Nothing can be lost: runs that are killed at any moment, and signals as a user or a cluster sends them."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from capi.train.checkpoint import Checkpoints
from capi.zoo.checkpoint_files import StoredTensors
from capi.zoo.run_folder import WALL_CLOCK, read_metrics
from tests.photos import noise_photos

DRIVER = Path(__file__).with_name("driver.py")
LAST_STEP = 44
# Moments from one checkpoint to the next, all and those of the writer: so far a run gets at most before it dies.
ALL_MOMENTS, WRITER_MOMENTS = 26, 10


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small photos of noise, and one file that is no image."""
    folder = noise_photos(tmp_path_factory.mktemp("images"), 15, (24, 20), digits=2)
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def drive(images: Path, out: Path, *moment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRIVER), str(images), str(out), *moment]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)


def final_state(run: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], dict[str, Any]]:
    path = Checkpoints(run / "checkpoints").path(LAST_STEP)
    stored = StoredTensors(path)
    tensors = stored.take(stored.weightless)
    lines = [
        {key: value for key, value in record.items() if key not in WALL_CLOCK}
        for record in read_metrics(run / "metrics.jsonl")
    ]
    record = json.loads((path / "state.json").read_text())
    assert record["files"].keys() == {"process_00000.safetensors"}
    return tensors, lines, record


@pytest.mark.parametrize(
    "kills", [pytest.param(1, marks=pytest.mark.long), pytest.param(10, marks=pytest.mark.thorough)]
)
def test__a_run_killed_at_any_moments_is_the_uninterrupted_one(images: Path, tmp_path: Path, kills: int) -> None:
    straight = drive(images, tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    draw = random.Random(20)  # noqa: S311
    killed = tmp_path / "killed"
    for number in range(kills):
        in_writer = [str(draw.randint(1, WRITER_MOMENTS)), "writer"]
        done = drive(images, killed, *(in_writer if number % 2 == 0 else [str(draw.randint(1, ALL_MOMENTS))]))
        assert done.returncode == -signal.SIGKILL, done.stderr
    finished = drive(images, killed)
    assert finished.returncode == 0, finished.stderr
    expected, resumed = final_state(tmp_path / "straight"), final_state(killed)
    assert resumed[1:] == expected[1:]
    assert expected[0].keys() == resumed[0].keys()
    for name, value in expected[0].items():
        assert torch.equal(value, resumed[0][name]), name
    assert [record["step"] for record in resumed[1] if "student_loss" in record] == list(range(1, LAST_STEP + 1))
    evaluated = [record["step"] for record in resumed[1] if "registers" in record]
    assert evaluated == [*range(0, LAST_STEP, 5), LAST_STEP]
    assert resumed[2]["broken"] == {"broken.png": "no image that can be read"}
    assert not list((killed / "checkpoints").glob(".partial*"))


def start_command(images: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """The command as a user types it, in a process group of its own, as a terminal would make it."""
    small = ["model.depth=1", "model.width=32", "model.heads=2", "clustering.prototypes=16", "data.image_size=16"]
    many = ["optimization.batch_size=4", "optimization.steps=100000", "data.workers=2", "checkpoint.every_steps=50"]
    command = [sys.executable, "-m", "capi", "pretrain", "tiny4", *small, *many, "run.log_steps=1", "run.loggers=[]"]
    return subprocess.Popen(
        [*command, "--data", str(images), "--out", str(out), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        records = read_metrics(out / "metrics.jsonl")
        if records and records[-1]["step"] >= step:
            return
        time.sleep(0.05)
    raise AssertionError("the run does not get on")


def members(group: int) -> list[int]:
    """Processes of a session that still run."""
    names = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == group and fields[0] != "Z":
            names.append(int(path.parent.name))
    return names


def gone(group: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not members(group)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test__a_signal_saves_and_ends_workers_too(images: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start_command(images, tmp_path / "run")
    wait_for_step(tmp_path / "run", 3, process)
    assert len(members(process.pid)) >= 3
    # Ctrl-C reaches every process of the group, and so does the SIGTERM of many a scheduler.
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert "--resume" in output
    assert gone(process.pid, 10)
    (step,) = Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1:]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == step


@pytest.mark.long
def test__workers_do_not_outlive_a_killed_run(images: Path, tmp_path: Path) -> None:
    process = start_command(images, tmp_path / "run")
    wait_for_step(tmp_path / "run", 3, process)
    process.kill()
    process.communicate(timeout=60)
    assert gone(process.pid, 30)
