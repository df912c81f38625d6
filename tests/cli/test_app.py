"""What all commands share: help, version, errors, messages."""

import errno
import logging
import re
import subprocess
import sys
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from rich.text import Text
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import capi
from capi.cli import app as shared
from capi.cli.app import duration, messages, one_of
from capi.cli.usage import PANELS
from capi.config import files
from capi.data import shard_writer
from capi.errors import CapiError
from capi.report.draw import DEFAULT_KINDS
from capi.report.explorer.page import USUAL_PORT
from capi.report.watch import DEFAULT_PORT
from capi.runtime.processes import SharedError
from capi.runtime.protocol import PAPER_SIZE
from capi.train.cost.hardware import CARBON_INTENSITY
from capi.train.cost.plan import MFU_OF_MEASURED
from capi.zoo.onnx import OLDEST_OPSET
from tests.cli.conftest import RunHere, assert_refused

COMMANDS = [
    *("ablate", "adapt", "compare", "data", "datasets", "demo", "doctor", "evaluate", "explore", "export", "extract"),
    *("launch", "models", "nearest", "plan", "predict", "pretrain", "push", "recipes", "report", "selftest", "shards"),
    *("speedrun", "visualize", "watch"),
]


def test__the_commands_are_these() -> None:
    named = [command.name or command.callback.__name__ for command in shared.app.registered_commands]
    assert sorted([*named, *(group.name for group in shared.app.registered_groups)]) == COMMANDS


def test__the_help_shows_every_command_in_one_panel_and_pretrain_near_the_top(run_here: RunHere) -> None:
    assert sorted(name for names in PANELS.values() for name in names) == COMMANDS
    shown = run_here("-h").stdout
    places = [shown.index(f" {panel} \N{BOX DRAWINGS LIGHT HORIZONTAL}") for panel in PANELS]
    assert places == sorted(places)
    assert shown.index("pretrain  ") < shown.index("evaluate  ") < shown.index("ablate  ")
    assert "Usage: capi pretrain" in run_here("pretrain", "-h").stdout


def test__paragraphs_of_a_help_are_wrapped_to_the_terminal(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip() for line in run_here("compare", "-h").stdout.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("Overrides (key=value)"))
    paragraph = lines[first : lines.index("", first)]
    # No line is so short that the first word of the next one would have fitted.
    for line, after in pairwise(paragraph):
        assert len(line) + 1 + len(after.split()[0]) > 76


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        *([name] for name in COMMANDS),
        *(["recipes", "show"], ["datasets", "show"], ["data", "check"], ["launch", "slurm"]),
    ],
    ids=lambda arguments: " ".join(arguments) or "capi",
)
def test__every_command_has_help(run_here: RunHere, arguments: list[str]) -> None:
    ran = run_here(*arguments, "--help")
    assert ran.code == 0
    assert "Usage" in ran.stdout
    assert ran.stderr == ""


DEFAULTS = {
    ("shards", "shard_size"): shard_writer.SHARD_MEGABYTES,
    ("shards", "workers"): shard_writer.AT_ONCE,
    ("extract", "kind"): signature(capi.extract).parameters["kinds"].default[0],
    ("extract", "image_size"): PAPER_SIZE[0],
    ("visualize", "size"): PAPER_SIZE[0],
    ("export", "image_size"): PAPER_SIZE[0],
    ("export", "opset"): OLDEST_OPSET,
    ("watch", "port"): DEFAULT_PORT,
    ("explore", "port"): USUAL_PORT,
    ("explore", "size"): PAPER_SIZE[0],
    ("plan", "carbon_intensity"): CARBON_INTENSITY,
    ("report", "carbon"): CARBON_INTENSITY,
    ("push", "carbon"): CARBON_INTENSITY,
    ("plan", "mfu"): MFU_OF_MEASURED,
}


@pytest.mark.parametrize(("command", "option"), DEFAULTS, ids=" ".join)
def test__a_default_that_lies_deeper_is_shown_by_the_help(command: str, option: str) -> None:
    group: Any = typer.main.get_command(shared.app)
    shown_help = next(each.help for each in group.commands[command].params if each.name == option)
    assert re.search(rf"by default .*\b{DEFAULTS[command, option]}\b", shown_help), shown_help


def test__the_first_kinds_of_pictures_are_the_default_ones() -> None:
    group: Any = typer.main.get_command(shared.app)
    shown_help = next(each.help for each in group.commands["visualize"].params if each.name == "kind")
    assert shown_help.startswith(", ".join(DEFAULT_KINDS))
    assert shown_help.endswith("by default the first three.")
    assert len(DEFAULT_KINDS) == 3


def test__help_holds_nothing_that_is_taken_for_a_style(run_here: RunHere) -> None:
    group: Any = typer.main.get_command(shared.app)
    commands = [
        each for command in group.commands.values() for each in getattr(command, "commands", {"": command}).values()
    ]
    helps = [parameter.help for command in commands for parameter in command.params if parameter.help]
    assert len(helps) > 100
    assert [text for text in helps if Text.from_markup(text).plain != text] == []


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


def test__a_group_that_is_asked_for_nothing_shows_its_help(run_here: RunHere) -> None:
    for group in ([], ["data"], ["launch"]):
        ran = run_here(*group)
        assert ran.code == 2
        assert "Usage" in ran.stdout + ran.stderr
        assert "Error" not in ran.stderr


def test__sentences_are_printed_as_they_are(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names may hold what the console takes for markup, and sentences are not broken into lines."""
    sentence = "runs/[bold]a[/b] is no run: " + "it is long, " * 30

    def fail() -> None:
        raise CapiError(sentence)

    monkeypatch.setattr(files, "recipe_names", fail)
    ran = run_here("recipes")
    assert_refused(ran, sentence.strip())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test__a_full_disk_is_reported_in_a_sentence(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail() -> None:
        raise OSError(number, "no room", "x.json")

    monkeypatch.setattr(files, "recipe_names", fail)
    assert_refused(run_here("recipes"), "the disk is full (x.json): make room")


def test__a_command_that_is_aborted_ends_as_ctrl_c_does(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyboardInterrupt, typer.Abort):
        monkeypatch.setattr(files, "recipe_names", Mock(side_effect=error))
        assert run_here("recipes").code == 130


def test__other_errors_of_the_system_are_ours_to_see(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(files, "recipe_names", fail)
    monkeypatch.setattr(sys, "argv", ["capi", "recipes"])
    with pytest.raises(OSError, match="broken"):
        shared.main()


@pytest.mark.parametrize(
    ("hours", "said"),
    [(2 / 3600, "2.0 s"), (1 / 60, "1.0 min"), (0.5, "30.0 min"), (1.0, "1.0 h"), (1234.5, "1,234.5 h")],
)
def test__a_duration_has_the_unit_that_suits_it(hours: float, said: str) -> None:
    assert duration(hours) == said


def test__a_choice_names_what_there_is() -> None:
    one_of("--weights", "teacher", ("teacher", "student"))
    with pytest.raises(CapiError, match=r'`weights` "techer" is not one of teacher, student; did you mean "teacher"\?'):
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


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The second of three processes that torchrun started; how long it waits."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    waited: list[float] = []
    monkeypatch.setattr(shared.time, "sleep", waited.append)
    return waited


def test__a_command_for_one_process_is_refused_once(
    run_here: RunHere, started: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_here("recipes") == (2, "", "")
    # Whoever ends first ends all: the first process must have spoken by then.
    assert started == [shared.SECONDS_TO_SPEAK]
    monkeypatch.setenv("RANK", "0")
    assert_refused(run_here("recipes"), "capi recipes works in one process, but 3 were started: leave out torchrun")


def test__who_schedules_one_process_is_not_refused(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clusters set WORLD_SIZE for whatever they start."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert run_here("recipes").code == 0


def test__what_all_processes_know_the_first_one_tells(
    run_here: RunHere, started: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "SEVERAL", ("recipes",))
    errors: dict[str, CapiError] = {"shared": SharedError("all know it"), "own": CapiError("only here")}

    def fail() -> None:
        raise errors[which]

    monkeypatch.setattr(files, "recipe_names", fail)
    which = "shared"
    assert run_here("recipes") == (2, "", "")
    assert len(started) == 1
    which = "own"
    assert_refused(run_here("recipes"), "only here")
    which = "shared"
    monkeypatch.setenv("RANK", "0")
    assert_refused(run_here("recipes"), "all know it")


def test__of_several_processes_the_first_one_tells_of_wrong_words(run_here: RunHere, started: list[float]) -> None:
    assert run_here("pretrain", "tiny4", "--chek") == (2, "", "")
    assert started == [shared.SECONDS_TO_SPEAK]


def test__torchrun_ends_with_our_sentence(run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert run_here("pretrain", "tiny5").code == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    last = ChildFailedError("capi", {0: failure}).format_msg().splitlines()[-2]
    assert re.fullmatch(r" *traceback : Error: there is no recipe \"tiny5\".*", last), last


def test__only_the_first_process_shows_messages(
    run_here: RunHere, started: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    messages().print("a bar")
    logging.getLogger("capi").warning("a warning")
    assert capsys.readouterr() == ("", "")
