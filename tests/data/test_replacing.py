from pathlib import Path

import pytest

from capi.data.replacing import replacing


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
