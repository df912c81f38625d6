"""Labels of pixels as pictures: a colour for each label, laid over the photo, with a legend."""

import colorsys
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from capi.errors import CapiError
from capi.report.pictures.sheets import font

Labels = npt.NDArray[np.integer]
# Steps of the golden angle never come back to a hue that is taken.
_GOLDEN = (math.sqrt(5) - 1) / 2
_IGNORED = (255, 255, 255)
_MARGIN, _LINE = 8, 20


def color_of(label: int) -> tuple[int, int, int]:
    """The colour of a label, the same everywhere; neighbours differ in hue, and every third in brightness."""
    if label == 0:
        return 70, 70, 80
    hue, level = (label * _GOLDEN) % 1.0, (0.95, 0.75, 0.6)[label % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.75, level)
    return round(red * 255), round(green * 255), round(blue * 255)


def colored(labels: Labels, ignored: Sequence[int] = ()) -> Image.Image:
    """Every pixel in the colour of its label; ignored ones are white."""
    values = np.unique(labels)
    palette = np.array([_IGNORED if value in ignored else color_of(int(value)) for value in values], dtype=np.uint8)
    return Image.fromarray(palette[np.searchsorted(values, labels)])


def overlay(photo: Image.Image, labels: Labels, ignored: Sequence[int] = (), strength: float = 0.55) -> Image.Image:
    """Colours over the photo."""
    return Image.blend(photo.convert("RGB"), colored(labels, ignored), strength)


def label_image(labels: Labels) -> Image.Image:
    """Labels as they are, in an image that other programs read: a palette up to 255, 16 bits beyond."""
    strange = labels[(labels < 0) | (labels > 65535)]
    if strange.size:
        raise CapiError(f"the label {strange[0]} cannot be written: a label image holds numbers from 0 to 65535")
    if labels.max(initial=0) > 255:
        return Image.fromarray(labels.astype(np.uint16))
    image = Image.fromarray(labels.astype(np.uint8), mode="P")
    image.putpalette([value for label in range(256) for value in color_of(label)])
    return image


def legend(names: Mapping[int, str], width: int, ignored: Sequence[int] = ()) -> Image.Image:
    """A patch of colour and a name for each label, as many in a row as fit."""
    writing = font()
    longest = max((writing.getlength(name) for name in names.values()), default=0)
    cell = math.ceil(longest) + _LINE + 2 * _MARGIN
    columns = max(width // cell, 1)
    rows = math.ceil(len(names) / columns)
    sheet = Image.new("RGB", (max(width, cell), rows * _LINE + 2 * _MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (label, name) in enumerate(sorted(names.items())):
        left, top = _MARGIN + number % columns * cell, _MARGIN + number // columns * _LINE
        color = _IGNORED if label in ignored else color_of(label)
        draw.rectangle((left, top + 3, left + 14, top + 15), fill=color, outline="black")
        draw.text((left + _LINE, top + 2), name, fill="black", font=writing)
    return sheet


def stacked(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures one below the other."""
    width = max(picture.width for picture in pictures)
    sheet = Image.new("RGB", (width, sum(picture.height for picture in pictures)), "white")
    top = 0
    for picture in pictures:
        sheet.paste(picture, (0, top))
        top += picture.height
    return sheet


def side_by_side(pictures: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Pictures of one height beside each other, each under its title."""
    width = sum(picture.width + _MARGIN for _, picture in pictures) + _MARGIN
    sheet = Image.new("RGB", (width, max(p.height for _, p in pictures) + _LINE + _MARGIN), "white")
    draw, left = ImageDraw.Draw(sheet), _MARGIN
    for title, picture in pictures:
        draw.text((left, 3), title, fill="black", font=font())
        sheet.paste(picture, (left, _LINE))
        left += picture.width + _MARGIN
    return sheet
