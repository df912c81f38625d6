"""Text on a terminal: what a file says must not move the cursor, set a title, or turn the order of letters around."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.table import Table

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


_ENTRY = re.compile(r"( *\S(?:.*?\S)? {2,})(\S.*)")


def wrapped(text: str, width: int) -> str:
    """Paragraphs as wide as the terminal; the text of an entry, `name   what it is`, stays in its column."""
    blocks: list[tuple[str, str]] = []
    joins = False
    for line in text.splitlines():
        entry = _ENTRY.fullmatch(line)
        continues = joins and line and (line.startswith("   ") or not (entry or blocks[-1][0]))
        if continues and not line.startswith("ROOT/"):
            head, before = blocks[-1]
            blocks[-1] = head, f"{before} {line.strip()}"
        elif entry:
            blocks.append((entry[1], entry[2]))
        else:
            blocks.append(("", line))
        joins = bool(line)
    lines = []
    for head, words in blocks:
        first, indent = head, " " * len(head)
        if len(head) > width // 2:
            # Too long a name for a column beside it.
            lines.append(textwrap.fill(head, width, subsequent_indent="  "))
            first = indent = " " * 8
        lines.append(
            textwrap.fill(words, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
        )
    return "\n".join(lines)


def print_scores(
    console: Console, heads: Sequence[str], columns: Sequence[str], rows: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> None:
    """A row of (texts, numbers) for each model. Columns that do not fit go into a further table below: none is cut."""
    names = [name.replace("/", "/ ") for name in columns]
    # Names may be broken, numbers and the words above them may not.
    numbers = [[row[index] for _, row in rows] for index in range(len(names))]
    widths = [max(map(len, (*name.split(), *column))) for name, column in zip(names, numbers, strict=True)]
    beside = max(console.width // 2, console.width - sum(width + 2 for width in widths))
    texts = _text_widths(list(zip(heads, *(cells for cells, _ in rows), strict=True)), beside)
    room = console.width - sum(texts) - 2 * len(texts)
    blocks: list[list[int]] = [[]]
    for index, width in enumerate(widths):
        if blocks[-1] and sum(widths[each] + 2 for each in blocks[-1]) + width > room:
            blocks.append([])
        blocks[-1].append(index)
    for block in blocks:
        table = Table(box=None, pad_edge=False)
        for head, width in zip(heads, texts, strict=True):
            table.add_column(head, overflow="fold", width=width)
        spare = max(room - sum(widths[index] + 2 for index in block), 0) // max(len(block), 1)
        for index in block:
            width = min(max(len(columns[index]), widths[index]), widths[index] + spare)
            name = columns[index] if width >= len(columns[index]) else names[index]
            table.add_column(name, justify="right", width=width)
        for cells, row in rows:
            table.add_row(*cells, *(row[index] for index in block))
        console.print(table)


def _text_widths(texts: Sequence[Sequence[str]], most: int) -> list[int]:
    """Widths of columns that may be broken: at words where there is room for these, else anywhere."""
    widths = [max(map(len, column)) for column in texts]
    words = [max(len(word) for text in column for word in text.split() or [""]) for column in texts]
    while sum(widths) + 2 * len(widths) > most and max(widths) > 1:
        longer = [index for index, width in enumerate(widths) if width > words[index]] or range(len(widths))
        widest = max(longer, key=lambda index: widths[index])
        widths[widest] -= 1
    return widths
