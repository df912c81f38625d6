import pytest

from capi.runtime.documents import UnfitFileError
from capi.runtime.retry import FILE_PAUSES, retry


class Failing:
    """Fails so many times, then gives a value."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors, self.calls = errors, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "read"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    return slept


def test__a_transient_error_is_retried_with_growing_pauses(pauses: list[float]) -> None:
    read = Failing([OSError(5, "Input/output error"), TimeoutError("slow"), OSError(116, "Stale file handle")])
    assert retry(read) == "read"
    assert pauses == list(FILE_PAUSES) == sorted(FILE_PAUSES)


def test__after_the_last_pause_the_error_is_raised(pauses: list[float]) -> None:
    read = Failing([OSError(5, f"error {number}") for number in range(10)])
    with pytest.raises(OSError, match=f"error {len(FILE_PAUSES)}"):
        retry(read)
    assert read.calls == len(FILE_PAUSES) + 1 == len(pauses) + 1


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "gone"), PermissionError(13, "denied"), UnfitFileError("a pipe"), ValueError("x")]
)
def test__what_lasts_is_not_retried(error: Exception, pauses: list[float]) -> None:
    read = Failing([error])
    with pytest.raises(type(error)):
        retry(read)
    assert (read.calls, pauses) == (1, [])


def test__an_attempt_that_made_progress_begins_the_pauses_again(pauses: list[float]) -> None:
    read = Failing([OSError(5, str(number)) for number in range(5)])
    sizes = iter([0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 7])
    assert retry(read, pauses=(1.0, 2.0, 3.0), progress=lambda: next(sizes)) == "read"
    assert pauses == [1, 2, 1, 2, 3]
