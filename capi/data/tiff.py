"""TIFF files with any number of channels, read in parts: only the tiles or strips that a crop touches are decoded."""

import importlib.util
import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capi.errors import CapiError

# Classic and big TIFF, in both byte orders.
_MAGIC = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
_CHUNKY = 1


def is_tiff(source: Path | bytes) -> bool:
    """Whether a file begins as a TIFF does."""
    if isinstance(source, bytes):
        return source[:4] in _MAGIC
    with source.open("rb") as file:
        return file.read(4) in _MAGIC


@cache
def has_tiff_reader() -> bool:
    """Whether the extra `tiff` is installed."""
    return importlib.util.find_spec("tifffile") is not None


def open_tiff(source: Path | bytes) -> "TiffFile":
    """The first page of a TIFF."""
    if not has_tiff_reader():
        raise CapiError("TIFF files with other than 1 or 3 channels need the extra: pip install 'capi[tiff]'")
    return TiffFile(source)


class TiffFile:
    """The first page of a TIFF, of which any rectangle can be read."""

    def __init__(self, source: Path | bytes) -> None:
        import tifffile

        self.source = source
        try:
            with self._open() as file:
                page = file.pages[0]
                self.width, self.height = int(page.imagewidth), int(page.imagelength)
                self.channels = int(page.samplesperpixel)
                self.planar = self.channels > 1 and page.planarconfig != _CHUNKY
                orientation = page.tags.get("Orientation")
                turned = orientation is not None and orientation.value != 1
                photometric = int(page.photometric)
                self.is_plain = not turned and page.dtype == np.uint8 and photometric in {1, 2} and self.channels <= 3
        except tifffile.TiffFileError as error:
            raise ValueError(str(error)) from error

    def _open(self) -> Any:
        import tifffile

        return tifffile.TiffFile(io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source)

    def read(self, top: int, bottom: int, left: int, right: int) -> npt.NDArray[Any]:
        """The rectangle as (height, width) or (height, width, channels)."""
        with self._open() as file:
            page = file.pages[0]
            # Asked before the loop, since looking these up moves the file's position.
            decode, tables = page.decode, page.jpegtables
            result = np.full((bottom - top, right - left, self.channels), page.nodata, dtype=page.dtype)
            for number, (offset, length) in enumerate(zip(page.dataoffsets, page.databytecounts, strict=True)):
                place = self._place(page, number)
                # A segment of no bytes is one that was never written.
                if not length or not _overlap(place, (top, bottom, left, right)):
                    continue
                file.filehandle.seek(offset)
                segment, _, shape = decode(file.filehandle.read(length), number, jpegtables=tables)
                if segment is not None:
                    _paste(result, segment[0], shape, place, (top, left), self._channel(page, number))
        return result[:, :, 0] if self.channels == 1 else result

    def _place(self, page: Any, number: int) -> tuple[int, int, int, int]:
        """Top, bottom, left and right of a tile or strip, as it reaches into the image."""
        rows, columns = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, self.width)
        across, down = -(-self.width // columns), -(-self.height // rows)
        row, column = divmod(number % (across * down), across)
        return row * rows, (row + 1) * rows, column * columns, (column + 1) * columns

    def _channel(self, page: Any, number: int) -> int | None:
        """The channel of a segment where each has its own, else None."""
        return number // (len(page.dataoffsets) // self.channels) if self.planar else None


def _overlap(place: tuple[int, int, int, int], wanted: tuple[int, int, int, int]) -> bool:
    return place[0] < wanted[1] and wanted[0] < place[1] and place[2] < wanted[3] and wanted[2] < place[3]


def _paste(
    result: npt.NDArray[Any],
    segment: npt.NDArray[Any],
    shape: tuple[int, ...],
    place: tuple[int, int, int, int],
    corner: tuple[int, int],
    channel: int | None,
) -> None:
    """Copy the part of a decoded segment that lies within the result, whose upper left corner is `corner`."""
    top, left = place[0] - corner[0], place[2] - corner[1]
    # shape is (depth, rows, columns, samples), cut where the segment would reach beyond the image.
    rows = slice(max(top, 0), min(top + shape[1], result.shape[0]))
    columns = slice(max(left, 0), min(left + shape[2], result.shape[1]))
    part = segment[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
    if channel is None:
        result[rows, columns] = part
    else:
        result[rows, columns, channel] = part[:, :, 0]
