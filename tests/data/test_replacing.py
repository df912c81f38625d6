from pathlib import Path

import pytest

from capi.data.replacing import replacing, replacing_folder


def test__a_file_is_as_before_until_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with replacing(path) as partial:
        partial.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test__an_error_leaves_the_file_and_nothing_else(tmp_path: Path) -> None:
    def fail() -> None:
        with replacing(tmp_path / "file") as partial:
            partial.write_text("half")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        fail()
    assert list(tmp_path.iterdir()) == []


def fill(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "file").write_text(text)


@pytest.mark.parametrize("there", [False, True])
def test__a_folder_is_as_before_until_it_is_complete(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "deep" / "out"
    if there:
        fill(out, "before")
        (out / "older").touch()
    with replacing_folder(out) as partial:
        fill(partial, "after")
        assert out.exists() == there
    assert [path.name for path in out.iterdir()] == ["file"]
    assert (out / "file").read_text() == "after"
    assert list(out.parent.iterdir()) == [out]


def test__a_folder_comes_back_where_the_last_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename = tmp_path / "out", Path.rename
    fill(out, "before")

    def fail_for_the_new_one(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError("no room")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="no room"), replacing_folder(out) as partial:
        fill(partial, "after")
    assert (out / "file").read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]


def test__an_error_leaves_the_folder_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "before")

    def fail() -> None:
        with replacing_folder(out) as partial:
            fill(partial, "after")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        fail()
    assert (out / "file").read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]
