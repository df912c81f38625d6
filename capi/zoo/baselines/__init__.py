"""Other people's encoders behind `VisionEncoder`: one plain vision transformer, and a small map of names per source."""

from pathlib import Path

# How a name asks for a baseline, and the place that stands for its id on the Hub.
PREFIX, USUAL = "baseline:", "hub"


def is_baseline(name: str) -> bool:
    """Whether a name asks for a baseline."""
    return name.startswith(PREFIX)


def is_on_this_machine(name: str) -> bool:
    """Whether a baseline is asked for by a place here, or by none; any other place is asked of the Hub."""
    place = name.partition("=")[2]
    return not place or (place != USUAL and Path(place).expanduser().exists())
