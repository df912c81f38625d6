"""Errors a person can act on: one sentence that says what was expected, what came and what to do; and exit codes.

Commands end with 0, done; 1, done with something amiss; 2, bad input; or one of the two codes below.
"""

import difflib
import logging
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import ClassVar

# The code of a temporary failure in sysexits.h: saved because the machine was needed, to be started again.
PREEMPTED = 75
# Someone pressed Ctrl-C: 128 and the number of the signal, as shells have it.
INTERRUPTED = 130


# What an option of a command is called in Python, where its name is not the same with underscores.
_IN_PYTHON = {
    **{name: f"{name.replace('-', '_')}=True" for name in ("resume", "overwrite", "whole", "joint", "extend")},
    **{"keep-order": "shuffle=None", "shard-size": "shard_megabytes", "option": "options", "kind": "kinds"},
    **{"size": "sizes", "per-shard": "per_shard"},
}
# An option, but not within a command between backticks.
_OPTION = re.compile(r"(`[^`]*`)|(?<![\w-])--([a-z][a-z-]*)")


class CapiError(ValueError):
    """Bad input. The command line prints its message alone and exits with code 2.

    Messages name options as they are typed (`--overwrite`); whoever calls from Python reads `overwrite=True`.
    """

    in_command: ClassVar[bool] = False
    """Whether the process is a command, which sets it."""

    def __str__(self) -> str:
        message = super().__str__()
        if CapiError.in_command:
            return message
        return _OPTION.sub(
            lambda match: match[1] or f"`{_IN_PYTHON.get(match[2], match[2].replace('-', '_'))}`", message
        )


@cache
def warn_once(message: str) -> None:
    """Log a warning, the same one once a process."""
    logging.getLogger("capi").warning("%s", message)


def expect(what: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """A value of another type than Python code was asked for is bad input too."""
    if not isinstance(value, kinds):
        shown = f"{value!r} " if value is None or isinstance(value, str | int | float) else ""
        raise CapiError(f"{what} must be {wanted}, not {shown}of type {type(value).__name__}")


def nearest(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean "x"?` for the closest candidate, or an empty string when nothing is close."""
    matches = difflib.get_close_matches(word, list(candidates), n=3, cutoff=0.5)
    if not matches:
        return ""

    def likeness(name: str) -> tuple[float, float]:
        """The rank of a name; of equally close names the one with the same letters wins: two of them were swapped."""
        letters = difflib.SequenceMatcher(None, sorted(name), sorted(word)).ratio()
        return difflib.SequenceMatcher(None, name, word).ratio(), letters

    return f'; did you mean "{max(matches, key=likeness)}"?'


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first few of many names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def quoted(names: Iterable[str]) -> list[str]:
    """Names as they stand in a sentence."""
    return [f'"{name}"' for name in names]


def counted(count: int, what: str) -> str:
    """`1 image`, `2,000 images`."""
    plural = "es" if what.endswith(("s", "ch")) else "s"
    return f"{count:,} {what}{'' if count == 1 else plural}"
