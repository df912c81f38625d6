"""Text on a terminal: what a file says must not move the cursor, set a title, or turn the order of letters around."""

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

# Whole sequences first (colours, titles, links), then control characters (C0, C1) but tab and newline, marks that turn
# the direction of text, and halves of surrogate pairs, which no encoding can write.
_SEQUENCES = re.compile("\x1b\\[[0-?]*[ -/]*[@-~]|[\x1b\x9d]\\]?[^\x07\x1b\x9c\n]{0,500}(?:\x07|\x1b\\\\|\x9c)")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_LONG, _SHOWN = re.compile(r"\S{300,}"), 100
_SURROGATES = re.compile("[\ud800-\udfff]")


def harmless(text: str) -> str:
    """The text without what a terminal would act on."""
    if text.isascii() and text.isprintable():
        return text
    return _SURROGATES.sub("\ufffd", _CONTROLS.sub("", _SEQUENCES.sub("", text)))


def one_line(text: str) -> str:
    """The same with line breaks as spaces and long names cut: a message is one sentence, whatever stands in it."""
    return _LONG.sub(lambda word: f"{word[0][:_SHOWN]}...", " ".join(re.split(r"[\n\t]+", harmless(text))))


class Terminal(Console):
    """Rich's console, which prints all text harmless and knows no styles in square brackets."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**({"markup": False, "emoji": False, "highlight": False} | settings))

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Control segments are rich's own: they move the cursor of a progress bar.
            yield segment if segment.control else segment._replace(text=harmless(segment.text))
