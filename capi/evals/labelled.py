"""Images with labels: class folders, a CSV, or the built-in photos."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from capi.data.demo import COUNTS, demo_photos
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
        if split not in COUNTS:
            raise CapiError(f'the built-in photos have no split "{split}", but {", ".join(COUNTS)}')
        photos = demo_photos(split)
        return LabelledImages(photos.images, torch.tensor(photos.labels), photos.categories)
    path = Path(data)
    if path.suffix.lower() == ".csv":
        return _from_csv(path, split, label)
    return _from_folders(path / split)


def _from_csv(path: Path, split: str, label: str) -> LabelledImages:
    if not path.is_file():
        raise CapiError(f"there is no file {path}: an evaluation's data is demo, a folder or a CSV")
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restval="")
        columns, rows = list(reader.fieldnames or []), list(reader)
    for name in ("file", label, "split"):
        if name not in columns:
            raise CapiError(f'{path} has no column "{name}"{nearest(name, columns)} (it has {", ".join(columns)})')
    classes = sorted({row[label] for row in rows})
    chosen = sorted(((row["file"], row[label]) for row in rows if row["split"] == split), key=lambda row: row[0])
    if not chosen:
        splits = sorted({row["split"] for row in rows})
        raise CapiError(f'{path} has no images of the split "{split}", but of {", ".join(splits)}')
    unlabelled = [name for name, value in chosen if not value]
    if unlabelled:
        raise CapiError(f'{path} has nothing in the column "{label}" for {unlabelled[0]}: fill it in or take it out')
    return _labelled(path.parent, chosen, classes)


def _from_folders(path: Path) -> LabelledImages:
    """Classes are the folders directly under any split, so that a class has one number in all of them."""
    files = image_folder(path)
    names = [files.name(index) for index in range(len(files))]
    chosen = [(name, name.split("/")[0]) for name in names if "/" in name]
    if not chosen:
        raise CapiError(f"{path} holds images, but no folder for each class")
    classes = {folder.name for folder in path.parent.glob("*/*/") if not folder.name.startswith(".")}
    return _labelled(path, chosen, sorted(classes))


def _labelled(root: Path, rows: Sequence[tuple[str, str]], classes: list[str]) -> LabelledImages:
    number = {name: index for index, name in enumerate(classes)}
    return LabelledImages(Files(root, [name for name, _ in rows]), torch.tensor([number[c] for _, c in rows]), classes)
