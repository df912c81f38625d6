import builtins
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from capi.errors import CapiError
from capi.train.metrics import LOGGERS, JsonLines, close, cut_after, require_loggers
from capi.zoo.run_folder import read_metrics


def test__records_come_back_and_nan_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write = JsonLines(path)
    write({"step": 1, "loss": 0.1})
    write({"step": 2, "loss": math.nan})
    # Whole lines are on the disk before the file is closed.
    assert read_metrics(path) == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": None}]
    close(write)


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test__the_name_of_a_run_at_a_tracker_is_read_from_a_regular_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def late(*_: object) -> None:
        raise AssertionError("it waits for the FIFO")

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    os.mkfifo(tmp_path / f".{name}-id")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        with pytest.raises(CapiError, match=f"{name}-id cannot be read .a pipe or device"):
            LOGGERS[name](tmp_path, 0, {})
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test__a_line_cut_off_in_the_middle_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    assert read_metrics(tmp_path / "none") == []


def test__cutting_keeps_the_step_itself_and_writing_continues(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write = JsonLines(path)
    for step in range(1, 6):
        write({"step": step})
    write.cut_after(3)
    write({"step": 4, "again": 1})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": 1}]
    close(write)
    cut_after(path, 0)
    assert path.read_text() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test__tensorboard_gets_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = LOGGERS["tensorboard"](tmp_path, 0, {})
    for step in (1, 2):
        log({"step": step, "student_loss": 3.0 / step, "missing": None})
    close(log)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("student_loss")] == [(1, 3.0), (2, 1.5)]
    assert events.Tags()["scalars"] == ["student_loss"]


def test__a_resumed_tensorboard_hides_what_is_written_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        log = LOGGERS["tensorboard"](tmp_path, start, {})
        for step in steps:
            log({"step": step, "loss": float(10 * start + step)})
        close(log)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1), (2, 2), (3, 23), (4, 24)]


@pytest.mark.parametrize("name", LOGGERS)
def test__a_missing_library_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(module: str, *arguments: Any, **options: Any) -> Any:
        if module in {"wandb", "torch.utils.tensorboard", "mlflow.entities", "trackio"}:
            raise ImportError(module)
        return real(module, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(CapiError, match=rf"capi\[{name}\]"):
        LOGGERS[name](tmp_path, 0, {})


def test__wandb_gets_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library wants an account, so a stand-in receives what it would."""
    import sys
    import types

    seen: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: seen.append((step, values)), finish=lambda: seen.append("finished")
    )
    run_ids: list[str] = []

    def init(**options: Any) -> Any:
        seen.append(options["config"])
        run_ids.append(options["id"])
        return run

    stand_in = types.SimpleNamespace(init=init)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)  # type: ignore[arg-type]
    log = LOGGERS["wandb"](tmp_path, 0, {"seed": 3, "init": {"encoder": "/home/ann/run"}})
    log({"step": 1, "loss": 2.0})
    close(log)
    assert seen == [{"seed": 3, "init": {"encoder": "run"}}, (1, {"loss": 2.0}), "finished"]
    LOGGERS["wandb"](tmp_path, 1, {})
    assert run_ids[0] == run_ids[1]


def _two_starts(name: str, folder: Path) -> None:
    """A run that is stopped after a step, and resumed for another."""
    for step, entropy in ((1, 0.5), (2, None)):
        log = LOGGERS[name](folder, step - 1, {"seed": 3, "init": {"encoder": "/home/ann/run"}})
        log({"step": step, "loss": float(step), "target_entropy": entropy, "demo/knn/test/teacher": 0.25})
        close(log)


def test__mlflow_gets_the_same_records_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # The test puts back what the logger sets.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    _two_starts("mlflow", tmp_path)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("capi")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    assert run.data.params == {"seed": "3", "init.encoder": "run"}
    for metric, expected in (("loss", [(1, 1.0), (2, 2.0)]), ("target_entropy", [(1, 0.5)])):
        history = client.get_metric_history(run.info.run_id, metric)
        assert [(each.step, each.value) for each in history] == expected
    assert run.data.metrics["demo/knn/test/teacher"] == 0.25


def test__a_run_outlives_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log = LOGGERS["mlflow"](tmp_path, 0, {})
    log({"step": 1, "loss": 1.0})
    (here,) = (tmp_path / "mlflow").glob(f"*/{(tmp_path / '.mlflow-id').read_text()}")
    shutil.rmtree(here)
    for step in (2, 3):
        log({"step": step, "loss": 1.0})
    close(log)
    assert [record.levelname for record in caplog.records if "MLflow gets no more metrics" in record.message] == [
        "WARNING"
    ]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(CapiError, match=r"MLflow cannot write to http://127\.0\.0\.1:1 .* set MLFLOW_TRACKING_URI"):
        LOGGERS["mlflow"](tmp_path / "other", 0, {})


def test__trackio_gets_the_same_records_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    monkeypatch.setenv("TRACKIO_PROJECT", "tests")
    _two_starts("trackio", tmp_path)
    assert capsys.readouterr().out == ""
    name = (tmp_path / ".trackio-id").read_text()
    assert sqlite_storage.SQLiteStorage.get_runs("tests") == [name]
    logs = sqlite_storage.SQLiteStorage.get_logs("tests", name)
    assert [(each["step"], each["loss"], each["demo/knn/test/teacher"]) for each in logs] == [
        (1, 1.0, 0.25),
        (2, 2.0, 0.25),
    ]
    assert sqlite_storage.SQLiteStorage.get_run_config("tests", name)["init"] == {"encoder": "run"}


def test__a_roll_back_is_taken_back_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log: Any = LOGGERS["tensorboard"](tmp_path, 0, {})
    for step in (1, 2, 3):
        log({"step": step, "loss": float(step)})
    close(log)
    log.cut_after(1)
    log({"step": 2, "loss": 9.0})
    close(log)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1), (2, 9)]


def test__loggers_that_are_missing_are_reported() -> None:
    require_loggers(["tensorboard"])
    with pytest.raises(CapiError, match=r"capi\[wandb\]"):
        require_loggers(["wandb"])
    with pytest.raises(CapiError, match=r'run.loggers=tensorbord is none of tensorboard, wandb.*"tensorboard"'):
        require_loggers(["tensorbord"])
