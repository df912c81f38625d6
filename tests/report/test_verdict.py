"""Alarms while a run trains, doctor, report and watch are one judgement: on the same runs they say the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capi.config.schema import Config
from capi.report.doctor import diagnosis_text, doctor
from capi.report.run_report import gather, write_report
from capi.report.watch import WatchServer
from capi.train.health import Watchman
from capi.train.run import run_facts
from capi.zoo.run_folder import RunFolder
from tests.report.test_doctor import config, write_run  # noqa: F401

# What each kind of run writes from a quarter of it on, and what is wrong with it.
RUNS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "healthy": ({}, set()),
    "collapsed": (
        {"effective_rank": 1.0, "prototype_perplexity": 0.01, "dead_prototypes": 0.99},
        {"Effective rank of the features", "Prototypes in use", "Dead prototypes"},
    ),
    "NaN": (
        {"student_loss": None, "effective_rank": None},
        {"Loss of the student", "Effective rank of the features"},
    ),
    "positional collapse": (
        {"position_share": 0.5, "position_information": 1.0},
        {"Position in the features", "Position in the prototypes"},
    ),
    "unlearned": ({"student_loss": 4.5, "folder/knn/teacher": 0.1}, {"Loss of the student", "folder/knn/teacher"}),
}


# Findings that no record of the run shows: only its folder does.
LOST, FAR = "Checkpoint", "Range of the images"


@pytest.mark.parametrize("wrong", [LOST, FAR])
def test__what_only_the_folder_shows_is_the_same_everywhere(
    config: Config,  # noqa: F811
    tmp_path: Path,
    wrong: str,
) -> None:
    changes, expected = RUNS["healthy" if wrong == LOST else "collapsed"]
    data = {"path": "photos", "images": 100, "fingerprint": "photos"}
    dark = {"statistics": {"mean": [0.01] * 3, "std": [0.005] * 3}} if wrong == FAR else {}
    run = write_run(tmp_path / "run", config, changes=changes, data=data | dark)
    if wrong == LOST:
        shutil.rmtree(run / "checkpoints")
    diagnosis, report = doctor(run), gather(run)
    alarms = {finding.title for finding in diagnosis.of("alarm")}
    assert alarms == {finding.title for finding in report.alarms} == {*expected, wrong}
    assert diagnosis.sentence == report.verdict
    shown = write_report(run).read_text(encoding="utf-8")
    with WatchServer([run], port=0) as server:
        watched = server.answer("/")
    assert watched is not None
    for text in (diagnosis_text(diagnosis).plain, shown, watched[1]):
        assert report.verdict in text
        assert wrong in text


@pytest.mark.parametrize("name", RUNS)
def test__alarms_doctor_report_and_watch_say_the_same(
    config: Config,  # noqa: F811
    tmp_path: Path,
    name: str,
) -> None:
    changes, expected = RUNS[name]
    run = write_run(tmp_path / "run", config, changes=changes)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    watchman = Watchman(run_facts(config, RunFolder(run).record()))
    raised = {finding.title for record in records for finding in watchman.see(record)}
    diagnosis, report = doctor(run), gather(run)
    assert (
        {finding.title for finding in diagnosis.of("alarm")} == {finding.title for finding in report.alarms} == expected
    )
    assert raised == expected
    assert diagnosis.sentence == report.verdict
    said = diagnosis_text(diagnosis).plain
    shown = write_report(run).read_text(encoding="utf-8")
    assert report.verdict in said
    assert report.verdict in shown
    with WatchServer([run], port=0) as server:
        watched = server.answer("/")
    assert watched is not None
    assert report.verdict in watched[1]
    for finding in report.alarms:
        assert finding.text in said
        assert finding.text in shown


@pytest.mark.parametrize("name", ["healthy", "collapsed"])
def test__the_exit_code_is_the_verdict(config: Config, tmp_path: Path, name: str) -> None:  # noqa: F811
    changes, expected = RUNS[name]
    run = write_run(tmp_path / "run", config, changes=changes)
    command = [sys.executable, "-m", "capi", "doctor", str(run)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == (1 if expected else 0), ended.stderr
    assert gather(run).verdict in ended.stdout
