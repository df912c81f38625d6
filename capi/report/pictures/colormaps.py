"""Numbers as colours: from cold over grey to warm around a middle, or from black over red and yellow to white.

The first is the diverging map of Moreland ("Diverging color maps for scientific visualization", 2009), as matplotlib's
coolwarm has it: 33 colours and straight lines between them.
"""

import torch
from torch import Tensor

from capi.types import Float

_COOLWARM = (
    "3b4cc0445acc4d68d75775e16282ea6c8ef1779af782a5fb8db0fe98b9ffa3c2ffaec9fdb8d0f9c2d5f4ccd9eed5dbe6dddddd"
    "e5d8d1ecd3c5f1ccb9f5c4adf7bba0f7b194f7a687f49a7bf18d6fec7f63e57058de604dd55042cb3e38c0282fb40426"
)
HEAT = "000000ff0000ffff00ffffff"


def coolwarm(values: Float[Tensor, "*grid"]) -> Tensor:
    """Values from -1 (cold) over 0 (grey) to 1 (warm) as bytes of red, green and blue."""
    return _between((values.double() + 1) / 2, _COOLWARM)


def heat(values: Float[Tensor, "*grid"]) -> Tensor:
    """Values from 0 (black) over red and yellow to 1 (white) as bytes of red, green and blue."""
    return _between(values.double(), HEAT)


def css_gradient(colors: str) -> str:
    """The same colours from left to right, as style sheets write them."""
    stops = ", ".join(f"#{colors[start : start + 6]}" for start in range(0, len(colors), 6))
    return f"linear-gradient(to right, {stops})"


def _between(shares: Float[Tensor, "*grid"], colors: str) -> Tensor:
    """The colour at a share of the way along evenly spaced ones, written as hexadecimal digits."""
    table = torch.tensor(list(bytes.fromhex(colors)), dtype=torch.float64).view(-1, 3)
    places = shares.clamp(0, 1) * (len(table) - 1)
    before = places.long().clamp(max=len(table) - 2)
    return table[before].lerp(table[before + 1], (places - before)[..., None]).round().to(torch.uint8)
