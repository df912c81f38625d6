"""Many pictures on one sheet: rows and columns with titles, every picture in its own aspect, patches as squares.

Figures of several models for the same images, as the paper compares them; they are Pillow images for notebooks.

Kinds with one picture an image have a row for each image and a column for each model. Kinds with several (components,
atoms) have a row for each model under each image.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from capi.errors import CapiError, nearest
from capi.report.pictures.painters import PAINTERS, Drawn, Legend, Painter, paint
from capi.runtime.atomic import atomic_open

_MARGIN, _GAP, _LINE = 14, 8, 17
_INK, _FAINT, _PAPER, _EMPTY = "#1c2430", "#5c6675", "white", "#eceff3"
_LABEL = 24
_BAR = (160, 12)
_NARROWEST = 420
# Around colours and their names, between the squares of a strip; the scale below a picture.
_NEAR, _BETWEEN, _SWATCH = 8, 2, 20
_SCALE_BAR, _SCALE_WRITING, _FRAME = 12, 15, "#8a93a0"
_WITHIN_MATPLOTLIB = Path("mpl-data", "fonts", "ttf", "DejaVuSans.ttf")


@dataclass(frozen=True)
class Row:
    """A row of a sheet: what it is, and its pictures; None where one is missing."""

    label: str
    cells: Sequence[Drawn | None]


def save_picture(picture: Image.Image, path: Path, *, compress_level: int = 6) -> None:
    """Write a PNG, or a JPEG where the name asks for one; the file is as before or complete."""
    # There may be many thousands, each of which can be drawn again: no flush to the disk for each.
    with atomic_open(path, sync=False) as file:
        if path.suffix.lower() in {".jpg", ".jpeg"}:
            picture.save(file, format="JPEG", quality=90)
        else:
            picture.save(file, format="PNG", compress_level=compress_level)


def enlarged(picture: Image.Image, side: int) -> Image.Image:
    """Each pixel as a square of whole pixels, so that the short side comes close to `side`."""
    factor = max(round(side / min(picture.size)), 1)
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def contained(picture: Image.Image, side: int) -> Image.Image:
    """The picture as large as fits into a square, in its own aspect. A small one is enlarged without blurring."""
    scale = side / max(picture.size)
    size = max(round(picture.width * scale), 1), max(round(picture.height * scale), 1)
    method = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
    return picture.convert("RGB").resize(size, method)


def tiled(drawn: Sequence[Drawn], side: int, per_row: int = 4) -> Image.Image:
    """The pictures of one image, each above its title; a single one without a title is just enlarged."""
    if len(drawn) == 1 and not drawn[0].title:
        return enlarged(drawn[0].picture, side)
    cells = [
        Drawn(
            enlarged(picture.picture, side),
            caption=f"{picture.title} · {picture.caption}" if picture.caption else picture.title,
        )
        for picture in drawn
    ]
    rows = [Row("", cells[start : start + per_row]) for start in range(0, len(cells), per_row)]
    return sheet_of("", (), (), rows, side=max(cells[0].picture.size))


def sheet_of(
    title: str,
    notes: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[Row],
    *,
    side: int = 168,
    legend: Legend | None = None,
) -> Image.Image:
    """A title, what there is to know, and a table of pictures. What is empty takes no room."""
    count = max([len(columns), *(len(row.cells) for row in rows)])
    width = max(2 * _MARGIN + count * (side + _GAP) - _GAP, _NARROWEST if title or notes or legend else 0)
    head = _head(title, notes, width, legend)
    heads = [column.split("\n") for column in columns] if any(columns) else []
    top = head.height + (_LINE * max(len(lines) for lines in heads) + 4 if heads else 0)
    heights = [_height(row, side) + _GAP for row in rows]
    sheet = Image.new("RGB", (width, top + sum(heights) + _MARGIN - _GAP), _PAPER)
    sheet.paste(head, (0, 0))
    draw = ImageDraw.Draw(sheet)
    for number, lines in enumerate(heads):
        across = _MARGIN + number * (side + _GAP)
        for below, line in enumerate(lines):
            fill = _FAINT if below else _INK
            draw.text((across, head.height + below * _LINE), fitting(line, side), fill=fill, font=font())
    for row, height in zip(rows, heights, strict=True):
        _draw_row(sheet, draw, row, top, side)
        top += height
    return sheet


def _height(row: Row, side: int) -> int:
    """What the label of a row and its tallest picture with its caption need."""
    pictures = [
        side if cell is None else contained(cell.picture, side).height + _LINE * len(cell.caption.splitlines())
        for cell in row.cells
    ]
    return (_LABEL if row.label else 0) + max(pictures)


def _draw_row(sheet: Image.Image, draw: Any, row: Row, top: int, side: int) -> None:
    """The label stands above the pictures: names are long, and narrow screens have no room beside them."""
    if row.label:
        draw.text((_MARGIN, top + 4), fitting(row.label, sheet.width - 2 * _MARGIN), fill=_INK, font=font())
        top += _LABEL
    for number, cell in enumerate(row.cells):
        across = _MARGIN + number * (side + _GAP)
        if cell is None:
            draw.rectangle((across, top, across + side - 1, top + side - 1), fill=_EMPTY)
            draw.text((across + side / 2, top + side / 2), "cannot be read", fill=_FAINT, font=font(), anchor="mm")
            continue
        picture = contained(cell.picture, side)
        sheet.paste(picture, (across + (side - picture.width) // 2, top))
        for line, text in enumerate(cell.caption.splitlines()):
            middle = across + side / 2, top + picture.height + 2 + line * _LINE
            draw.text(middle, fitting(text, side), fill=_FAINT, font=font(), anchor="ma")


def _head(title: str, notes: Sequence[str], width: int, legend: Legend | None) -> Image.Image:
    """The lines above the table, broken to its width."""
    letters = max(int((width - 2 * _MARGIN) / font().getlength("n")), 20)
    lines = [line for note in notes for line in textwrap.wrap(note, letters)]
    bar = None if legend is None else _bar(legend, width)
    if not (title or lines or bar):
        return Image.new("RGB", (width, _MARGIN), _PAPER)
    height = _MARGIN + 26 + _LINE * len(lines) + (0 if bar is None else bar.height + 4) + 8
    head = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(head)
    draw.text((_MARGIN, _MARGIN), fitting(title, width - 2 * _MARGIN, 17), fill=_INK, font=font(17))
    for number, line in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + 26 + number * _LINE), line, fill=_FAINT, font=font())
    if bar is not None:
        head.paste(bar, (0, _MARGIN + 26 + len(lines) * _LINE + 4))
    return head


def _bar(legend: Legend, width: int) -> Image.Image:
    """A range of colours, or one after the other, between what its ends mean."""
    sheet = Image.new("RGB", (width, _LINE), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN, 0), legend.low, fill=_FAINT, font=font())
    start = _MARGIN + math.ceil(font().getlength(legend.low)) + 6
    sheet.paste(legend.bar.resize(_BAR, Image.Resampling.NEAREST), (start, 2))
    draw.text((start + _BAR[0] + 6, 0), legend.high, fill=_FAINT, font=font())
    return sheet


def with_scale(picture: Image.Image, legend: Legend, meaning: str) -> Image.Image:
    """The picture above its range of colours, with what the ends are and what it shows."""
    writing = font(_SCALE_WRITING)
    width = max(picture.width, int(sum(writing.getlength(text) for text in (legend.low, legend.high, meaning))) + 40)
    scale = Image.new("RGB", (width, _NEAR + _SCALE_BAR + _SCALE_WRITING + 8), _PAPER)
    scale.paste(legend.bar.resize((width, _SCALE_BAR)), (0, _NEAR))
    draw, line = ImageDraw.Draw(scale), _NEAR + _SCALE_BAR + 3
    draw.rectangle((0, _NEAR, width - 1, _NEAR + _SCALE_BAR - 1), outline=_FRAME)
    for text, across, anchor in ((legend.low, 2, "la"), (meaning, width / 2, "ma"), (legend.high, width - 2, "ra")):
        draw.text((across, line), text, fill=_INK, font=writing, anchor=anchor)
    return stacked([picture, scale], centered=True)


def swatches(entries: Sequence[tuple[tuple[int, int, int], str]], width: int) -> Image.Image:
    """A patch of colour and a name for each entry, as many in a row as fit."""
    writing = font()
    longest = max((writing.getlength(name) for _, name in entries), default=0)
    cell = math.ceil(longest) + _SWATCH + 2 * _NEAR
    columns = max(width // cell, 1)
    rows = math.ceil(len(entries) / columns)
    sheet = Image.new("RGB", (max(width, cell), rows * _SWATCH + 2 * _NEAR), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, (color, name) in enumerate(entries):
        left, top = _NEAR + number % columns * cell, _NEAR + number // columns * _SWATCH
        draw.rectangle((left, top + 3, left + 14, top + 15), fill=color, outline="black")
        draw.text((left + _SWATCH, top + 2), name, fill="black", font=writing)
    return sheet


def stacked(pictures: Sequence[Image.Image], *, centered: bool = False) -> Image.Image:
    """Pictures one below the other."""
    width = max(picture.width for picture in pictures)
    sheet = Image.new("RGB", (width, sum(picture.height for picture in pictures)), _PAPER)
    top = 0
    for picture in pictures:
        sheet.paste(picture, ((width - picture.width) // 2 if centered else 0, top))
        top += picture.height
    return sheet


def strip(squares: Sequence[Image.Image], *, side: int = 64, least: int = 1) -> Image.Image:
    """Squares side by side; where there are fewer than `least`, the rest is white."""
    sheet = Image.new("RGB", (strip_width(max(len(squares), least), side), side), _PAPER)
    for number, square in enumerate(squares):
        sheet.paste(square, (number * (side + _BETWEEN), 0))
    return sheet


def strip_width(count: int, side: int) -> int:
    """The width of a strip of so many squares."""
    return count * (side + _BETWEEN) - _BETWEEN


def fitting(text: str, width: int, size: int = 12) -> str:
    """As much of both ends of a text as fits into so many pixels; the end of a name tells more than its beginning."""
    writing, clean = font(size), printable(text)
    if writing.getlength(clean) <= width:
        return clean
    for length in range(len(clean) - 1, 0, -1):
        tail = (length + 1) // 2
        short = f"{clean[: length - tail]}…{clean[len(clean) - tail :]}"
        if writing.getlength(short) <= width:
            return short
    return "…"


def printable(text: str) -> str:
    """A file's name may hold bytes that are no text, and line breaks."""
    return " ".join(text.encode("utf-8", "replace").decode("utf-8").split())


@cache
def font(size: int = 12) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font that matplotlib brings along, which has the letters of many languages; else Pillow's, of ASCII alone."""
    spec = find_spec("matplotlib")
    path = Path(spec.origin or "").parent / _WITHIN_MATPLOTLIB if spec is not None else None
    if path is not None and path.exists():
        return ImageFont.truetype(path, size)
    return ImageFont.load_default(size)


MOST_ROWS = 24


@dataclass(frozen=True)
class Photo:
    """An image as people see it."""

    name: str
    picture: Image.Image


@dataclass(frozen=True)
class DrawnModel:
    """What one model, at one resolution, drew of images by their numbers; those it could not read are missing."""

    name: str
    detail: str
    drawn: Mapping[int, Sequence[Drawn]]


def figure(
    kind: str,
    photos: Sequence[Image.Image],
    feature_maps: Mapping[str, Sequence[Tensor]],
    *,
    names: Sequence[str] = (),
    joint: bool = False,
) -> Image.Image:
    """A figure of feature maps in memory, (rows, columns, width) each, of the same images by several models."""
    if kind not in PAINTERS:
        raise CapiError(f'there is no picture "{kind}"{nearest(kind, PAINTERS)}: choose from {", ".join(PAINTERS)}')
    if not photos or any(len(maps) != len(photos) for maps in feature_maps.values()):
        raise CapiError(f"each model needs a feature map for each of the {len(photos)} photos, and at least one")
    titles = names or [f"image {number + 1}" for number in range(len(photos))]
    shown = {number: Photo(title, photo) for number, (title, photo) in enumerate(zip(titles, photos, strict=True))}
    painter, columns = PAINTERS[kind](joint), []
    for model, maps in feature_maps.items():
        drawn = paint(painter, list(maps))
        columns.append(DrawnModel(model, f"{maps[0].shape[0]} x {maps[0].shape[1]} patches", dict(enumerate(drawn))))
    return figure_of(painter, shown, columns)


def figure_of(
    painter: Painter, photos: Mapping[int, Photo], columns: Sequence[DrawnModel], *, images: int | None = None
) -> Image.Image:
    """A figure of what was drawn; `images` is how many there are in all, where not all are shown."""
    several = next((drawn for column in columns for drawn in column.drawn.values() if len(drawn) > 1), None)
    if several is None:
        numbers, heads = list(photos), [f"{column.name}\n{column.detail}" for column in columns]
        rows = [
            Row(photos[number].name, [Drawn(photos[number].picture), *drawn])
            for number in numbers
            for drawn in [[next(iter(column.drawn.get(number, ())), None) for column in columns]]
        ]
    else:
        numbers, heads = list(photos)[: max(MOST_ROWS // len(columns), 1)], [drawn.title for drawn in several]
        missing: list[Drawn | None] = [None] * len(heads)
        rows = [
            Row(
                f"{photos[number].name} · {column.name}, {column.detail}",
                [Drawn(photos[number].picture), *(column.drawn.get(number) or missing)],
            )
            for number in numbers
            for column in columns
        ]
    total = len(photos) if images is None else images
    notes = [painter.explanation, *([f"Shown: {len(numbers)} of {total} images."] if len(numbers) < total else [])]
    return sheet_of(painter.title, notes, ["photo", *heads], rows, legend=painter.legend())
