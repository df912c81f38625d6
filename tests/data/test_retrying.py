from pathlib import Path

import pytest

from capi.data.retrying import PAUSES, read_bytes, retried
from capi.data.sources import Encoded, Files


class Failing:
    """Fails so many times, then gives a value."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors, self.asked = errors, 0

    def __call__(self) -> str:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return "read"


def test__an_error_of_the_moment_is_tried_again_with_growing_pauses() -> None:
    pauses: list[float] = []
    read = Failing([OSError(5, "Input/output error"), TimeoutError("slow"), OSError(116, "Stale file handle")])
    assert retried(read, pauses.append) == "read"
    assert pauses == list(PAUSES)
    assert pauses == sorted(pauses)


def test__after_the_last_pause_it_is_given_up() -> None:
    read = Failing([OSError(5, f"error {number}") for number in range(10)])
    with pytest.raises(OSError, match=f"error {len(PAUSES)}"):
        retried(read, lambda _: None)
    assert read.asked == len(PAUSES) + 1


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), PermissionError(13, "denied"), ValueError("x")])
def test__what_lasts_is_not_tried_again(error: Exception) -> None:
    read = Failing([error])
    with pytest.raises(type(error)):
        retried(read, lambda _: None)
    assert read.asked == 1


def test__bytes_come_from_files_and_from_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"in a file")
    assert read_bytes(Files(tmp_path, ["a"]), 0) == b"in a file"
    assert read_bytes(Encoded(["a"], [b"in memory"]), 0) == b"in memory"
