"""The cache of published files: complete or not there, checked, and shared by processes."""

import hashlib
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.zoo.published import cache
from capi.zoo.published.cache import cache_folder, cached_file
from capi.zoo.published.downloads import Patience
from capi.zoo.published.registry import RELEASED, ReleasedModel
from tests.zoo.serving import Server, serving

CONTENTS = os.urandom(2**20)
QUICK = Patience(attempts=2, first_wait=0.001, timeout=5.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "torch" / "hub" / "checkpoints"


def model_at(server: Server) -> ReleasedModel:
    return replace(RELEASED["capi_vitl14_lvd"], address=server.address)


def test__the_cache_is_that_of_torch_hub(folder: Path) -> None:
    assert cache_folder() == folder


def test__a_file_is_downloaded_once_and_its_checksum_recorded(folder: Path) -> None:
    with serving(CONTENTS) as server:
        first, second = (cached_file(model_at(server), patience=QUICK) for _ in range(2))
    assert first == second == folder / "model.pth"
    assert first.read_bytes() == CONTENTS
    assert len(server.requests) == 1
    record = (folder / "model.pth.sha256").read_text()
    assert record == f"{hashlib.sha256(CONTENTS).hexdigest()}  model.pth\n"
    checked = subprocess.run(["sha256sum", "-c", "model.pth.sha256"], cwd=folder, check=False, capture_output=True)
    assert checked.returncode == 0


def test__a_file_that_someone_put_there_is_used_and_recorded(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "model.pth").write_bytes(CONTENTS)
    with serving(b"other") as server:
        assert cached_file(model_at(server)).read_bytes() == CONTENTS
    assert server.requests == []
    assert (folder / "model.pth.sha256").is_file()


def test__a_file_that_changed_is_told_with_what_to_delete(folder: Path) -> None:
    with serving(CONTENTS) as server:
        path = cached_file(model_at(server))
        path.write_bytes(CONTENTS[:-1] + b"x")
        with pytest.raises(CapiError) as caught:
            cached_file(model_at(server))
        assert str(caught.value) == (
            f"{path} has changed since it was first used: delete it and {path}.sha256, then it is downloaded again"
        )
        path.unlink()
        Path(f"{path}.sha256").unlink()
        assert cached_file(model_at(server)).read_bytes() == CONTENTS


def test__a_file_that_was_replaced_at_its_source_is_not_taken_for_the_old_one(folder: Path) -> None:
    with serving(CONTENTS) as server:
        path = cached_file(model_at(server))
        path.unlink()
        server.contents = CONTENTS[::-1]
        with pytest.raises(CapiError, match=r"is not the file of before: .* delete .*model\.pth\.sha256 and load it"):
            cached_file(model_at(server))
        assert not path.exists()
        assert not list(folder.glob("*partial*"))
        Path(f"{path}.sha256").unlink()
        assert cached_file(model_at(server)).read_bytes() == CONTENTS[::-1]


def test__a_download_that_ended_early_leaves_no_file_and_is_resumed(folder: Path) -> None:
    with serving(CONTENTS, cuts=[5000, 0, 0]) as server:
        with pytest.raises(CapiError, match="the connection ended after 5000 of 1048576 bytes"):
            cached_file(model_at(server), patience=QUICK)
        assert not (folder / "model.pth").exists()
        server.cuts.clear()
        assert cached_file(model_at(server), patience=QUICK).read_bytes() == CONTENTS
    assert server.requests[-1]["Range"] == "bytes=5000-"


def test__offline_it_is_told_which_file_to_put_where(folder: Path) -> None:
    with serving(CONTENTS) as server:
        pass
    with pytest.raises(CapiError) as caught:
        cached_file(model_at(server), patience=QUICK)
    message = str(caught.value)
    assert "capi_vitl14_lvd is not on this machine" in message
    assert server.address in message
    assert f"put the file from there at {folder / 'model.pth'}" in message
    assert "\n" not in message


def test__a_cache_that_is_kept_by_others_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    (folder / "model.pth").write_bytes(CONTENTS)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache, "locked", refused)
    model = replace(RELEASED["capi_vitl14_lvd"], address="https://nowhere.invalid/model.pth")
    assert cached_file(model).read_bytes() == CONTENTS
    (folder / "model.pth").unlink()
    with pytest.raises(CapiError, match=r"cannot be written \(Permission denied\): set TORCH_HOME"):
        cached_file(model)


LOADS = """
import sys
from dataclasses import replace
from capi.zoo.published.cache import cached_file
from capi.zoo.published.registry import RELEASED
print("ready", flush=True)
sys.stdin.readline()
print(len(cached_file(replace(RELEASED["capi_vitl14_lvd"], address=sys.argv[1])).read_bytes()))
"""


def test__two_processes_load_the_same_name_at_once(folder: Path) -> None:
    with serving(CONTENTS, pause=0.3) as server:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", LOADS, server.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        outputs = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate()[0].strip() for process in processes]
    assert outputs == [str(len(CONTENTS))] * 2
    assert len(server.requests) == 1
    assert sorted(path.name for path in folder.iterdir()) == [".model.pth.lock", "model.pth", "model.pth.sha256"]


def test__where_there_is_no_terminal_a_line_is_written_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    report = cache._lines("capi_vitl14_lvd", clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "capi"):
        for seconds, done in ((1.0, 2**20), (16.0, 3 * 2**20), (17.0, 4 * 2**20), (40.0, 5 * 2**20)):
            now[0] = seconds
            report(done, 10 * 2**20)
    assert caplog.messages == ["capi_vitl14_lvd: 3 of 10 MiB", "capi_vitl14_lvd: 5 of 10 MiB"]


def test__on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with cache._shown("capi_vitl14_lvd") as report:
        report(2**20, 4 * 2**20)
    assert "capi_vitl14_lvd" in capsys.readouterr().err
