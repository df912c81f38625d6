"""The writing on pictures."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageFont

_WITHIN_MATPLOTLIB = Path("mpl-data", "fonts", "ttf", "DejaVuSans.ttf")


@cache
def font(size: int = 12) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font that matplotlib brings along, which has the letters of many languages; else Pillow's, of ASCII alone."""
    found = find_spec("matplotlib")
    path = Path(found.origin or "").parent / _WITHIN_MATPLOTLIB if found is not None else None
    if path is not None and path.exists():
        return ImageFont.truetype(path, size)
    return ImageFont.load_default(size)
