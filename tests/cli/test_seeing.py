import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import capi
from capi.config.files import parse_config
from capi.config.schema import Config
from tests.cli.conftest import RunHere
from tests.photos import noise_photos


@pytest.fixture
def run(small_config: Config, tmp_path: Path) -> Path:
    images = noise_photos(tmp_path / "images")
    tree = small_config.model_dump(mode="json")
    tree["optimization"] |= {"steps": 4}
    tree["run"] |= {"loggers": [], "report": False, "snapshots": 1, "log_steps": 4}
    tree["data"] |= {"workers": 0}
    return capi.pretrain(parse_config(tree), data=images, out=tmp_path / "run", device="cpu").path


def test__report_says_where_it_wrote(run_here: RunHere, run: Path, tmp_path: Path) -> None:
    ran = run_here("report", run, "--device", "cpu")
    assert (ran.code, ran.stdout) == (0, f"wrote {run / 'report.html'}: open it in a browser\n")
    other = tmp_path / "other.html"
    assert run_here("report", run, "--out", other, "--watts", 100, "--carbon", 0.1, "--device", "cpu").code == 0
    assert "100" in other.read_text(encoding="utf-8")


def test__doctor_ends_with_1_on_an_alarm(run_here: RunHere, run: Path) -> None:
    well = run_here("doctor", run)
    assert well.code == 0
    assert "finished" in well.stdout
    metrics = run / "metrics.jsonl"
    record = metrics.read_text().splitlines()[-1].replace('"step": 4', '"step": 3')
    # Null is how metrics say NaN, of which several in a row are no accident.
    broken = [line.replace('"target_entropy": ', '"target_entropy": 1e9, "was": ') for line in [record] * 5]
    metrics.write_text("\n".join([*broken, ""]))
    ill = run_here("doctor", run)
    assert ill.code == 1
    assert "Entropy of the targets" in ill.stdout


@pytest.mark.parametrize("command", ["doctor", "report", "watch"])
def test__a_folder_that_is_no_run_is_reported_in_a_sentence(run_here: RunHere, tmp_path: Path, command: str) -> None:
    ran = run_here(command, tmp_path)
    assert ran.code == 2
    assert "no run" in ran.stderr


def test__watch_serves_until_it_is_interrupted(run: Path) -> None:
    command = [sys.executable, "-u", "-m", "capi", "watch", str(run), "--watts", "123", "--carbon", "0.456"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
        with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310 - our own server
            page = answer.read()
        assert b"<!DOCTYPE html>" in page
        # What the cost is computed from, as in a report.
        assert b"123 W" in page
        assert b"0.456 kg" in page
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "Traceback" not in errors


def test__explore_refuses_what_is_no_model_or_no_image(run_here: RunHere, run: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run_here("explore", run, empty).code == 2
    ran = run_here("explore", tmp_path / "nowhere.pth")
    assert ran.code == 2
    assert "nowhere.pth" in ran.stderr
