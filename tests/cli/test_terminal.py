"""Nothing that a file says moves the cursor or hides in a message."""

import io

import pytest
from rich.table import Table
from rich.text import Text

from capi.cli.terminal import Terminal, harmless, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07name", "name"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x07b\x08c\x9b2Jd\x7f", "abc2Jd"),
        ("\u202egnp.\u2066exe", "gnp.exe"),
        ("\udcff", "\ufffd"),
        ("über\tdas\nböse [bold]", "über\tdas\nböse [bold]"),
    ],
)
def test__control_characters_are_taken_out_and_letters_stay(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test__a_message_is_one_line_without_endless_names() -> None:
    assert one_line(f"a\nb {'x' * 5000} c") == f"a b {'x' * 100}... c"


def test__tables_texts_and_strings_are_printed_harmless_and_as_they_are() -> None:
    stream = io.StringIO()
    terminal = Terminal(file=stream, width=60)
    table = Table("[/head]")
    table.add_row("\x1b[2J[/cell]")
    for shown in (table, Text("\x1b]0;t\x07text"), "\x1b[31m[/line]"):
        terminal.print(shown)
    assert "\x1b" not in stream.getvalue()
    assert all(word in stream.getvalue() for word in ("[/head]", "[/cell]", "text", "[/line]"))
