"""What all commands share: the application, its errors, its options and its messages."""

import errno
import logging
import os
import sys
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

Device = Annotated[str | None, typer.Option(help="cuda, mps or cpu; by default the best there is.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values to change.")]


def main() -> None:
    """Run the command line; errors of the user's making are told in one sentence."""
    try:
        app()
    except CapiError as error:
        _fail(str(error), shared=getattr(error, "shared", False))
    except OSError as error:
        # A full disk may show anywhere; other errors of the system are ours to see.
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise
        _fail(f"the disk is full ({error.filename or error.strerror}): make room, then run the same command again")


def _fail(message: str, *, shared: bool = False) -> None:
    if shared and os.environ.get("RANK", "0") != "0":
        # The main process tells it.
        sys.exit(2)
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
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the command."""


def one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    """An option's value that is none of those there are is an error."""
    if value not in allowed:
        raise CapiError(f'{option} "{value}" is not one of {", ".join(allowed)}{nearest(value, allowed)}')


def messages() -> Console:
    """Progress and warnings go to stderr, results to stdout."""
    console = Console(stderr=True)
    handler = RichHandler(console=console, show_time=False, show_path=False, markup=False)
    # Ours alone: libraries have much to say that is of no use here.
    logger = logging.getLogger("capi")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    return console
