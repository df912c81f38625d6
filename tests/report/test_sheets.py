import numpy as np
import pytest
from PIL import Image, ImageDraw

from capi.report.pictures import sheets
from capi.report.pictures.painters import Drawn, Legend
from capi.report.pictures.sheets import Row, contained, enlarged, fitting, font, printable, sheet_of, tiled

RED, GREEN, BLUE = (250, 0, 0), (0, 250, 0), (0, 0, 250)


def plain(color: tuple[int, int, int], width: int = 4, height: int = 4) -> Image.Image:
    return Image.new("RGB", (width, height), color)


def extent(sheet: Image.Image, color: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Left, top, width and height of what has this colour, which must be a filled rectangle."""
    places = np.argwhere((np.asarray(sheet) == color).all(2))
    (top, left), (bottom, right) = places.min(0), places.max(0)
    assert len(places) == (bottom - top + 1) * (right - left + 1)
    return int(left), int(top), int(right - left + 1), int(bottom - top + 1)


@pytest.mark.parametrize(("size", "result"), [((8, 8), (256, 256)), ((28, 42), (252, 378)), ((300, 400), (300, 400))])
def test__patches_become_squares_of_whole_pixels(size: tuple[int, int], result: tuple[int, int]) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))
    large = enlarged(picture, 256)
    assert large.size == result
    factor = result[0] // size[0]
    assert np.array_equal(np.asarray(large), np.asarray(picture).repeat(factor, 0).repeat(factor, 1))


@pytest.mark.parametrize(("size", "result"), [((3, 2), (90, 60)), ((10, 40), (22, 90)), ((900, 300), (90, 30))])
def test__pictures_keep_their_aspect_in_a_square(size: tuple[int, int], result: tuple[int, int]) -> None:
    assert contained(plain(RED, *size), 90).size == result


def test__every_picture_stands_in_its_row_and_column_without_overlap() -> None:
    wide, tall = plain(RED, 6, 3), plain(GREEN, 2, 4)
    rows = [Row("first", [Drawn(wide), Drawn(tall)]), Row("second", [Drawn(plain(BLUE)), None])]
    sheet = sheet_of("title", ["a note"], ["one", "two\n224 px"], rows, side=80)
    red, green, blue = (extent(sheet, color) for color in (RED, GREEN, BLUE))
    assert red[2:] == (80, 40)
    assert green[2:] == (40, 80)
    assert blue[2:] == (80, 80)
    assert red[1] == green[1]
    assert red[0] == blue[0]
    assert green[0] >= red[0] + 80
    # A row is as high as its tallest picture, and its label has room above.
    assert blue[1] >= green[1] + 80 + 20
    assert sheet.height >= blue[1] + 80


def test__rows_of_flat_pictures_take_no_more_room_than_they_need() -> None:
    flat = sheet_of("", [], ["a"], [Row("", [Drawn(plain(RED, 8, 2))])] * 5, side=160)
    square = sheet_of("", [], ["a"], [Row("", [Drawn(plain(RED, 2, 2))])] * 5, side=160)
    assert square.height - flat.height == 5 * 120


def test__titles_labels_captions_and_missing_pictures_are_written() -> None:
    def ink(**changes: object) -> int:
        values = {"title": "", "note": [], "column": "", "label": "", "caption": "", "missing": False} | changes
        cell = None if values["missing"] else Drawn(plain((255, 255, 255)), caption=str(values["caption"]))
        rows = [Row(str(values["label"]), [cell])]
        sheet = sheet_of(str(values["title"]), list(values["note"]), [str(values["column"])], rows)  # type: ignore[call-overload]
        return int((np.asarray(sheet) < 200).any(2).sum())

    assert ink() == 0
    for change in (
        {"title": "T"},
        {"note": ["N"]},
        {"column": "C"},
        {"label": "L"},
        {"caption": "9 %"},
        {"missing": True},
    ):
        assert ink(**change) > 0


def test__a_long_note_is_broken_into_lines() -> None:
    rows = [Row("", [Drawn(plain(RED))])]
    short, long = (sheet_of("", [note], ["a"], rows) for note in ("word", "word " * 60))
    assert long.height > short.height + 40
    assert long.width == short.width


def test__the_legend_shows_its_colors_between_its_words() -> None:
    bar = Image.new("RGB", (2, 1))
    bar.putdata([RED, BLUE])
    sheet = sheet_of("", [], ["a"], [Row("", [Drawn(plain(GREEN))])], legend=Legend(bar, "low", "high"))
    red, blue = extent(sheet, RED), extent(sheet, BLUE)
    assert red[0] + red[2] == blue[0]
    assert red[1] == blue[1]
    beside = np.asarray(sheet)[red[1] - 2 : red[1] + 14]
    assert (beside[:, : red[0]] < 150).any()
    assert (beside[:, blue[0] + blue[2] :] < 150).any()


def test__tiles_stand_in_rows_of_four_under_their_titles() -> None:
    colors = [(number * 25, 10, 200) for number in range(6)]
    sheet = tiled([Drawn(plain(color), f"PC {n}", "3 %") for n, color in enumerate(colors)], 40)
    places = [extent(sheet, color) for color in colors]
    assert {place[2:] for place in places} == {(40, 40)}
    assert len({place[1] for place in places[:4]}) == 1
    assert len({place[0] for place in places[:4]}) == 4
    assert places[4][:2] == (places[0][0], places[4][1])
    assert places[4][1] > places[0][1] + 40
    assert tiled([Drawn(plain(RED))], 40).size == (40, 40)


def test__texts_that_are_too_long_keep_both_ends() -> None:
    text = "folder/of/many/photographs/of_cats_0001.jpg"
    short = fitting(text, 120)
    assert font().getlength(short) <= 120
    head, tail = short.split("…")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert fitting("short", 120) == "short"
    assert fitting(text, 1) == "…"


def test__names_that_are_no_text_can_be_printed() -> None:
    name = b"caf\xe9\n1.jpg".decode("utf-8", "surrogateescape")
    assert printable(name) == "caf? 1.jpg"
    tiled([Drawn(plain(RED), name, name)], 40)


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
    monkeypatch.setattr(sheets, "find_spec", lambda _: None)
    assert sheets.font.__wrapped__(12).getlength("legend") > 0
