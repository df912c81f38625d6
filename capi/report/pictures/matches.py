"""The contact sheet of a search: an image and the images or patches of a file that are most similar to it."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from capi.data.decoding import Box, BrokenImageError, Decoder
from capi.data.sources import ImageSource
from capi.evals.feature_files import Framing
from capi.evals.retrieval import Match, patch_under
from capi.report.pictures.pca import photos_of
from capi.report.pictures.sheets import fitting, font
from capi.runtime.image_files import is_below

_TILE, _GAP, _PER_ROW = 184, 16, 5
_LINE, _MARGIN = 19, 24
_INK, _FAINT, _ACCENT, _PAPER, _EMPTY = "#1f2328", "#6e7781", "#e5484d", "white", "#eef0f2"
_SMALLEST_FRAME = 9


def similarity_sheet(
    query: Path,
    matches: Sequence[Match],
    images: ImageSource | Path | None,
    *,
    framing: Framing,
    at: tuple[float, float] | None = None,
) -> Image.Image:
    """The image asked about on the left, its matches in rows beside it, each with its rank, similarity and name.

    `images` is the folder that names are relative to, or the source itself. Patches are framed.
    """
    columns = max(1, min(_PER_ROW, len(matches)))
    rows = max(1, math.ceil(len(matches) / columns))
    labelled = any(match.label is not None for match in matches)
    step = _TILE + _GAP, _TILE + _LINE * (2 + labelled) + _GAP
    # Beside several rows there is room for a larger picture.
    side = _TILE if rows == 1 else min(2 * step[1] - _GAP - _LINE * 2, 2 * _TILE)
    left = _MARGIN + side + 2 * _GAP
    sheet = Image.new("RGB", (left + columns * step[0] - _GAP + _MARGIN, rows * step[1] - _GAP + 2 * _MARGIN), _PAPER)
    _paste(sheet, (_MARGIN, _MARGIN), query_tile(query, side, framing, at), ["query", query.name])
    draw = ImageDraw.Draw(sheet)
    draw.line((left - _GAP, _MARGIN, left - _GAP, sheet.height - _MARGIN), fill="#d0d7de")
    for position, match in enumerate(matches):
        down, across = divmod(position, columns)
        corner = left + across * step[0], _MARGIN + down * step[1]
        _paste(sheet, corner, match_tile(match, _TILE, framing, images), _caption(position + 1, match, labelled))
    return sheet


def query_tile(query: Path, side: int, framing: Framing, at: tuple[float, float] | None) -> Image.Image:
    """The image asked about, with a frame around the patch under a point."""
    patch = None if at is None else patch_under(query, framing, at)
    return _tile(query, side, framing, patch)


def match_tile(match: Match, side: int, framing: Framing, images: ImageSource | Path | None) -> Image.Image:
    """The image of a match, with a frame around its patch; grey where there is no such image any more."""
    source = _place(match, images)
    if source is None or (isinstance(source, Path) and not os.path.isfile(source)):
        return _message("not found", side)
    return _tile(source, side, framing, match.patch)


def _place(match: Match, images: ImageSource | Path | None) -> Path | bytes | None:
    if images is None or isinstance(images, Path):
        # Names in a file that someone else made lead nowhere else.
        below = images is not None and "\0" not in match.name and is_below(images / match.name, [images])
        return images / match.name if images is not None and below else None
    known = match.number < len(images) and images.name(match.number) == match.name
    return images.read(match.number) if known else None


def _tile(source: Path | bytes, side: int, framing: Framing, patch: tuple[int, int] | None) -> Image.Image:
    """A picture in the middle of a square, all of it, in its own aspect."""
    try:
        # Photos are shown in colour also where the encoder sees grey; what is no photo, by its first channels.
        channels = 3 if framing.channels == 1 else framing.channels
        opened = Decoder(channels=channels, reduced=True).open(source)
        height, width = opened.shape.height, opened.shape.width
        scale = side / max(height, width)
        size = max(1, round(height * scale)), max(1, round(width * scale))
        pixels = np.ascontiguousarray(opened.crop(Box(0, 0, width, height), size))
        picture = photos_of(torch.from_numpy(pixels)[None])[0]
    except (BrokenImageError, OSError):
        return _message("cannot be read", side)
    tile = Image.new("RGB", (side, side), _EMPTY)
    corner = (side - size[1]) // 2, (side - size[0]) // 2
    tile.paste(picture, corner)
    if patch is not None:
        box = framing.patch_box((height, width), *patch).scaled(size[1] / width, size[0] / height)
        _draw_frame(tile, Box(box.left + corner[0], box.top + corner[1], box.right + corner[0], box.bottom + corner[1]))
    return tile


def _draw_frame(tile: Image.Image, box: Box) -> None:
    """Around the patch, not over it; light and dark, so that it shows on any picture."""
    widen = [max(0.0, (_SMALLEST_FRAME - length) / 2) for length in (box.right - box.left, box.bottom - box.top)]
    left, top = round(box.left - widen[0]), round(box.top - widen[1])
    right, bottom = round(box.right + widen[0]) - 1, round(box.bottom + widen[1]) - 1
    draw = ImageDraw.Draw(tile)
    draw.rectangle((left - 3, top - 3, right + 3, bottom + 3), outline="white", width=1)
    draw.rectangle((left - 2, top - 2, right + 2, bottom + 2), outline=_ACCENT, width=2)


def _message(text: str, side: int) -> Image.Image:
    tile = Image.new("RGB", (side, side), "#d0d7de")
    ImageDraw.Draw(tile).text((side / 2, side / 2), text, fill=_FAINT, font=font(14), anchor="mm")
    return tile


def _caption(rank: int, match: Match, labelled: bool) -> list[str]:
    told = "   the same patch" if match.itself and match.patch else "   the same image" if match.itself else ""
    lines = [f"{rank}.   {match.similarity:.3f}{told}"]
    return [*lines, *([match.label or ""] if labelled else []), match.name]


def _paste(sheet: Image.Image, corner: tuple[int, int], tile: Image.Image, lines: Sequence[str]) -> None:
    sheet.paste(tile, corner)
    draw = ImageDraw.Draw(sheet)
    for number, line in enumerate(lines):
        size = 14 if number == 0 else 13
        top = corner[1] + tile.height + 4 + number * _LINE
        fill = _FAINT if number == len(lines) - 1 else _INK
        draw.text((corner[0], top), fitting(line, tile.width, size), fill=fill, font=font(size))
