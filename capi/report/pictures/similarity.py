"""How alike patches are: the cosine of one patch to all others, in its image and in others, as numbers and heat maps.

Heat maps are shaded by the photo and carry their scale below them. Every function takes a feature map of shape
(rows, columns, width) and a photo of any size, so that all of it works in a notebook too.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageChops, ImageDraw
from torch import Tensor

from capi.report.pictures.colormaps import heat
from capi.report.pictures.gallery import PatchPlace
from capi.report.pictures.painters import Legend
from capi.report.pictures.sheets import with_scale
from capi.types import Bool, Float

# Cosines that differ by less are the same but for rounding.
ROUNDING = 1e-6
_MOST = (0.05, 0.98)
# How dark the heat becomes where the photo is black. Black stays black, so that no colour stands for two values.
_DARKEST = 0.55


class PatchBox(NamedTuple):
    """The pixels of a patch in a picture: left and top are inside, right and bottom are not."""

    left: int
    top: int
    right: int
    bottom: int


def similarity_map(
    patch: Float[Tensor, " d"], feature_map: Float[Tensor, "rows columns d"]
) -> Float[Tensor, "rows columns"]:
    """The cosine of every patch of an image to one patch, of this image or another; 0 where there is no direction."""
    return (F.normalize(feature_map, dim=-1) @ F.normalize(patch, dim=0)).clamp(-1, 1)


def contrast(similarity: Float[Tensor, "rows columns"]) -> tuple[float, float]:
    """Limits between which most cosines lie; the few beyond, as the clicked patch, would take the colours."""
    low, high = torch.quantile(similarity.double().flatten(), torch.tensor(_MOST, dtype=torch.float64)).tolist()
    return (low, high) if high - low > ROUNDING else (float(similarity.min()), float(similarity.max()))


def most_similar(similarity: Float[Tensor, "rows columns"], clicked: tuple[int, int] | None = None) -> tuple[int, int]:
    """Row and column of the largest similarity; of several that are alike but for rounding, the clicked patch."""
    if clicked is not None and similarity[clicked] >= similarity.max() - ROUNDING:
        return clicked
    row, column = divmod(int(similarity.argmax()), similarity.shape[1])
    return row, column


def nearest_patches(
    patch: Float[Tensor, " d"], feature_maps: Mapping[int, Tensor], count: int = 6, *, each: int = 1
) -> list[PatchPlace]:
    """The patches of other images that are most alike, the best first; at most `each` of one image."""
    places: list[PatchPlace] = []
    for number, feature_map in feature_maps.items():
        values = similarity_map(patch, feature_map)
        best = values.flatten().topk(min(each, values.numel()))
        for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            row, column = divmod(place, values.shape[1])
            places.append(PatchPlace(number, row, column, value))
    # Sorting keeps the order of equals, which is that of the images.
    return sorted(places, key=lambda match: -match.score)[:count]


def similarity_picture(
    photo: Image.Image,
    similarity: Float[Tensor, "rows columns"],
    outlined: tuple[int, int] | None = None,
    *,
    limits: tuple[float, float] | None = None,
) -> Image.Image:
    """A heat map of cosines over the photo, one patch outlined, with the scale below; `limits` compare images."""
    low, high = limits or (float(similarity.min()), float(similarity.max()))
    picture = heat_over(photo, similarity, (low, high))
    if outlined is not None:
        picture = outline_patch(picture, outlined, (similarity.shape[0], similarity.shape[1]))
    bar = Image.fromarray(heat(torch.linspace(0, 1, 256))[None].contiguous().numpy())
    return with_scale(picture, Legend(bar, f"{low:.2f}", f"{high:.2f}"), "cosine")


def heat_over(photo: Image.Image, values: Float[Tensor, "rows columns"], limits: tuple[float, float]) -> Image.Image:
    """Values as heat, shaded by the photo, from black at the lower limit to white at the upper; NaN shows the photo."""
    low, high = limits
    measured = ~values.isnan()
    scaled = (values.nan_to_num().double() - low) / (high - low if high > low else 1.0)
    colors = _enlarged(heat(scaled), photo.size)
    shade = photo.convert("L").point([round(255 * (_DARKEST + (1 - _DARKEST) * level / 255)) for level in range(256)])
    warm = ImageChops.multiply(colors, shade.convert("RGB"))
    return Image.composite(warm, photo.convert("RGB"), patch_mask(measured, photo.size))


def patch_mask(chosen: Bool[Tensor, "rows columns"], size: tuple[int, int]) -> Image.Image:
    """Which pixels of a picture of this (width, height) belong to the chosen patches, as 255 and 0."""
    return _enlarged((chosen.to(torch.uint8) * 255)[..., None].expand(-1, -1, 3), size).convert("L")


def patch_box(place: tuple[int, int], grid: tuple[int, int], size: tuple[int, int]) -> PatchBox:
    """Where a patch lies in a picture of this (width, height)."""
    (row, column), (rows, columns), (width, height) = place, grid, size
    left, right = round(column * width / columns), round((column + 1) * width / columns)
    top, bottom = round(row * height / rows), round((row + 1) * height / rows)
    return PatchBox(left, top, max(right, left + 1), max(bottom, top + 1))


def patch_at(pixel: tuple[int | float, int | float], grid: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """The row and column of the patch under a pixel (x, y) of a picture; beside the picture it is the nearest one."""
    (across, down), (rows, columns), (width, height) = pixel, grid, size
    row, column = int(down * rows // height), int(across * columns // width)
    return min(max(row, 0), rows - 1), min(max(column, 0), columns - 1)


def outline_patch(picture: Image.Image, place: tuple[int, int], grid: tuple[int, int]) -> Image.Image:
    """The picture with a frame around one patch, light and dark so that it is seen on any ground."""
    marked = picture.convert("RGB")
    left, top, right, bottom = patch_box(place, grid, marked.size)
    draw = ImageDraw.Draw(marked)
    draw.rectangle((left - 4, top - 4, right + 3, bottom + 3), outline="black", width=1)
    draw.rectangle((left - 3, top - 3, right + 2, bottom + 2), outline="#39d7ff", width=3)
    return marked


def _enlarged(colors: Tensor, size: tuple[int, int]) -> Image.Image:
    """One colour for each patch as a picture of this size, without blurring."""
    small = Image.fromarray(np.ascontiguousarray(colors.numpy()))
    return small.resize(size, Image.Resampling.NEAREST)
