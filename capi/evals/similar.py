"""The images or patches of a file of features that are most like an image, or like a patch of it; and their picture.

Similarity is the cosine of the features. The bank is read a part at a time, so that millions of patches need no more
memory than some hundred megabytes.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from capi.data.decoding import Box, BrokenImageError, Decoder
from capi.data.sources import Files, ImageSource
from capi.errors import CapiError
from capi.evals.extraction import encoder_description, features_of
from capi.evals.feature_files import TYPES, FeatureFile, Framing
from capi.evals.features import Encoding, encoded_batches, silent
from capi.evals.neighbours import NearestNeighbours
from capi.report.pictures.pca import photos_of
from capi.report.pictures.sheets import fitting
from capi.report.pictures.text import font
from capi.runtime.image_files import is_below
from capi.types import Features, Float, Int, VisionEncoder

# An image encoded alone and in a batch differs in its last digits: such similarities count as equal to its own.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Match:
    """An image of the file, or a patch of one, and how similar it is."""

    name: str
    number: int
    similarity: float
    label: str | None = None
    patch: tuple[int, int] | None = None
    """Row and column, where patches were searched."""
    itself: bool = False
    """Whether it is the very image, or the very patch, that was asked about."""


def find_similar(
    file: FeatureFile,
    encoder: VisionEncoder,
    image: Path,
    *,
    encoding: Encoding,
    count: int = 10,
    at: tuple[float, float] | None = None,
    kind: str | None = None,
    root: Path | None = None,
) -> list[Match]:
    """The most similar images, best first; equally similar ones in the order of the file.

    `root` is the folder of the file's images, if it is not the one that the file names.
    With a point `at` (x, y), in pixels of the image as it is seen, the patch there is compared with all patches.
    Images are framed as they were for the file, whatever the size in `encoding`.
    """
    if count < 1:
        raise CapiError(f"{count} matches cannot be shown: ask for at least 1")
    if not image.exists():
        raise CapiError(f"there is no file {image}: give the image to find similar ones of")
    refuse_other(file, encoder)
    kind = _chosen_kind(file, kind, at)
    features = _encoded(file, encoder, image, encoding, pooled=kind == "pooled")
    if at is None:
        query, place = _vectors(features_of(features, kind).to(_dtype(file)), kind), None
    else:
        place = file.facts.framing.patch_at(_size(image, file.facts.framing), *at)
        query = features.feature_map[:, place[0], place[1]].to(_dtype(file))
    index, similarity = _most_similar(file, kind, query, count)
    matches = [_match(file, kind, *found) for found in zip(index.tolist(), similarity.tolist(), strict=True)]
    named = file.facts.root if root is None else root
    return _itself_first(matches, None if named is None else Path(named), image, place)


def refuse_other(file: FeatureFile, encoder: VisionEncoder) -> None:
    """Features are compared with features of the same encoder only."""
    known, found = file.facts.encoder, encoder_description(encoder)
    if known.get("width") != found["width"]:
        raise CapiError(
            f"{file.path} holds features of an encoder of width {known.get('width')}, but this one has "
            f"{found['width']}: use the encoder that they were extracted with"
        )
    unknown = not (known.get("fingerprint") and found["fingerprint"])
    same = [known.get(key) == found[key] for key in ("patch_size", "statistics")]
    if not all(same) or not (unknown or known["fingerprint"] == found["fingerprint"]):
        raise CapiError(
            f"{file.path} holds features of another encoder of the same width, which mean something else: use the "
            "encoder that they were extracted with, or extract them again"
        )


def _chosen_kind(file: FeatureFile, kind: str | None, at: tuple[float, float] | None) -> str:
    kinds = list(file.facts.shapes)
    if at is not None:
        if kind not in {None, "patch"}:
            raise CapiError(f'a point asks about a patch, but the kind is "{kind}": leave one of them out')
        if "patch" not in kinds:
            raise CapiError(f'{file.path} has no "patch" features, which a point needs: extract them')
        return "patch"
    if kind == "patch":
        raise CapiError("patches are compared with a patch: say with --at x,y, in pixels, where in the image it lies")
    # Patches have a mean, whether it was stored or not.
    usable = [name for name in kinds if name != "patch"] + ["mean_patch"] * ("patch" in kinds)
    if kind is not None and kind not in usable:
        raise CapiError(f'{file.path} has no "{kind}" features, but {", ".join(kinds)}')
    return kind or ("mean_patch" if "mean_patch" in usable else usable[0])


def _encoded(file: FeatureFile, encoder: VisionEncoder, image: Path, encoding: Encoding, *, pooled: bool) -> Features:
    framing = file.facts.framing
    encoding = replace(encoding, size=framing.size, workers=0, kept=None, progress=silent)
    source = Files(image.parent, [image.name])
    found = next(encoded_batches(encoder, source, encoding, whole=framing.whole, pooled=pooled))
    pooled_vector, registers, feature_map = found.features
    return Features(None if pooled_vector is None else pooled_vector.cpu(), registers.cpu(), feature_map.cpu())


def _size(image: Path, framing: Framing) -> tuple[int, int]:
    try:
        shape = Decoder(channels=framing.channels).open(image).shape
    except (BrokenImageError, OSError) as error:
        raise CapiError(f"{image} cannot be read ({error}): give another image") from error
    return shape.height, shape.width


def _dtype(file: FeatureFile) -> torch.dtype:
    """What the bank was rounded to, the query is rounded to as well: an image is then most like itself."""
    return TYPES[file.facts.dtype]


def _vectors(values: Tensor, kind: str) -> Float[Tensor, "_ _"]:
    """One row for each image, or for each patch."""
    return values.flatten(0, 2) if kind == "patch" else values.flatten(1)


def _most_similar(
    file: FeatureFile, kind: str, query: Float[Tensor, "1 d"], count: int
) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
    """Numbers of the nearest rows of the bank and their similarities, best first."""
    index, similarity, first = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.float64), 0
    derived = kind == "mean_patch" and kind not in file.facts.shapes
    for part in file.parts("patch" if derived else kind):
        bank = part.float().mean((1, 2)) if derived else _vectors(part, kind)
        rows = _candidates(bank, query, count)
        found = NearestNeighbours(min(count, len(rows))).fit(bank[rows]).kneighbors(query)
        index = torch.cat([index, rows[found.index[0]] + first])
        similarity = torch.cat([similarity, found.closeness[0].double()])
        order = similarity.sort(descending=True, stable=True).indices[:count]
        index, similarity, first = index[order], similarity[order], first + len(bank)
    return index, similarity


def _candidates(bank: Float[Tensor, "s d"], query: Float[Tensor, "1 d"], count: int) -> Int[Tensor, " m"]:
    """Rows that may be among the most similar, in order: for one query a product in float32 rules out most of them."""
    values, direction = bank.float(), query[0].float()
    norms = torch.linalg.vector_norm(values, dim=1)
    cosine = values @ (direction / direction.norm()) / norms
    # Where float32 has no room for a square, nothing is known of the row.
    sure = cosine.isfinite() & (norms > 1e-12)
    error = 4 * (bank.shape[1] + 16) * torch.finfo(torch.float32).eps
    least = cosine.masked_fill(~sure, -torch.inf).topk(min(count, len(bank))).values[-1] - 2 * error
    return ((cosine >= least) | ~sure).nonzero()[:, 0]


def _match(file: FeatureFile, kind: str, row: int, similarity: float) -> Match:
    number, patch = row, None
    if kind == "patch":
        rows, columns = file.facts.framing.grid
        number, place = divmod(row, rows * columns)
        patch = divmod(place, columns)
    label = None if file.labels is None else file.labels[number]
    return Match(file.names[number], number, similarity, label, patch)


def _itself_first(matches: list[Match], root: Path | None, image: Path, place: tuple[int, int] | None) -> list[Match]:
    """Mark the image itself, which comes before its copies."""
    if root is None:
        return matches
    marked = [
        replace(match, itself=True) if match.patch == place and _is_same(root, match.name, image) else match
        for match in matches
    ]
    least = marked[0].similarity - _ROUNDING
    return sorted(marked, key=lambda match: not (match.itself and match.similarity >= least))


def _is_same(root: Path, name: str, image: Path) -> bool:
    if not root.is_dir():
        # Of a folder that was given by an absolute path, the file has only the name.
        return image.resolve().as_posix().endswith(f"/{(root / name).as_posix()}")
    try:
        return os.path.samefile(root / name, image)
    except OSError:
        return False


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
    patch = None if at is None else framing.patch_at(_size(query, framing), *at)
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
