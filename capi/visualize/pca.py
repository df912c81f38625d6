"""PCA pictures of patch features: three components as red, green and blue.

The sign of a component is arbitrary; here each is turned so that its values lean to the right (positive skew), which
keeps pictures from flipping between runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from capi.types import Float, VisionEncoder

# What of each component's range is shown; a few extreme patches would otherwise darken the rest.
_SHOWN = (0.01, 0.99)
# Less variation than this share is rounding of float32, which a picture would stretch to full colour.
_ROUNDING = 1e-6
_MARGIN, _TITLE_HEIGHT = 6, 16


@dataclass(frozen=True)
class Components:
    """A mean and the directions of largest variance, each with its sign fixed."""

    mean: Float[Tensor, " d"]
    directions: Float[Tensor, "m d"]

    def project(self, features: Float[Tensor, "s d"]) -> Float[Tensor, "s m"]:
        return (features - self.mean) @ self.directions.T


def fit_components(features: Float[Tensor, "s d"], count: int = 3) -> Components:
    """Principal components of patches; where there are fewer than asked for, the rest are zero."""
    values = features.double()
    mean = values.mean(0)
    centred = values - mean
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    directions = directions[sizes > _ROUNDING * values.norm()]
    chosen = torch.zeros(count, values.shape[1], dtype=torch.float64)
    chosen[: len(directions)] = directions[:count]
    skew = ((centred @ chosen.T) ** 3).mean(0)
    chosen *= torch.where(skew < 0, -1.0, 1.0)[:, None]
    return Components(mean.to(features.dtype), chosen.to(features.dtype))


def as_colors(values: Float[Tensor, "*grid 3"]) -> Tensor:
    """Each component stretched over 0 to 255, as bytes."""
    flat = values.flatten(0, -2).double()
    low, high = torch.quantile(flat, torch.tensor(_SHOWN, dtype=torch.float64), dim=0)
    stretched = (values.double() - low) / (high - low).clamp_min(1e-12)
    return (stretched.clamp(0, 1) * 255).round().to(torch.uint8)


@torch.inference_mode()
def pca_pictures(
    encoder: VisionEncoder, images: Float[Tensor, "b c height width"], *, joint: bool = False
) -> list[Image.Image]:
    """A picture for each image, one pixel a patch; `joint` fits the components to all images together."""
    maps = encoder(images, pooled=False).feature_map.float().cpu()
    groups = [maps] if joint else list(maps.split(1))
    pictures = []
    for group in groups:
        values = fit_components(group.flatten(0, 2)).project(group.flatten(0, 2)).view(*group.shape[:3], 3)
        pictures += [Image.fromarray(picture.numpy()) for picture in as_colors(values)]
    return pictures


def contact_sheet(columns: Sequence[tuple[str, Sequence[Image.Image]]], side: int = 160) -> Image.Image:
    """Pictures side by side: a title and one column each, one row an image."""
    rows = max(len(pictures) for _, pictures in columns)
    width = len(columns) * (side + _MARGIN) + _MARGIN
    sheet = Image.new("RGB", (width, rows * (side + _MARGIN) + _MARGIN + _TITLE_HEIGHT), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (title, pictures) in enumerate(columns):
        left = _MARGIN + number * (side + _MARGIN)
        draw.text((left, 3), title, fill="black")
        for row, picture in enumerate(pictures):
            top = _TITLE_HEIGHT + _MARGIN + row * (side + _MARGIN)
            sheet.paste(picture.convert("RGB").resize((side, side), Image.Resampling.NEAREST), (left, top))
    return sheet


def photos_of(pixels: Tensor) -> list[Image.Image]:
    """Images from 0 to 255, of three channels or one, as pictures."""
    colors = pixels.clamp(0, 255).round().to(torch.uint8).expand(-1, 3, -1, -1)
    return [Image.fromarray(np.ascontiguousarray(one.permute(1, 2, 0))) for one in colors]
