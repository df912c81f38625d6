"""Figures of several models for the same images, as the paper compares them; they are Pillow images for notebooks.

Kinds with one picture an image have a row for each image and a column for each model. Kinds with several (components,
atoms) have a row for each model under each image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from capi.errors import CapiError, nearest
from capi.report.pictures.painters import PAINTERS, Drawn, Painter, paint
from capi.report.pictures.sheets import Row, sheet_of

MOST_ROWS = 24


@dataclass(frozen=True)
class Photo:
    """An image as people see it."""

    name: str
    picture: Image.Image


@dataclass(frozen=True)
class DrawnModel:
    """What one model, at one resolution, drew of images by their numbers; those it could not read are missing."""

    name: str
    detail: str
    drawn: Mapping[int, Sequence[Drawn]]


def figure(
    kind: str,
    photos: Sequence[Image.Image],
    feature_maps: Mapping[str, Sequence[Tensor]],
    *,
    names: Sequence[str] = (),
    joint: bool = False,
) -> Image.Image:
    """A figure of feature maps in memory, (rows, columns, width) each, of the same images by several models."""
    if kind not in PAINTERS:
        raise CapiError(f'there is no picture "{kind}"{nearest(kind, PAINTERS)}: choose from {", ".join(PAINTERS)}')
    if not photos or any(len(maps) != len(photos) for maps in feature_maps.values()):
        raise CapiError(f"each model needs a feature map for each of the {len(photos)} photos, and at least one")
    titles = names or [f"image {number + 1}" for number in range(len(photos))]
    shown = {number: Photo(title, photo) for number, (title, photo) in enumerate(zip(titles, photos, strict=True))}
    painter, columns = PAINTERS[kind](joint), []
    for model, maps in feature_maps.items():
        drawn = paint(painter, list(maps))
        columns.append(DrawnModel(model, f"{maps[0].shape[0]} x {maps[0].shape[1]} patches", dict(enumerate(drawn))))
    return figure_of(painter, shown, columns)


def figure_of(
    painter: Painter, photos: Mapping[int, Photo], columns: Sequence[DrawnModel], *, images: int | None = None
) -> Image.Image:
    """A figure of what was drawn; `images` is how many there are in all, where not all are shown."""
    several = next((one for column in columns for one in column.drawn.values() if len(one) > 1), None)
    if several is None:
        numbers, heads = list(photos), [f"{column.name}\n{column.detail}" for column in columns]
        rows = [_row_of_image(number, photos[number], columns) for number in numbers]
    else:
        numbers, heads = list(photos)[: max(MOST_ROWS // len(columns), 1)], [one.title for one in several]
        rows = [_row_of_model(number, photos[number], column, len(heads)) for number in numbers for column in columns]
    total = len(photos) if images is None else images
    notes = [painter.explanation, *([f"Shown: {len(numbers)} of {total} images."] if len(numbers) < total else [])]
    return sheet_of(painter.title, notes, ["photo", *heads], rows, legend=painter.legend())


def _row_of_image(number: int, photo: Photo, columns: Sequence[DrawnModel]) -> Row:
    drawn = (next(iter(column.drawn.get(number, ())), None) for column in columns)
    return Row(photo.name, [Drawn(photo.picture), *drawn])


def _row_of_model(number: int, photo: Photo, column: DrawnModel, count: int) -> Row:
    missing: list[Drawn | None] = [None] * count
    label = f"{photo.name} · {column.name}, {column.detail}"
    return Row(label, [Drawn(photo.picture), *(column.drawn.get(number) or missing)])
