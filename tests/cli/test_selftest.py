"""`capi selftest` passes here, and a machine that computes otherwise or forgets something fails it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from capi.train import selftest
from capi.train.checkpoint import Checkpoints
from tests.cli.conftest import RunHere, assert_refused


def checks(file: Path) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(file.read_text())["checks"]}


@pytest.mark.long
def test__this_machine_passes_all_checks(run_here: RunHere, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    ran = run_here("selftest", "--device", "cpu", "--out", file)
    assert ran.code == 0, ran
    results = checks(file)
    assert list(results) == list(selftest.CHECKS)
    # A machine without a compiler skips that check.
    assert {check["status"] for name, check in results.items() if name != "compile"} == {"passed"}
    assert results["compile"]["status"] != "failed"
    assert results["processes"]["numbers"]["processes"] == 2
    assert ran.stdout.startswith("capi ")
    assert all(name in ran.stdout for name in selftest.CHECKS)
    assert str(Path.home()) not in ran.stdout + file.read_text()


def test__products_of_another_precision_and_lost_moments_are_failures(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Checkpoints.load

    def forgetful(self: Checkpoints, learner: Any, *arguments: Any) -> Any:
        position = load(self, learner, *arguments)
        learner.student_optimizer.state.clear()
        return position

    monkeypatch.setattr(selftest, "as_on_accelerator", lambda: torch.autocast("cpu", torch.bfloat16))
    monkeypatch.setattr(Checkpoints, "load", forgetful)
    file = tmp_path / "found.json"
    some = ["--only", "resume", "--only", "install", "--only", "exactness"]
    ran = run_here("selftest", *some, "--device", "cpu", "--out", file, "--json")
    assert ran.code == 1
    assert json.loads(ran.stdout) == json.loads(file.read_text())
    results = checks(file)
    assert {name: check["status"] for name, check in results.items()} == {
        "install": "passed",
        "exactness": "failed",
        "resume": "failed",
    }
    assert "the losses" in results["exactness"]["sentence"]
    assert "resumed at step 4 of 6" in results["resume"]["sentence"]


def test__what_cannot_be_checked_or_written_is_refused_before_anything_runs(run_here: RunHere, tmp_path: Path) -> None:
    assert_refused(run_here("selftest", "--only", "exactnes"), 'did you mean "exactness"')
    assert_refused(run_here("selftest", "--out", tmp_path), "cannot be written")
    assert_refused(run_here("selftest", "--device", "tpu"), 'the device "tpu" is not there')
