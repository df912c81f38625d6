"""Python code that a config names. It is imported only if the same call names it too.

A config may come from anyone: a run folder, a recipe file. An encoder or a component `FILE.py:NAME` or `MODULE:NAME` in
it would run that code. The caller names the code with `--trust FILE.py` (`trust=` in Python), or with an override that
names the component itself. Nothing is trusted by default.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any

from capi.config.files import Overrides, overridden
from capi.errors import CapiError, expect

Trust = str | Path | Iterable[str | Path]
# Keys of the config whose value may name code.
_KEYS = (
    *("target.kind", "masking.kind", "model.predictor.kind", "optimization.optimizer"),
    *("target.frozen.encoder", "init.encoder"),
)
# What may be imported, and whether `trust` itself names it.
_TRUSTED: ContextVar[Mapping[str, bool]] = ContextVar("trusted", default=MappingProxyType({}))


@contextmanager
def trusting(trust: Trust = (), overrides: Overrides = ()) -> Iterator[None]:
    """Allow imports of the code that `trusted_code` gives where a config names it."""
    by_overrides = dict.fromkeys(trusted_code(overrides=overrides), False)
    token = _TRUSTED.set(by_overrides | dict(_TRUSTED.get()) | dict.fromkeys(trusted_code(trust), True))
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def trusted_code(trust: Trust = (), overrides: Overrides = ()) -> frozenset[str]:
    """What a call trusts: the files and modules in `trust`, and those that its own overrides name."""
    expect("trust", trust, (str, Path, Iterable), "the path of a Python file, or a list of such paths")
    listed = [trust] if isinstance(trust, str | Path) else trust
    return frozenset(map(_identity, (*listed, *_code_in(overrides))))


def trusted_place(code: str) -> str:
    """Where the code that a config names may be imported from: it is trusted itself, or a file of its name elsewhere.

    Two paths of one file are the same.
    """
    trusted = _TRUSTED.get()
    if _identity(code) in trusted:
        return code
    for place in sorted(trusted):
        if code.endswith(".py") and Path(place).name == Path(code).name:
            return place
    raise CapiError(
        f"the config names Python code in {code}: look at it, then add --trust {code} (in Python, trust={code!r})"
    )


def is_named_by_trust(file: Path) -> bool:
    """Whether `trust` names a file, so that somebody has looked at it as it is now; overrides are often repeated."""
    return _TRUSTED.get().get(_identity(file), False)


def _code_in(overrides: Overrides) -> Iterable[str]:
    tree = overridden({}, overrides)
    for path in _KEYS:
        value: Any = tree
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str) and ":" in value:
            yield value.rpartition(":")[0]


def _identity(code: str | Path) -> str:
    return str(Path(code).resolve()) if str(code).endswith(".py") else str(code)
