"""Images with labels: class folders, a CSV, or the built-in photos."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from capi.data.demo import demo_photos
from capi.data.sources import Files, ImageSource, image_folder
from capi.errors import CapiError, nearest
from capi.types import Int


class LabelledImages(NamedTuple):
    """A source and the class of each of its images."""

    images: ImageSource
    labels: Int[Tensor, " s"]
    classes: list[str]


def labelled_split(data: str, split: str, label: str = "label") -> LabelledImages:
    """The images of one split of `demo`, a folder `data/split/class/...`, or a CSV with columns file, label, split."""
    if data == "demo":
        photos = demo_photos(split)
        return LabelledImages(photos.images, torch.tensor(photos.labels), photos.categories)
    path = Path(data)
    if path.suffix.lower() == ".csv":
        return _from_csv(path, split, label)
    return _from_folders(path / split)


def _from_csv(path: Path, split: str, label: str) -> LabelledImages:
    if not path.is_file():
        raise CapiError(f"there is no file {path}: an evaluation's data is demo, a folder or a CSV")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0]) if rows else []
    for name in ("file", label, "split"):
        if name not in columns:
            raise CapiError(f'{path} has no column "{name}"{nearest(name, columns)} (it has {", ".join(columns)})')
    classes = sorted({row[label] for row in rows})
    chosen = sorted(((row["file"], row[label]) for row in rows if row["split"] == split), key=lambda row: row[0])
    if not chosen:
        splits = sorted({row["split"] for row in rows})
        raise CapiError(f'{path} has no images of the split "{split}", but of {", ".join(splits)}')
    return _labelled(path.parent, chosen, classes)


def _from_folders(path: Path) -> LabelledImages:
    """Classes are the folders directly under a split."""
    names = [image_folder(path).name(index) for index in range(len(image_folder(path)))]
    chosen = [(name, name.split("/")[0]) for name in names if "/" in name]
    if not chosen:
        raise CapiError(f"{path} holds images, but no folder for each class")
    return _labelled(path, chosen, sorted({label for _, label in chosen}))


def _labelled(root: Path, rows: Sequence[tuple[str, str]], classes: list[str]) -> LabelledImages:
    number = {name: index for index, name in enumerate(classes)}
    return LabelledImages(Files(root, [name for name, _ in rows]), torch.tensor([number[c] for _, c in rows]), classes)
