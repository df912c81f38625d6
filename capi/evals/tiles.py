"""Features of an image that is too large to be encoded at once: tiles that overlap, stitched to one feature map.

Every patch of the map comes from one tile, the one in which it lies farther from the edge: where two tiles overlap, the
middle of the overlap divides them. Nothing is averaged, so each feature is one that the encoder gave. Tiles
begin at multiples of a patch, so their grids agree; the last tile of a row or column is moved inwards to end with the
image, and what does not fill a patch at the right and the bottom (less than one) is left out.

Memory holds a row of tiles in pixels and a batch of features; the map is filled in on the disk. A TIFF in tiles or
strips is read in parts, other images are decoded once and kept. The file is one of `capi extract` with one image, and
resumes after the last complete row of tiles.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from capi.data.decoding import Box, Decoder
from capi.data.reader import ImageReader
from capi.data.sources import ImageSource
from capi.errors import CapiError, nearest
from capi.evals.extraction import Partial, difference, encoder_description, must_have_room, telling_disk_errors
from capi.evals.feature_files import TYPES, FeatureFacts, FeatureWriter, Framing, begin_features, filling, read_features
from capi.evals.features import Encoding, encode
from capi.evals.images import image_crop, image_size
from capi.runtime.atomic import Output, move_into_place
from capi.types import Features, VisionEncoder, statistics_of

_LOG = logging.getLogger("capi")
# Of images that are read in parts; of others the usual limit holds.
MOST_PIXELS = 2**36


class Tiling(NamedTuple):
    """The side of a tile and the overlap of neighbours, in patches."""

    side: int
    overlap: int


class Span(NamedTuple):
    """Along one axis, in patches: where a tile begins, and the first and last patch (exclusive) taken from it."""

    start: int
    first: int
    last: int


def tiling_of(encoder: VisionEncoder, tile: int, overlap: int | None) -> Tiling:
    """A tile and an overlap in pixels as whole patches. The overlap is an eighth of the tile by default."""
    patch = encoder.patch_size
    side = max(round(tile / patch), 1)
    wanted = side * patch // 8 if overlap is None else overlap
    tiling = Tiling(side, -(-wanted // patch) if side > 1 or overlap is not None else 0)
    if not 0 <= tiling.overlap < side:
        raise CapiError(
            f"an overlap of {wanted} pixels does not fit tiles of {side * patch}: take at most half of them"
        )
    taken = (side * patch, tiling.overlap * patch)
    if taken != (tile, taken[1] if overlap is None else overlap):
        _LOG.warning("tiles of %s pixels that overlap by %s: the nearest that patches of %s fill", *taken, patch)
    return tiling


def spans(length: int, tiling: Tiling) -> list[Span]:
    """The tiles along one axis of so many patches."""
    side = min(tiling.side, length)
    step = max(side - tiling.overlap, 1)
    starts = [*range(0, length - side, step), length - side]
    borders = [(before + side + after) // 2 for before, after in pairwise(starts)]
    return [Span(*each) for each in zip(starts, [0, *borders], [*borders, length], strict=True)]


def stitch(
    encoder: VisionEncoder,
    source: ImageSource,
    number: int,
    output: Output,
    *,
    tiling: Tiling,
    encoding: Encoding,
    about: dict[str, Any],
    dtype: str = "float32",
) -> tuple[tuple[int, int], bool]:
    """Write the map of one image; gives its rows and columns, and whether it was there already."""
    if dtype not in TYPES:
        raise CapiError(f'features are stored as {" or ".join(TYPES)}, not "{dtype}"{nearest(dtype, TYPES)}')
    patch, statistics = encoder.patch_size, statistics_of(encoder)
    decoder = Decoder(len(statistics.mean), smallest_side=patch, crop_first=True, max_pixels_in_parts=MOST_PIXELS)
    # What cannot be read in parts is decoded once; the decoder bounds its size.
    reader = ImageReader(source, decoder, cache_bytes=2**63)
    height, width = image_size(reader, number)
    rows, columns = height // patch, width // patch
    root = getattr(source, "root", None)
    facts = FeatureFacts(
        images=1,
        shapes={"patch": (rows, columns, encoder.width)},
        dtype=dtype,
        framing=Framing((rows * patch, columns * patch), (rows, columns), whole=True, channels=len(statistics.mean)),
        encoder=encoder_description(encoder),
        root=str(root) if isinstance(root, Path) else None,
        classes=None,
        about={
            **about,
            "tile": tiling.side * patch,
            "overlap": tiling.overlap * patch,
            "precision": str(encoding.precision).removeprefix("torch."),
        },
    )
    identity = _identity(source.name(number), facts)
    out = output.path
    if out.exists() and not output.overwrite:
        there = read_features(out)
        reason = difference(_identity(next(iter(there.names), ""), there.facts), identity)
        if reason is not None:
            raise CapiError(
                f"{out} is there already, and {reason}: choose another folder, or replace it with --overwrite"
            )
        return (rows, columns), True
    partial = Partial(out.with_name(f".{out.name}.partial"))
    with telling_disk_errors(out), partial.locked():
        done = partial.prepare(identity, output.overwrite)
        if done == 0:
            must_have_room(partial.path, facts, 1)
            begin_features(partial.features, facts, [source.name(number)], None)
        with filling(partial.features) as writer:
            _fill(encoder, reader, number, writer, partial, tiling, encoding, done)
        move_into_place(partial.features, out)
        shutil.rmtree(partial.path)
    return (rows, columns), False


def _identity(name: str, facts: FeatureFacts) -> dict[str, Any]:
    """All that a map depends on, as its file says it."""
    said = json.loads(facts.to_text())
    about = {key: value for key, value in said["about"].items() if key != "data"}
    return {"encoder": said["encoder"], "data": [name, *facts.framing.size], "dtype": facts.dtype, **about}


def _fill(
    encoder: VisionEncoder,
    reader: ImageReader,
    number: int,
    writer: FeatureWriter,
    partial: Partial,
    tiling: Tiling,
    encoding: Encoding,
    done: int,
) -> None:
    """Encode the rows of tiles from this one on."""
    rows, columns, _ = writer.facts.shapes["patch"]
    down, across = spans(rows, tiling), spans(columns, tiling)
    total = len(down) * len(across)
    encoding.progress("tiles", done * len(across), total)
    for place in range(done, len(down)):
        row = down[place]
        for tiles, features in _encoded(encoder, reader, number, row, across, tiling, encoding):
            for column, tile in zip(tiles, features.feature_map, strict=True):
                part = tile[row.first - row.start : row.last - row.start, column.first - column.start :]
                writer.write_patches(row.first, column.first, part[:, : column.last - column.first])
            encoding.progress("tiles", place * len(across) + across.index(tiles[-1]) + 1, total)
        writer.flush()
        partial.save(place + 1)


def _encoded(
    encoder: VisionEncoder,
    reader: ImageReader,
    number: int,
    row: Span,
    across: list[Span],
    tiling: Tiling,
    encoding: Encoding,
) -> Iterator[tuple[list[Span], Features]]:
    """The tiles of one row in batches. The row is read once, so that no part of a file is decoded for each tile."""
    patch = encoder.patch_size
    height, width = image_size(reader, number)
    tall, wide = (min(tiling.side, side // patch) * patch for side in (height, width))
    top = row.start * patch
    pixels = image_crop(reader, number, Box(0, top, width, top + tall), (tall, width))
    for first in range(0, len(across), encoding.batch_size):
        tiles = across[first : first + encoding.batch_size]
        parts = [pixels[:, :, tile.start * patch : tile.start * patch + wide] for tile in tiles]
        yield tiles, encode(encoder, torch.from_numpy(np.stack(parts)), encoding)
