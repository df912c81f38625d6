import os
from pathlib import Path
from typing import Any

import pytest

from capi.errors import CapiError
from capi.runtime.atomic import make_folder, open_nofollow, refuse_outside_links, walk_folder
from capi.runtime.lock import locked


@pytest.mark.parametrize("mode", ["a", "w", "r+"])
def test__a_file_is_not_opened_through_a_link(tmp_path: Path, mode: str) -> None:
    outside, link = tmp_path / "outside", tmp_path / "link"
    outside.write_text("precious")
    link.symlink_to(outside)
    with pytest.raises(CapiError, match="is a symbolic link"):
        open_nofollow(link, mode)
    assert outside.read_text() == "precious"


def test__a_dangling_link_makes_no_file(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "outside")
    with pytest.raises(CapiError, match="is a symbolic link"):
        open_nofollow(link, "a")
    assert not (tmp_path / "outside").exists()


def test__a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for mode in ("a", "r"):
        with pytest.raises((CapiError, OSError)):
            open_nofollow(tmp_path / "pipe", mode)


def test__a_file_is_appended_to(tmp_path: Path) -> None:
    for word in ("a", "b"):
        with open_nofollow(tmp_path / "file", "a", encoding="utf-8") as file:
            file.write(word)
    assert (tmp_path / "file").read_text() == "ab"


def test__links_may_stay_inside_and_the_folder_may_be_one(tmp_path: Path) -> None:
    run = tmp_path / "disk" / "run"
    (run / "sub").mkdir(parents=True)
    (run / "file").touch()
    (run / "sub" / "near").symlink_to("../file")
    (run / "whole").symlink_to(run / "sub")
    (run / "dangling").symlink_to("nothing")
    (tmp_path / "link").symlink_to(run)
    refuse_outside_links(run)
    refuse_outside_links(tmp_path / "link")


@pytest.mark.parametrize("target", ["/etc/passwd", "../runner/x", "..", "/nowhere/at/all"])
def test__a_link_that_leads_out_is_refused(tmp_path: Path, target: str) -> None:
    run = tmp_path / "run"
    (run / "sub").mkdir(parents=True)
    (run / "sub" / "hop").symlink_to(f"../{target}" if target.startswith("..") else target)
    (run / "link").symlink_to("sub/hop")
    with pytest.raises(CapiError, match="leads out of it") as refused:
        refuse_outside_links(run)
    assert "move the run folder as a whole" in str(refused.value)


def test__folders_of_results_are_not_made_through_links(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    for folder in (out, outside):
        folder.mkdir()
    (out / "link").symlink_to(outside)
    make_folder(out / "a" / "b", inside=out)
    with pytest.raises(CapiError, match="leads out of"):
        make_folder(out / "link" / "b", inside=out)
    assert (out / "a" / "b").is_dir()
    assert list(outside.iterdir()) == []


def test__a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "outside")
    with pytest.raises(CapiError, match="is a symbolic link"), locked(tmp_path / ".lock", busy="busy"):
        pass
    assert not (tmp_path / "outside").exists()


def test__a_walk_meets_the_files_that_os_walk_meets(tmp_path: Path) -> None:
    for name in ("a/b/c/one", "a/b/two", "a/.hidden/three", ".four", "five"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "linked").symlink_to(tmp_path / "a" / "b")
    stored = {
        os.path.relpath(os.path.join(folder, name), tmp_path)
        for folder, folders, files in os.walk(tmp_path)
        for name in [*files, *(each for each in folders if os.path.islink(os.path.join(folder, each)))]
    }
    assert {name for name, _ in walk_folder(tmp_path, follow_links=False)} == stored
    visible = {"a/b/c/one", "a/b/two", "five", "linked/c/one", "linked/two"}
    assert {name for name, _ in walk_folder(tmp_path)} == visible


def test__a_folder_that_goes_while_a_run_is_walked_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "run.json").touch()
    scandir = os.scandir

    def scandir_late(place: str) -> Any:
        if place.endswith("checkpoint"):
            os.rmdir(place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", scandir_late)
    assert [name for name, _ in walk_folder(tmp_path, follow_links=False)] == ["run.json"]
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(CapiError, match="cannot be read"):
        list(walk_folder(tmp_path))
