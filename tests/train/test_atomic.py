from pathlib import Path

import pytest

from capi.train.atomic import write_atomically


def test__writing_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")

    def fail(_: int) -> None:
        raise OSError("disk")

    monkeypatch.setattr("capi.train.atomic.os.fsync", fail)
    with pytest.raises(OSError, match="disk"):
        write_atomically(path, "after")
    assert path.read_text() == "before"
