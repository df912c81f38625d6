"""Commands without a process of their own: starting one takes seconds."""

import logging
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jaxtyping
import pytest

from capi.cli import main


class Ran(NamedTuple):
    """What a command ended with, and what it printed."""

    code: int
    stdout: str
    stderr: str


RunHere = Callable[..., Ran]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[RunHere]:
    """Call the command line as the console script does. An error that is not told in a sentence is raised."""
    # Typer hands over another context than it says; and commands should run as they do for users.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    logger = logging.getLogger("capi")
    before = logger.level, logger.propagate, list(logger.handlers)

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["capi", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return Ran(int(ended.value.code or 0), shown.out, shown.err)

    yield run
    logger.level, logger.propagate, logger.handlers = before


def assert_refused(ran: Ran, message: str) -> None:
    """Exit code 2 and one sentence."""
    assert ran.code == 2, ran
    assert message in ran.stderr
    before, _, said = f"\n{ran.stderr.strip()}".rpartition("\nError: ")
    assert said
    assert len(said.splitlines()) == 1
    # Configs of the first version have names that are warned of.
    assert not before or (before.startswith("\nWARNING") and "an earlier version" in " ".join(before.split()))
    assert ran.stdout == ""
