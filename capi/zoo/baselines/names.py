"""Names of baselines, told from others without importing any of them."""

from pathlib import Path

PREFIX = "baseline:"
# The place of weights that stands for the known id of the Hub.
USUAL = "hub"


def is_baseline(name: str) -> bool:
    """Whether a name asks for a baseline."""
    return name.startswith(PREFIX)


def is_on_this_machine(name: str) -> bool:
    """Whether a baseline is asked for by a place here, or by none; any other place is asked of the Hub."""
    place = name.partition("=")[2]
    return not place or (place != USUAL and Path(place).expanduser().exists())
