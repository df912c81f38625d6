"""Long lists in sentences."""

from collections.abc import Sequence

_NAMED = 5


def some_of(names: Sequence[str]) -> str:
    """The first few of many names."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
