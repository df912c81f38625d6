"""Training as a user meets it: real processes, exit codes, what is printed where."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import capi
from capi import api
from capi.config import files
from capi.runtime import devices
from capi.runtime.numerics import NUMERICS
from capi.train import dry_run
from capi.train.run import PretrainedRun
from tests.cli.conftest import RunHere, assert_refused

SMALL = ["model.depth=1", "model.width=32", "model.heads=2", "clustering.prototypes=16", "optimization.batch_size=4"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "capi", *arguments], capture_output=True, text=True, check=False)


def test__check_chooses_the_device_and_loads_the_config_once(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append(function.__name__)
            return function(*given)

        return call

    for module, name in ((devices, "choose_device"), (dry_run, "choose_device"), (files, "load_config")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    ran = run_here("pretrain", "tiny4", "--check", *SMALL, "--rounds", "1", "--device", "cpu")
    assert ran.code == 0, ran
    assert "tiny4 on cpu" in ran.stdout
    assert sorted(calls) == ["choose_device", "load_config"]


def test__check_reports_the_cost_of_a_step(run_here: RunHere) -> None:
    result = run_here("pretrain", "tiny4", "--check", *SMALL, "--rounds", "1", "--device", "cpu")
    assert result.code == 0, result.stderr
    for word in ("parameters", "GFLOP", "images/s", "peak memory", "20,000 iterations"):
        assert word in result.stdout


def test__a_short_run_is_reported_in_seconds(run_here: RunHere) -> None:
    result = run_here(
        "pretrain", "tiny4", "--check", *SMALL, "optimization.steps=2", "--rounds", "1", "--device", "cpu"
    )
    assert re.search(r"whole run +[\d.]+ s for 2 iterations", result.stdout), result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrain", "tiny4", "--check", "model.depth=two"], "valid integer"),
        (["pretrain", "nowhere.yaml", "--check"], "there is no file nowhere.yaml"),
        (["pretrain", "tiny4", "--check", "masking.ratio=0.001"], "change masking.ratio"),
        (["pretrain", "vitl14", "--check"], "a batch of 16,384 images does not fit the memory of this machine"),
        (
            ["pretrain", "tiny4", "--check", "clustering.prototypes=1000000000000"],
            "clustering.prototypes = 1000000000000",
        ),
        (
            ["pretrain", "tiny4", "--check", *SMALL, "optimization.student_temperature=1e-38", "--rounds", "1"],
            "the loss is inf",
        ),
        (["pretrain", "tiny4", "--check", "--device", "meta"], 'the device "meta" is not there'),
        (["pretrain", "tiny4", "--check", "--device", "toaster"], 'the device "toaster" is not there'),
        (
            ["pretrain", "tiny4", "--check", "clustering.precision=tf32", "--device", "cpu"],
            "the device cpu has no TF32",
        ),
        (
            ["pretrain", "tiny4", "--check", "clustering.chunk_mib=1", "--device", "cpu"],
            "clustering.chunk_mib = 1 is too little for one position",
        ),
    ],
)
def test__bad_input_gets_one_sentence_and_exit_code_2(run_here: RunHere, arguments: list[str], message: str) -> None:
    assert_refused(run_here(*arguments), message)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number in range(5):
        Image.fromarray(np.full((40, 50, 3), 40 * number, dtype=np.uint8)).save(folder / f"{number}.jpg")
    return folder


def test__from_a_folder_to_an_exported_encoder(run_here: RunHere, images: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    command = ["pretrain", "tiny4", *SMALL, "optimization.steps=2", "run.log_steps=1", "run.loggers=[]"]
    result = run(*command, "--data", str(images), "--out", out)
    assert result.returncode == 0, result.stderr
    assert f"capi.load('{out}')" in result.stdout
    assert "loss" in result.stderr
    assert_refused(run_here(*command, "--data", images, "--out", out), "--resume continues it")
    for name in ("safetensors", "released"):
        file = tmp_path / name
        ran = run_here("export", out, "--format", name, "--out", file)
        assert (ran.code, ran.stdout) == (0, f"wrote {file}\n")
        # The released layout has no place for the size that the run was trained at.
        assert ("give 32 x 32" in ran.stderr) == (name == "released")
        assert capi.load(file)(torch.randn(1, 3, 32, 32)).pooled.shape == (1, 32)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (0, "Stopped before the first step, so nothing is saved. The same command starts again."),
        (3, "Stopped at step 3, saved. The same command with --resume continues."),
    ],
)
def test__a_stop_says_what_is_saved(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int, said: str
) -> None:
    monkeypatch.setattr(api, "pretrain", lambda *_, **__: PretrainedRun(tmp_path / "run", step, finished=False))
    result = run_here("pretrain", "tiny4", "--data", tmp_path, "--out", tmp_path / "run")
    assert (result.code, result.stdout, result.stderr) == (130, f"{said}\n", "")


def test__checking_a_folder_tells_what_is_in_it(run_here: RunHere, images: Path) -> None:
    result = run_here("pretrain", "tiny4", *SMALL, "--check", "--rounds", "1", "--data", images)
    assert result.code == 0, result.stderr
    for word in ("5, of which 5 were looked at (jpg 5)", "50 x 40 to 50 x 40 pixels", "images/s in one process"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrain", "tiny4"], "pretrain needs --data"),
        (["pretrain", "tiny4", "--data", "IMAGES"], "pretrain needs --data"),
        (["pretrain", "tinny4", "--data", "IMAGES", "--out", "RUN"], 'did you mean "tiny4"?'),
        (["pretrain", "tiny4", "data.imag_size=3", "--data", "IMAGES", "--out", "RUN"], '"data.image_size"?'),
        (["pretrain", "tiny4", "--data", "nowhere", "--out", "RUN"], "there is no folder nowhere"),
        (["pretrain", "tiny4", "--data", "IMAGES/0.jpg", "--out", "RUN"], "is a file"),
        (["pretrain", "tiny4", "--data", "EMPTY", "--out", "RUN"], "holds no images"),
        (["pretrain", "tiny4", "--data", "IMAGES", "--out", "RUN", "--resume", "--overwrite"], "exclude each other"),
        (["pretrain", "tiny4", "--data", "IMAGES", "--out", "IMAGES"], "not empty and holds no run"),
        (
            ["pretrain", "tiny4", "--data", "IMAGES", "--out", "RUN", "--device", "cpu", "clustering.precision=tf32"],
            "the device cpu has no TF32: set clustering.precision=auto",
        ),
        (
            ["pretrain", "tiny4", "--data", "IMAGES", "--out", "RUN", "--device", "cpu", "clustering.chunk_mib=1"],
            "clustering.chunk_mib = 1 is too little for one position of",
        ),
        (["export", "nowhere", "--out", "FILE"], "there is no encoder nowhere"),
        (["export", "EMPTY", "--out", "FILE", "--format", "onx"], "not one of safetensors, released"),
        (["export", "EMPTY", "--out", "FILE", "--weights", "teecher"], 'did you mean "teacher"?'),
        (["demo", "--split", "train"], "not one of val, test"),
    ],
)
def test__bad_input_of_runs_writes_nothing(
    run_here: RunHere, images: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "EMPTY").mkdir()
    names = {"IMAGES": images, "RUN": tmp_path / "RUN", "EMPTY": tmp_path / "EMPTY", "FILE": tmp_path / "FILE"}
    for name, path in names.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    assert_refused(run_here(*arguments), message)
    assert [path.name for path in tmp_path.iterdir()] == ["EMPTY"]


def test__resuming_a_run_of_older_numerics_says_so_once(run_here: RunHere, images: Path, tmp_path: Path) -> None:
    file = tmp_path / "run" / "run.json"
    command = ["pretrain", "tiny4", *SMALL, "optimization.steps=2", "run.loggers=[]", "--data", str(images)]
    command += ["--out", str(tmp_path / "run")]
    assert run_here(*command).code == 0
    record = json.loads(file.read_text())
    assert record.pop("numerics") == record["starts"][0].pop("numerics") == NUMERICS
    file.write_text(json.dumps(record))
    warnings = run(*command, "--resume").stderr
    assert warnings.count("numerics") == 1
    assert f"this run has numerics 1, this capi {NUMERICS}: crops are cut before resizing;" in warnings
    assert "numerics" not in run_here(*command, "--resume").stderr
    # The run keeps the number it began with, each start has its own.
    record = json.loads(file.read_text())
    assert "numerics" not in record
    assert [start.get("numerics", 1) for start in record["starts"]] == [1, NUMERICS, NUMERICS]


def test__a_run_of_a_newer_version_is_refused(run_here: RunHere, images: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format": 99}')
    (tmp_path / "config.yaml").write_text("version: 1")
    for more in (["--resume"], ["--overwrite"]):
        result = run_here("pretrain", "tiny4", *SMALL, "--data", images, "--out", tmp_path, *more)
        assert_refused(result, "written by a newer capi")
    assert len(list(tmp_path.iterdir())) == 2


def test__a_full_disk_ends_with_one_sentence(images: Path, tmp_path: Path) -> None:
    """Files may not grow beyond 60 kB: the config fits, the checkpoint does not."""
    steps = ["optimization.steps=2", "run.loggers=[]", "data.workers=0"]
    arguments = ["pretrain", "tiny4", *SMALL, *steps, "--data", str(images), "--out", str(tmp_path / "run")]
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); "
        "from capi.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert "could not be saved" in result.stderr
    assert "Traceback" not in result.stderr


def test__nothing_is_written(run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here("pretrain", "tiny4", "--check", *SMALL, "--rounds", "1").code == 0
    assert list(tmp_path.iterdir()) == []
