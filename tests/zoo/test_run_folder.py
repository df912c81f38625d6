import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from capi.errors import CapiError
from capi.runtime.atomic import atomic_write
from capi.zoo import run_folder
from capi.zoo.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create("seed: 1\n", {"seed": 1, "data": {}})
    return folder


def test__only_an_empty_or_missing_folder_may_become_a_run(tmp_path: Path, folder: RunFolder) -> None:
    RunFolder(tmp_path / "new").refuse_unless_free()
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").refuse_unless_free()
    with pytest.raises(CapiError, match="a run already: `resume=True` continues it, `overwrite=True` starts again"):
        folder.refuse_unless_free()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(CapiError, match="not empty and holds no run"):
        RunFolder(tmp_path / "other").refuse_unless_free()
    (tmp_path / "file").write_text("")
    with pytest.raises(CapiError, match="is a file"):
        RunFolder(tmp_path / "file").refuse_unless_free()


def test__clearing_removes_runs_alone(tmp_path: Path, folder: RunFolder) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    RunFolder(other).clear()
    assert (other / "thesis.txt").exists()
    folder.clear()
    assert not folder.path.exists()


def test__a_run_of_a_newer_version_is_neither_read_nor_removed(folder: RunFolder) -> None:
    atomic_write(folder.path / "run.json", json.dumps({"format": 99}))
    for action in (folder.record, folder.clear):
        with pytest.raises(CapiError, match="written by a newer capi"):
            action()
    assert folder.exists


@pytest.mark.parametrize("program", ["/usr/bin/capi", "/site-packages/capi/__main__.py"])
def test__the_command_is_noted_as_it_is_typed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr("sys.argv", [program, "pretrain", "demo"])
    folder.note_start(0, "cpu")
    monkeypatch.setattr("sys.argv", ["train.py", "demo"])
    folder.note_start(1, "cpu")
    assert [start["command"] for start in folder.record()["starts"]] == [
        ["capi", "pretrain", "demo"],
        ["train.py", "demo"],
    ]


def test__each_start_leaves_command_versions_machine_and_git(folder: RunFolder) -> None:
    folder.note_start(0, "cpu")
    folder.note_start(12, "cpu")
    starts = folder.record()["starts"]
    assert [start["step"] for start in starts] == [0, 12]
    assert starts[0]["command"]
    assert {"python", "capi", "torch", "numpy", "pillow"} <= starts[0]["versions"].keys()
    assert starts[0]["machine"]["cores"] > 0
    assert starts[0]["git"] is None or len(starts[0]["git"]["commit"]) == 40


def test__asking_git_leaves_its_index_alone(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code" / "module.py"
    code.parent.mkdir()
    code.write_text("1")
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    for words in (["init"], ["add", "."], [*who, "commit", "-m", "x"]):
        subprocess.run(["git", *words], cwd=code.parent, check=True, capture_output=True)
    # The same content with another time: git would note it in the index.
    os.utime(code, (1, 1))
    before = (code.parent / ".git" / "index").read_bytes()
    monkeypatch.setattr(run_folder, "__file__", str(code))
    folder.note_start(0, "cpu")
    assert folder.record()["starts"][0]["git"]["changed"] is False
    assert (code.parent / ".git" / "index").read_bytes() == before


def test__a_folder_that_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="is no run"):
        RunFolder(tmp_path).config_text()
    with pytest.raises(CapiError, match=r"is no run: it has no run\.json"):
        RunFolder(tmp_path).record()
    (tmp_path / "run.json").write_text("{half")
    with pytest.raises(CapiError, match="is not valid JSON"):
        RunFolder(tmp_path).record()


def test__two_processes_cannot_train_one_run(folder: RunFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from capi.zoo.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).locked(): print('in')"
    )
    command = [sys.executable, "-c", code, str(folder.path)]
    with folder.locked():
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "is being trained by another process" in refused.stderr
    allowed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert allowed.stdout == "in\n"


def test__a_folder_whose_making_was_interrupted_is_free(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / ".config.yaml.0123456789abcdef.partial").write_text("half")
    folder.refuse_unless_free()
    folder.create("seed: 1\n", {"seed": 1})
    assert folder.config_text() == "seed: 1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "run.json"]
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CapiError, match="not empty and holds no run"):
        folder.refuse_unless_free()


def test__another_machine_is_noted(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    folder.note_start(0, "cpu")
    folder.note_start(3, "cuda")
    assert [record.getMessage() for record in caplog.records] == ["device was cpu, is cuda: last digits may differ"]


def test__the_name_of_an_accelerator_is_noted(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Accelerator of {device}")
    folder.note_start(0, "cuda:1")
    assert folder.record()["starts"][-1]["machine"]["accelerator"] == "Accelerator of cuda:1"


def test__a_record_of_another_kind_is_reported(folder: RunFolder) -> None:
    (folder.path / "run.json").write_text("[1, 2]")
    with pytest.raises(CapiError, match="holds a list, expected an object"):
        folder.record()


def test__a_folder_that_another_process_made_is_waited_for(tmp_path: Path) -> None:
    late = RunFolder(tmp_path / "run")
    with pytest.raises(CapiError, match="is not the same folder for all processes: give `out` on a file system"):
        late.wait_until_seen(seconds=0.3)
    maker = threading.Timer(0.2, lambda: late.create("seed: 0\n", {}))
    maker.start()
    late.wait_until_seen(seconds=20.0)
    maker.join()
    assert late.exists
