import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from capi.runtime import atomic
from capi.runtime.atomic import atomic_folder, atomic_open, atomic_path, atomic_write, remove_leftovers, scratch_folder

ROOT = Path(__file__).parents[2]


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("content", ["after é\n", b"after\x00"])
def test__text_and_bytes_replace_a_file_and_leave_nothing_else(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    atomic_write(path, content)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert list(tmp_path.iterdir()) == [path]


def test__a_file_is_as_before_until_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with atomic_open(path, "w", encoding="utf-8") as file:
        file.write("after")
        file.flush()
        assert path.read_text() == "before"
    assert path.read_text() == "after"


@pytest.mark.parametrize("write", [atomic_open, atomic_path, atomic_folder])
def test__an_error_leaves_what_was_there_and_nothing_else(tmp_path: Path, write: object) -> None:
    path = tmp_path / "out"
    path.write_text("before")

    def fail() -> None:
        with write(path):  # type: ignore[operator]
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test__a_disk_that_fails_to_flush_leaves_the_file_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic_write(path, "before")

    def fail(_: int) -> None:
        raise OSError("disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk"):
        atomic_write(path, "after")
    assert path.read_text() == "before"


def test__a_writer_that_takes_a_path_gives_a_file_that_others_may_read(tmp_path: Path) -> None:
    path, usual = tmp_path / "deep" / "x.safetensors", tmp_path / "usual"
    usual.touch()
    with atomic_path(path) as partial:
        save_file({"a": torch.ones(3)}, partial)
    assert load_file(path)["a"].sum() == 3
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    assert list(path.parent.iterdir()) == [path]


def test__a_long_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".json")
    atomic_write(path, "{}")
    with atomic_path(path) as partial:
        partial.write_text("[]")
    assert path.read_text() == "[]"


@pytest.mark.parametrize("there", ["nothing", "folder", "file", "link"])
def test__a_folder_takes_the_place_of_whatever_is_there(tmp_path: Path, there: str) -> None:
    out, outside = tmp_path / "deep" / "out", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    out.parent.mkdir()
    if there == "folder":
        out.mkdir()
        (out / "older").touch()
    elif there == "file":
        out.touch()
    elif there == "link":
        out.symlink_to(outside)
    with atomic_folder(out) as partial:
        (partial / "file").write_text("new")
    assert [path.name for path in out.iterdir()] == ["file"]
    assert not out.is_symlink()
    assert list(out.parent.iterdir()) == [out]
    assert (outside / "precious").exists()


def test__a_folder_comes_back_where_the_last_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename, calls = tmp_path / "out", Path.rename, []
    out.mkdir()
    (out / "file").write_text("before")

    def fail_at_the_third(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 3:
            raise OSError("no room")
        return rename(path, target)

    def fill() -> None:
        with atomic_folder(out) as partial:
            (partial / "file").write_text("after")

    monkeypatch.setattr(Path, "rename", fail_at_the_third)
    with pytest.raises(OSError, match="no room"):
        fill()
    assert (out / "file").read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]


def test__links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.write_text("precious")
    folder.mkdir()
    (folder / "file").symlink_to(outside)
    (folder / ".file.partial").symlink_to(outside)
    atomic_write(folder / "file", "new")
    assert outside.read_text() == "precious"
    assert not (folder / "file").is_symlink()
    assert (folder / "file").read_text() == "new"


def test__a_link_under_the_random_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside, guessed = tmp_path / "outside", tmp_path / ".file.guessed.partial"
    outside.write_text("precious")
    guessed.symlink_to(outside)
    monkeypatch.setattr(atomic, "_partial_name", lambda _: guessed)
    with pytest.raises(FileExistsError):
        atomic_write(tmp_path / "file", "new")
    assert outside.read_text() == "precious"


_RACE = """
import sys
from pathlib import Path
from capi.runtime.atomic import atomic_folder, atomic_path, atomic_write

who, out = sys.argv[1], Path(sys.argv[2])
for _ in range(60):
    atomic_write(out / "text", who * 200_000)
    with atomic_path(out / "path") as partial:
        partial.write_text(who * 200_000)
    with atomic_folder(out / "folder") as partial:
        for name in ("a", "b"):
            (partial / name).write_text(who * 1000)
"""


def test__processes_that_write_the_same_files_leave_whole_ones(tmp_path: Path) -> None:
    racing = [run_python(_RACE, who, tmp_path) for who in "abc"]
    for process in racing:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "path", "text"]
    for name in ("text", "path"):
        content = (tmp_path / name).read_text()
        assert len(content) == 200_000
        assert len(set(content)) == 1
    parts = [(tmp_path / "folder" / name).read_text() for name in ("a", "b")]
    assert parts[0] == parts[1]
    assert len(parts[0]) == 1000


_KILLED = """
import sys
from pathlib import Path
from capi.runtime.atomic import atomic_folder, atomic_open

out = Path(sys.argv[1])
with atomic_open(out / "file") as file, atomic_folder(out / "folder") as folder:
    (folder / "half").touch()
    print("writing", flush=True)
    sys.stdin.read()
"""


def test__what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    partial = sorted(tmp_path.iterdir())
    assert len(partial) == 2
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == partial
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    atomic._LOOKED.clear()
    atomic_write(tmp_path / "other", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test__where_locks_do_not_work_a_leftover_stays_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(atomic, "lock_descriptor", refused)
    new, old = (tmp_path / f".x.{digit * 16}.partial" for digit in "01")
    for path in (new, old):
        path.mkdir()
    before = time.time() - 2 * 24 * 60 * 60
    os.utime(old, (before, before))
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [new]


def test__files_of_others_are_no_leftovers(tmp_path: Path) -> None:
    names = ["film.mp4.partial", ".model.pth.partial", ".x.0123.partial", ".partial-7"]
    for name in names:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test__a_scratch_folder_lasts_as_long_as_it_is_needed(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "deep" / "work") as folder:
        (folder / "inside").mkdir()
        assert folder.parent == tmp_path / "deep"
    assert list((tmp_path / "deep").iterdir()) == []


def test__what_another_process_has_removed_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "left").touch()
    remove_all, calls = shutil.rmtree, []

    def interrupted(path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            (path / "inner").rmdir()
            raise FileNotFoundError(path / "inner")
        remove_all(path)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    atomic.remove(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
