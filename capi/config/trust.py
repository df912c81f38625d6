"""Python code that a config names. It is imported only if the same call names it too.

A config may come from anyone: a run folder, a recipe file. An encoder `FILE.py:NAME` or `MODULE:NAME` in it would run
that code. The caller names the code with `--trust FILE.py` (`trust=` in Python), or with an override that names the
encoder itself. Nothing is trusted by default.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from capi.config.files import overridden
from capi.errors import expect

Trust = str | Path | Iterable[str | Path]
# Keys of the config whose value is an encoder by name.
_ENCODERS = (("target", "frozen", "encoder"), ("init", "encoder"))


def trusted_code(trust: Trust = (), overrides: Iterable[str] = ()) -> frozenset[str]:
    """What a call trusts: the files and modules in `trust`, and those that its own overrides name."""
    expect("trust", trust, (str, Path, Iterable), "the path of a Python file, or a list of such paths")
    listed = [trust] if isinstance(trust, str | Path) else trust
    return frozenset(map(_identity, (*listed, *_code_in(overrides))))


def is_trusted(code: str, trusted: frozenset[str]) -> bool:
    """Whether this file or module is among those; two paths of one file are the same."""
    return _identity(code) in trusted


def _code_in(overrides: Iterable[str]) -> Iterable[str]:
    tree = overridden({}, overrides)
    for keys in _ENCODERS:
        value: Any = tree
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str) and ":" in value:
            yield value.rpartition(":")[0]


def _identity(code: str | Path) -> str:
    return str(Path(code).resolve()) if str(code).endswith(".py") else str(code)
