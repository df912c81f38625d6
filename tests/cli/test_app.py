"""What all commands share: help, version, errors, messages."""

import errno
import logging
import subprocess
import sys

import pytest

import capi
from capi.cli import app as shared
from capi.cli.app import messages, one_of
from capi.config import loading
from capi.errors import CapiError
from tests.cli.conftest import RunHere, assert_refused

COMMANDS = [
    *("ablate", "compare", "datasets", "demo", "doctor", "evaluate", "explore", "export", "extract", "models"),
    *("launch", "nearest", "plan", "predict", "pretrain", "push", "recipes", "report", "visualize", "watch"),
]


def test__the_commands_are_these() -> None:
    named = [command.name or command.callback.__name__ for command in shared.app.registered_commands]
    assert sorted([*named, *(group.name for group in shared.app.registered_groups)]) == COMMANDS


@pytest.mark.parametrize(
    "arguments",
    [[], *([name] for name in COMMANDS), ["recipes", "show"], ["datasets", "show"], ["launch", "slurm"]],
    ids=lambda arguments: " ".join(arguments) or "capi",
)
def test__every_command_has_help(run_here: RunHere, arguments: list[str]) -> None:
    ran = run_here(*arguments, "--help")
    assert ran.code == 0
    assert "Usage" in ran.stdout
    assert ran.stderr == ""


def test__the_version_is_the_package_s(run_here: RunHere) -> None:
    assert run_here("--version") == (0, f"capi {capi.__version__}\n", "")


def test__bad_input_ends_a_real_process_with_2() -> None:
    command = [sys.executable, "-m", "capi", "datasets", "show", "vok"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith('Error: there is no data set "vok"; did you mean "voc"?')
    assert len(ran.stderr.splitlines()) == 1


def test__a_flag_shows_the_traceback(run_here: RunHere) -> None:
    ran = run_here("--traceback", "recipes", "show", "vitl144")
    assert ran.code == 2
    assert "Traceback" in ran.stderr
    assert 'did you mean "vitl14"?' in ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["chekc"],
        ["pretrain", "tiny4", "--check", "--rounds", "0"],
        ["pretrain", "tiny4", "--check", "--nonsense"],
        ["evaluate", "pixels:4"],
        ["predict", "pixels:4", "probe.safetensors", "--out", "x"],
        ["predict", "pixels:4", "probe.safetensors", "images"],
        ["compare", "pixels:4", "--on", "--out", "x"],
        ["compare", "--on", "demo/knn", "--out", "x"],
        ["extract", "pixels:4", "demo", "--out", "x", "--batch-size", "0"],
        ["nearest", "features", "image", "--count", "none"],
        ["plan", "demo", "--gpus", "0"],
        ["launch", "slurm", "demo", "--out", "x"],
    ],
    ids=" ".join,
)
def test__misspelt_commands_and_options_exit_with_2(run_here: RunHere, arguments: list[str]) -> None:
    ran = run_here(*arguments)
    assert ran.code == 2
    assert "Usage" in ran.stderr
    assert "Traceback" not in ran.stderr


def test__sentences_are_printed_as_they_are(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names may hold what the console takes for markup, and sentences are not broken into lines."""
    sentence = "runs/[bold]a[/b] is no run: " + "it is long, " * 30

    def fail() -> None:
        raise CapiError(sentence)

    monkeypatch.setattr(loading, "recipe_names", fail)
    ran = run_here("recipes")
    assert_refused(ran, sentence.strip())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test__a_full_disk_is_told_in_a_sentence(run_here: RunHere, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail() -> None:
        raise OSError(number, "no room", "x.json")

    monkeypatch.setattr(loading, "recipe_names", fail)
    assert_refused(run_here("recipes"), "the disk is full (x.json): make room")


def test__other_errors_of_the_system_are_ours_to_see(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(loading, "recipe_names", fail)
    monkeypatch.setattr(sys, "argv", ["capi", "recipes"])
    with pytest.raises(OSError, match="broken"):
        shared.main()


def test__a_choice_names_what_there_is() -> None:
    one_of("--weights", "teacher", ("teacher", "student"))
    with pytest.raises(CapiError, match=r'--weights "techer" is not one of teacher, student; did you mean "teacher"\?'):
        one_of("--weights", "techer", ("teacher", "student"))


def test__only_our_own_messages_are_shown(run_here: RunHere, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("--version").code == 0
    messages()
    logging.getLogger("capi").info("ours [bold]")
    logging.getLogger("another").info("theirs")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "ours [bold]" in shown.err
    assert "theirs" not in shown.err
