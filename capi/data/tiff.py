"""TIFF files with any number of channels, in one page or in several, read in parts.

Only the tiles or strips that a crop touches are decoded.
"""

import importlib.util
import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capi.errors import CapiError, counted

# Classic and big TIFF, in both byte orders.
_MAGIC = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
_CHUNKY = 1
TIFF_EXTRA = "pip install 'capi[tiff]'"
# Photometric interpretations whose values are those of the image: black is zero, RGB.
_DIRECT = (1, 2)
# YCbCr in JPEG, as slides have it: the codec gives RGB.
_YCBCR, _JPEG = 6, 7
# Letters that tifffile gives to an axis of which a file says nothing.
_UNNAMED = {"Q", "I"}
_MOST_PAGES = 4096


def is_tiff(content: bytes) -> bool:
    """Whether a file begins as a TIFF does."""
    return content[:4] in _MAGIC


@cache
def has_tiff_reader() -> bool:
    """Whether the extra `tiff` is installed."""
    return importlib.util.find_spec("tifffile") is not None


def open_tiff(source: Path | bytes) -> "TiffFile":
    """The image of a TIFF: its first page, or the pages that are its channels."""
    if not has_tiff_reader():
        raise CapiError(f"TIFF files with other than 1 or 3 channels need the extra: {TIFF_EXTRA}")
    return TiffFile(source)


class TiffFile:
    """The image of a TIFF, of which any rectangle can be read.

    Pages along an axis C are channels, as are samples (S). Pages along an axis without a name (`unnamed`) may be
    channels too. Stacks along Z, T or another axis raise `ValueError`.
    """

    def __init__(self, source: Path | bytes) -> None:
        import tifffile

        self.source = source
        try:
            with self._open() as file:
                pages, self.unnamed = _pages(file)
                page = _keyframe(pages)
                self.width, self.height = int(page.imagewidth), int(page.imagelength)
                self.pages, self.samples = len(pages), int(page.samplesperpixel)
                self.channels = self.pages * self.samples
                # What is decoded at once: a tile, or a strip.
                side = page.tilelength if page.is_tiled else min(page.rowsperstrip, self.height)
                self.pixels_at_once = int(side) * int(page.tilewidth if page.is_tiled else self.width)
                self.planar = self.samples > 1 and page.planarconfig != _CHUNKY
                orientation = page.tags.get("Orientation")
                turned = orientation is not None and orientation.value != 1
                is_byte = page.dtype == np.uint8
                # Grey or RGB as it is seen; palettes, other YCbCr and transparency are left to Pillow.
                photometric = int(page.photometric)
                is_rgb = photometric in _DIRECT or (photometric, int(page.compression)) == (_YCBCR, _JPEG)
                self.is_direct = not turned and is_rgb
                self.is_plain = self.is_direct and is_byte and self.channels <= 3
                # Pillow would read bytes only.
                self.is_deep_color = self.is_direct and not is_byte and self.samples == 3
        except tifffile.TiffFileError as error:
            raise ValueError(str(error)) from error
        if self.pages > 1 and not self.is_direct:
            raise ValueError(f"{self.pages} pages in other than plain grey or RGB: write them to files of their own")

    def _open(self) -> Any:
        import tifffile

        # Not the other files that an OME-TIFF may name.
        return tifffile.TiffFile(
            io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source, _multifile=False
        )

    def read(self, top: int, bottom: int, left: int, right: int) -> npt.NDArray[Any]:
        """The rectangle as (height, width) or (height, width, channels)."""
        with self._open() as file:
            pages, _ = _pages(file)
            first = _keyframe(pages)
            result = np.full((bottom - top, right - left, self.channels), first.nodata, dtype=first.dtype)
            for number, page in enumerate(pages):
                # A plane that an OME-TIFF names and does not have stays empty.
                if page is not None:
                    part = result[:, :, number * self.samples : (number + 1) * self.samples]
                    self._read_page(file.filehandle, page, part, (top, bottom, left, right))
        return result[:, :, 0] if self.channels == 1 else result

    def _read_page(self, handle: Any, page: Any, result: npt.NDArray[Any], wanted: tuple[int, int, int, int]) -> None:
        # Asked before the loop, since looking these up moves the file's position.
        frame, tables = page.keyframe, page.jpegtables
        decode = frame.decode
        for number, (offset, length) in enumerate(zip(page.dataoffsets, page.databytecounts, strict=True)):
            place = self._place(frame, number)
            # A segment of no bytes is one that was never written.
            overlaps = place[0] < wanted[1] and wanted[0] < place[1] and place[2] < wanted[3] and wanted[2] < place[3]
            if not length or not overlaps:
                continue
            handle.seek(offset)
            segment, _, shape = decode(handle.read(length), number, jpegtables=tables)
            if segment is not None:
                # The channel of a segment where each has its own, else None.
                channel = number // (len(page.dataoffsets) // self.samples) if self.planar else None
                _paste(result, segment[0], shape, place, (wanted[0], wanted[2]), channel)

    def _place(self, page: Any, number: int) -> tuple[int, int, int, int]:
        """Top, bottom, left and right of a tile or strip, as it reaches into the image."""
        rows, columns = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, self.width)
        across, down = -(-self.width // columns), -(-self.height // rows)
        row, column = divmod(number % (across * down), across)
        return row * rows, (row + 1) * rows, column * columns, (column + 1) * columns


def _pages(file: Any) -> tuple[list[Any], bool]:
    """The pages of a TIFF's image, and whether nothing names what they differ in."""
    # A page may be followed by the planes that the metadata of ImageJ or tifffile name, without pages of their own.
    if len(file.pages) == 1 and not (file.is_imagej or file.is_shaped):
        return [_flat(file.pages[0])], False
    if len(file.pages) > _MOST_PAGES:
        raise ValueError(f"{len(file.pages)} pages are more than the {_MOST_PAGES} that an image may have")
    if file.is_ndtiff:
        raise ValueError("an NDTiff data set, whose planes lie in several files: write an image to each file")
    series = [image for image in file.series if not image.keyframe.is_reduced] or file.series
    first = series[0]
    equal = [
        image for image in series if (image.shape, image.axes, image.dtype) == (first.shape, first.axes, first.dtype)
    ]
    _flat(first.keyframe)
    # Several images of the same kind differ in something that has no name.
    axes = _outer_axes(first) + "I" * (len(equal) > 1)
    if axes not in {"", "C", *_UNNAMED}:
        shape = " x ".join(str(length) for length in first.shape)
        several = f"{len(equal)} images" if len(equal) > 1 else "a stack"
        raise ValueError(
            f"{several} with axes {first.axes} ({shape}), of which only C and S are channels: choose a plane, and "
            "write it to a file of its own with axes CYX (tifffile.imwrite with metadata={'axes': 'CYX'})"
        )
    return [page for image in equal for page in image.pages], axes in _UNNAMED


def _keyframe(pages: list[Any]) -> Any:
    """The page that has the tags of all of them."""
    return next(page for page in pages if page is not None).keyframe


def _flat(page: Any) -> Any:
    if page.imagedepth > 1:
        raise ValueError(
            f"a page with a depth of {page.imagedepth}: choose a plane, and write it to a file of its own with axes YX"
        )
    return page


def _outer_axes(series: Any) -> str:
    """The axes along which the pages of a series differ."""
    page, count = series.keyframe, len(series.pages)
    if series.size != count * page.size:
        raise ValueError(
            f"axes {series.axes} of shape {series.shape}, but {counted(count, 'page')} of shape {page.shape}: write "
            "the file with a page for each plane"
        )
    if count == 1:
        return ""
    outer = len(series.axes) - len(page.axes)
    ends = series.shape[outer:] == page.shape and series.axes[outer:].rstrip("SC").endswith("YX")
    if not ends:
        raise ValueError(
            f"axes {series.axes}, but pages of axes {page.axes} and shape {page.shape}: write the file with axes CYX"
        )
    return "".join(name for name, length in zip(series.axes[:outer], series.shape, strict=False) if length > 1)


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
