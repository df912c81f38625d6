"""What all commands share: the application, its errors, its options and its messages."""

import errno
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.logging import RichHandler

from capi import __version__
from capi.cli.terminal import Terminal, harmless, one_line
from capi.cli.usage import Commands, UsageError, sentence_of
from capi.config.trust import trusting
from capi.errors import INTERRUPTED, CapiError, nearest

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    add_completion=False,
    help="CAPI: cluster and predict latent patches, from unlabeled images to a strong dense encoder.",
)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_NAME = {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
# Characters of an argument: a YAML list of evaluations may stand in one.
_LONGEST_WORD = 2**16
# Commands that share their work where torchrun starts several processes.
SEVERAL = ("pretrain", "adapt", "evaluate", "compare", "extract")
# How much later than the others the first process may come to print an error.
SECONDS_TO_SPEAK = 20.0

Device = Annotated[str | None, typer.Option(help="cuda, mps or cpu; by default the best there is.")]


def _trust(context: typer.Context, parameter: typer.CallbackParam, words: list[str] | None) -> list[str] | None:
    """The files of --trust, or the code that the command's own overrides name, for as long as it runs."""
    context.with_resource(trusting(**{str(parameter.name): words or ()}))
    return words


TrustOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE.py",
        callback=_trust,
        help="Python code that a recipe or a run names and that may be imported: it runs on this machine; may repeat.",
    ),
]


OverrideArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", callback=_trust, help="Values to change."),
]


def main() -> None:
    """Run the command line; errors of the user's making are one sentence."""
    CapiError.in_command = True
    try:
        _refuse_words(sys.argv[1:])
        # Typer would draw a box around its own errors; what it gives back is the code to end with.
        sys.exit(app(prog_name="capi", standalone_mode=False) or 0)
    except UsageError as error:
        _tell_usage(error)
    except typer.Abort:
        # What older releases of typer make of Ctrl-C.
        sys.exit(INTERRUPTED)
    except CapiError as error:
        # The first process says the same.
        processes = _processes()
        if not is_first() and processes is not None and isinstance(error, processes.SharedError):
            fail_silently()
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)):
            raise
        _fail("the memory is full: lower the batch or the size of images, or use a machine with more memory")
    except OSError as error:
        # A full disk or a name that no file can have may show anywhere; other errors of the system are ours to see.
        if error.errno in _FULL:
            _fail(
                f"the disk is full ({error.filename or error.strerror}): make room, then run the same command again (a "
                "run with --resume)"
            )
        if error.errno not in _NO_NAME:
            raise
        _fail(f"{error.filename} is not the name of a file or folder ({error.strerror}): give another")
    finally:
        CapiError.in_command = False


def _refuse_words(words: Sequence[str]) -> None:
    """What no command can mean: a NUL ends every name of a file, results are written in UTF-8, nothing is that long."""
    for word in words:
        if "\0" in word:
            raise CapiError(f"the argument {word!r} holds a NUL character, which no name, number or option has")
        if not word.strip():
            raise CapiError("an argument is empty: leave it out, or check the variable of the shell that it came from")
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise CapiError(f"the argument {word} is not a text in UTF-8: rename the file or folder")
        if len(word) > _LONGEST_WORD:
            raise CapiError(f"{word} is an argument of {len(word)} characters: at most {_LONGEST_WORD} are read")


def echo(message: str, *, nl: bool = True) -> None:
    """A line of results."""
    typer.echo(harmless(message), nl=nl)


def _tell_usage(error: Exception) -> None:
    """All processes were given the same words, so one of them says what is wrong with these."""
    if not is_first():
        fail_silently()
    # A group that was asked for nothing has shown its help.
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.exit(2)
    _fail(sentence_of(error))


def is_first() -> bool:
    """Whether this process prints: the first of several that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _processes() -> ModuleType | None:
    """What knows of other processes; commands that need no torch have not imported it."""
    return sys.modules.get("capi.runtime.processes")


def fail_silently(code: int = 2) -> None:
    """torchrun ends all processes as soon as one has failed: that must be the one that speaks."""
    time.sleep(SECONDS_TO_SPEAK)
    _end(code)


def _end(code: int) -> None:
    processes = _processes()
    if processes is not None:
        processes.leave_with(code)
    sys.exit(code)


def _fail(message: str) -> None:
    sentence = f"Error: {one_line(message)}"
    if "--traceback" in sys.argv:
        traceback.print_exc()
    else:
        Terminal(stderr=True, soft_wrap=True).print(sentence)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun prints a traceback of its own after this, and at its end what stands in this file.
        further = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": sentence, "extraInfo": further}}), "utf-8")
    _end(2)


def _print_version(wanted: bool) -> bool:
    if wanted:
        echo(f"capi {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    context: typer.Context,
    # Looked for where an error is printed.
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,  # noqa: ARG001
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the command."""
    if context.invoked_subcommand not in SEVERAL:
        refuse_several(context.invoked_subcommand)


def refuse_several(command: str | None) -> None:
    """Refuse torchrun for a command of one process, which would run several times."""
    started = os.environ.get("WORLD_SIZE", "1") if "LOCAL_RANK" in os.environ else "1"
    if started == "1":
        return
    if not is_first():
        fail_silently()
    raise CapiError(
        f"capi {command} works in one process, but {started} were started: leave out torchrun, which is for "
        f"{', '.join(SEVERAL)}"
    )


def one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    """An option's value that is none of those there are is an error."""
    if value not in allowed:
        raise CapiError(f'{option} "{value}" is not one of {", ".join(allowed)}{nearest(value, allowed)}')


def check_weights(weights: str, models: Sequence[str]) -> None:
    """Refuse a choice of weights for what is no run: only a run has both a teacher and a student."""
    one_of("--weights", weights, ("teacher", "student"))
    if weights == "student" and not any((Path(model) / "run.json").is_file() for model in models):
        said = ", ".join(models) if models else "none is named"
        raise CapiError(f"--weights student is a choice of runs, and there is no run here ({said}): leave it out")


def duration(hours: float) -> str:
    """A time in the unit that suits it."""
    if hours < 1 / 60:
        return f"{3600 * hours:.1f} s"
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def messages() -> Terminal:
    """Progress and warnings go to stderr, results to stdout; of several processes the first one speaks."""
    console = Terminal(stderr=True, quiet=not is_first())
    handler = RichHandler(console=console, show_time=False, show_path=False, markup=False)
    # Ours alone: libraries have much to say that is of no use here.
    logger = logging.getLogger("capi")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    return console
