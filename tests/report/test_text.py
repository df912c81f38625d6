import pytest
from PIL import Image, ImageDraw

from capi.report.pictures import text
from capi.report.pictures.text import font


def written(words: str) -> Image.Image:
    sheet = Image.new("L", (80, 30), "white")
    ImageDraw.Draw(sheet).text((4, 4), words, fill="black", font=font())
    return sheet


def test__letters_beyond_ascii_are_drawn_and_differ() -> None:
    pictures = {written(letter).tobytes() for letter in ("e", "é", "ß", "ø")}
    assert len(pictures) == 4
    assert written("").tobytes() not in pictures


def test__larger_writing_is_wider() -> None:
    assert font(24).getlength("legend") > 1.5 * font(12).getlength("legend")


def test__without_matplotlib_there_is_still_a_font(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "find_spec", lambda _: None)
    assert text.font.__wrapped__(12).getlength("legend") > 0
