"""Numbers as colours: from cold over grey to warm around a middle, or from black over red and yellow to white.

The first is the diverging map of Moreland ("Diverging color maps for scientific visualization", 2009), which matplotlib
calls coolwarm: it is computed from its two ends by a straight way through his polar form of the CIELAB space.
"""

import math
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from capi.types import Float

_Vector = npt.NDArray[np.float64]
_COLD, _WARM = (59, 76, 192), (180, 4, 38)
# The brightness of the middle, at least.
_MIDDLE = 88.0
_STEPS = 256
_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_WHITE = np.array([0.95047, 1.0, 1.08883])


def coolwarm(values: Float[Tensor, "*grid"]) -> Tensor:
    """Values from -1 (cold) over 0 (grey) to 1 (warm) as bytes of red, green and blue."""
    steps = ((values.double().clamp(-1, 1) + 1) / 2 * (_STEPS - 1)).round().long()
    return torch.from_numpy(_coolwarm_table())[steps]


def heat(values: Float[Tensor, "*grid"]) -> Tensor:
    """Values from 0 (black) over red and yellow to 1 (white) as bytes of red, green and blue."""
    ramps = values.double().clamp(0, 1)[..., None] * 3 - torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    return (ramps.clamp(0, 1) * 255).round().to(torch.uint8)


@cache
def _coolwarm_table() -> npt.NDArray[np.uint8]:
    rows = [_blended(number / (_STEPS - 1)) for number in range(_STEPS)]
    return np.clip(np.rint(np.array(rows) * 255), 0, 255).astype(np.uint8)


def _blended(share: float) -> _Vector:
    """The colour at a share of the way: through a grey without hue, which takes over the hue of the end nearby."""
    end = _polar(_COLD if share < 0.5 else _WARM)
    bright = max(_MIDDLE, _polar(_COLD)[0], _polar(_WARM)[0])
    middle = np.array([bright, 0.0, _turned_hue(end, bright)])
    towards_end = abs(2 * share - 1)
    return _color(end * towards_end + middle * (1 - towards_end))


def _turned_hue(end: _Vector, bright: float) -> float:
    """The hue that the middle gets, turned a little so that the way there looks even."""
    radius, saturation, hue = (float(part) for part in end)
    if radius >= bright:
        return hue
    turn = saturation * math.sqrt(bright**2 - radius**2) / (radius * math.sin(saturation))
    return hue + turn if hue > -math.pi / 3 else hue - turn


def _polar(color: tuple[int, int, int]) -> _Vector:
    """Radius, saturation and hue of a colour in bytes."""
    parts = np.array(color) / 255
    linear = np.where(parts > 0.04045, ((parts + 0.055) / 1.055) ** 2.4, parts / 12.92)
    ratio = _TO_XYZ @ linear / _WHITE
    x, y, z = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    lightness, a, b = 116 * y - 16, 500 * (x - y), 200 * (y - z)
    radius = math.sqrt(lightness**2 + a**2 + b**2)
    return np.array([radius, math.acos(lightness / radius), math.atan2(b, a)])


def _color(polar: _Vector) -> _Vector:
    """Red, green and blue from 0 to 1."""
    radius, saturation, hue = polar
    lightness = radius * math.cos(saturation)
    a, b = radius * math.sin(saturation) * math.cos(hue), radius * math.sin(saturation) * math.sin(hue)
    y = (lightness + 16) / 116
    roots = np.array([y + a / 500, y, y - b / 200])
    ratio = np.where(roots > 6 / 29, roots**3, 3 * (6 / 29) ** 2 * (roots - 4 / 29))
    linear = np.linalg.inv(_TO_XYZ) @ (ratio * _WHITE)
    return np.where(linear > 0.0031308, 1.055 * np.clip(linear, 0, None) ** (1 / 2.4) - 0.055, 12.92 * linear)
