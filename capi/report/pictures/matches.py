"""The contact sheet of a search: an image and the images or patches of a file that are most similar to it."""

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
from capi.report.pictures.painters import Drawn
from capi.report.pictures.pca import photos_of
from capi.report.pictures.sheets import Row, font, printable, sheet_of
from capi.runtime.image_files import is_below

_TILE, _PER_ROW = 184, 6
_FAINT, _ACCENT, _EMPTY = "#6e7781", "#e5484d", "#eef0f2"
_SMALLEST_FRAME = 9


def similarity_sheet(
    query: Path,
    matches: Sequence[Match],
    images: ImageSource | Path | None,
    *,
    framing: Framing,
    at: tuple[float, float] | None = None,
) -> Image.Image:
    """The image asked about and its matches, each with its rank, similarity and name.

    `images` is the folder that names are relative to, or the source itself. Patches are framed.
    """
    cells = [Drawn(query_tile(query, _TILE, framing, at), caption=f"query\n{query.name}")]
    for rank, match in enumerate(matches, start=1):
        lines = [f"{rank}.   {match.similarity:.3f}", match.label or "", match.name]
        caption = "\n".join(printable(line) for line in lines if line)
        cells.append(Drawn(match_tile(match, _TILE, framing, images), caption=caption))
    rows = [Row("", cells[start : start + _PER_ROW]) for start in range(0, len(cells), _PER_ROW)]
    return sheet_of("", (), (), rows, side=_TILE)


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
    is_there = match.number < len(images) and images.name(match.number) == match.name
    return images.read(match.number) if is_there else None


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
