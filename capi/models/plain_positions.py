"""Positions of patches: tables brought to other grids, sines and cosines, offsets between patches, rotations."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.errors import CapiError
from capi.models.plain_architecture import Resampling
from capi.types import Float, Int

_WAVELENGTH = 10_000.0
_OFFSET = 0.1
_ROTARY_BASE = 100.0


def resampled(
    table: Float[Tensor, "1 n d"], rows: int, columns: int, resampling: Resampling, patch_size: int
) -> Float[Tensor, "1 m d"]:
    """A table of a square grid for another grid, as the authors of the model do it."""
    own = math.isqrt(table.shape[1])
    if (rows, columns) == (own, own):
        return table
    if resampling == "fixed":
        raise CapiError(
            f"this model takes images of {own * patch_size} x {own * patch_size} pixels only, as its positions are not "
            f"made for others, but the image has {rows * patch_size} x {columns * patch_size}: resize it"
        )
    if resampling == "rows":
        return row_first_sincos(rows, columns, table.shape[2], patch_size).to(table)
    grid = table.float().reshape(1, own, own, -1).permute(0, 3, 1, 2)
    if resampling == "offset":
        ratio = ((rows + _OFFSET) / own, (columns + _OFFSET) / own)
        grid = F.interpolate(grid, scale_factor=ratio, mode="bicubic")
    else:
        grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", antialias=resampling == "antialias")
    return grid.permute(0, 2, 3, 1).reshape(1, rows * columns, -1).to(table.dtype)


def column_first_sincos(rows: int, columns: int, width: int) -> Float[Tensor, "1 n d"]:
    """Sines and cosines of the column, then of the row, each over half of the channels (MAE, I-JEPA, AIM)."""
    down, across = torch.meshgrid(torch.arange(rows).float(), torch.arange(columns).float(), indexing="ij")
    return torch.cat([_waves(across.flatten(), width // 2), _waves(down.flatten(), width // 2)], dim=1)[None]


def row_first_sincos(rows: int, columns: int, width: int, patch_size: int) -> Float[Tensor, "1 n d"]:
    """Sines and cosines of the row, then of the column (MoCo v3), whose authors lay them out for squares alone."""
    if rows != columns:
        raise CapiError(
            f"this model takes square images only, as its positions are made for them, but the image has "
            f"{rows * patch_size} x {columns * patch_size} pixels: resize or crop it"
        )
    half = width // 2
    swapped = column_first_sincos(rows, columns, width)
    return torch.cat([swapped[..., half:], swapped[..., :half]], dim=-1)


def _waves(places: Float[Tensor, " n"], width: int) -> Float[Tensor, "n d"]:
    frequencies = 1.0 / _WAVELENGTH ** (torch.arange(width // 2).float() / (width / 2))
    angles = places[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def relative_index(grid: int, *, class_token: bool = True) -> Int[Tensor, "t t"]:
    """Which row of a table belongs to a pair of tokens: that of their offset, or one of three for the class token.

    The rows are (2 grid - 1)^2 offsets, then class token to patch, patch to class token, class token to itself.
    """
    span = 2 * grid - 1
    place = torch.stack(torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")).flatten(1)
    down, across = place[:, :, None] - place[:, None, :] + grid - 1
    between = down * span + across
    if not class_token:
        return between
    index = torch.empty(grid * grid + 1, grid * grid + 1, dtype=torch.long)
    index[1:, 1:] = between
    index[0, :] = span**2
    index[:, 0] = span**2 + 1
    index[0, 0] = span**2 + 2
    return index


def rotary_periods(head_width: int) -> Float[Tensor, " p"]:
    """Of the channels of a head along one axis (DINOv3)."""
    return _ROTARY_BASE ** (torch.arange(head_width // 4).float() * 4 / head_width)


def rotary_angles(rows: int, columns: int, periods: Float[Tensor, " p"]) -> Float[Tensor, "n w"]:
    """The angle of each channel of a head at each patch (DINOv3): centres run from -1 to 1 along each axis."""
    places = (torch.arange(count, device=periods.device).float() + 0.5 for count in (rows, columns))
    down, across = (2 * place / count - 1 for place, count in zip(places, (rows, columns), strict=True))
    centres = torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1).flatten(0, 1)
    angles = 2 * math.pi * centres[:, :, None] / periods
    return angles.flatten(1).tile(2)


def rotated(x: Float[Tensor, "b h t w"], angles: Float[Tensor, "n w"]) -> Float[Tensor, "b h t w"]:
    """The last n tokens turned by their angles, in pairs of channels half a head apart; the others as they are."""
    prefix = x.shape[2] - angles.shape[0]
    first, second = x[:, :, prefix:].chunk(2, dim=-1)
    turned = x[:, :, prefix:] * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return torch.cat([x[:, :, :prefix], turned.to(x.dtype)], dim=2)
