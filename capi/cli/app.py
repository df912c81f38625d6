"""What all commands share: the application, its errors, its options and its messages."""

import errno
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from capi import __version__
from capi.errors import CapiError, nearest

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="CAPI: cluster and predict latent patches, from unlabelled images to a strong dense encoder.",
)

# Commands that share their work where torchrun starts several processes.
SEVERAL = ("pretrain", "evaluate", "compare", "extract")
# How much later than the others the first process may come to tell an error.
SECONDS_TO_SPEAK = 20.0

Device = Annotated[str | None, typer.Option(help="cuda, mps or cpu; by default the best there is.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values to change.")]


def main() -> None:
    """Run the command line; errors of the user's making are told in one sentence."""
    try:
        app()
    except CapiError as error:
        if _is_told_elsewhere(error):
            fail_silently()
        _fail(str(error))
    except OSError as error:
        # A full disk may show anywhere; other errors of the system are ours to see.
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise
        _fail(
            f"the disk is full ({error.filename or error.strerror}): make room, then run the same command again (a run "
            "with --resume)"
        )


def is_first() -> bool:
    """Of several processes that torchrun started, the first one speaks."""
    return os.environ.get("RANK", "0") == "0"


def _is_told_elsewhere(error: CapiError) -> bool:
    """Whether the first process says the same. Commands that need no torch have not imported it."""
    processes = sys.modules.get("capi.distributed.processes")
    return not is_first() and processes is not None and isinstance(error, processes.SharedError)


def fail_silently(code: int = 2) -> None:
    """torchrun ends all processes as soon as one has failed: that must be the one that speaks."""
    time.sleep(SECONDS_TO_SPEAK)
    sys.exit(code)


def _fail(message: str) -> None:
    if "--traceback" in sys.argv:
        traceback.print_exc()
    else:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"Error: {message}")
    sys.exit(2)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"capi {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    context: typer.Context,
    # Looked for where an error is told.
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,  # noqa: ARG001
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the command."""
    if context.invoked_subcommand not in SEVERAL:
        refuse_several(context.invoked_subcommand)


def refuse_several(command: str | None) -> None:
    """Where torchrun starts a command that one process can do, it would be done several times."""
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


def messages() -> Console:
    """Progress and warnings go to stderr, results to stdout; of several processes the first one speaks."""
    console = Console(stderr=True, quiet=not is_first())
    handler = RichHandler(console=console, show_time=False, show_path=False, markup=False)
    # Ours alone: libraries have much to say that is of no use here.
    logger = logging.getLogger("capi")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    return console
