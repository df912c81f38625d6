"""Images to extract features of: a folder, a CSV, or the built-in photos; with labels where there are any.

A folder of class folders gives the names of these as labels.
"""

from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from capi.data.demo import COUNTS, demo_photos
from capi.data.opening import Data, open_images
from capi.data.sources import Files, ImageSource, csv_place, image_folder, is_csv, read_csv
from capi.errors import CapiError, nearest
from capi.runtime.image_files import refuse_outside

SPLITS = frozenset({"train", "training", "val", "validation", "test", "testing"})


class ListedImages(NamedTuple):
    """A source, and the label of each image or None."""

    images: ImageSource
    labels: list[str] | None


def list_images(data: str, split: str | None = None, label: str = "label") -> ListedImages:
    """The images that a name stands for. A split is a column of a CSV, a folder in a folder, or one of `demo`."""
    if data == "demo":
        split = split or "train"
        if split not in COUNTS:
            known = ", ".join(COUNTS)
            raise CapiError(f'the built-in photos have no split "{split}"{nearest(split, COUNTS)} ({known})')
        photos = demo_photos(split)
        return ListedImages(photos.images, [photos.categories[number] for number in photos.labels])
    if is_csv(data):
        return _from_csv(data, split, label)
    images = image_folder(Path(data) / split if split else Path(data))
    return ListedImages(images, class_folders(images))


def labelled_images(data: Data, console: Console | None = None) -> ListedImages:
    """Whatever a run can be trained on, with labels where its folders or its CSV give them."""
    source = open_images(data, console)
    if data == "demo":
        return list_images("demo")
    if isinstance(source, Files) and isinstance(data, str | Path):
        if not is_csv(data):
            return ListedImages(source, class_folders(source))
        listed = list_images(str(data))
        if listed.labels is not None:
            by_name = {listed.images.name(number): label for number, label in enumerate(listed.labels)}
            return ListedImages(source, [by_name[source.name(number)] for number in range(len(source))])
    return ListedImages(source, None)


def class_folders(images: Files) -> list[str] | None:
    """The folder that each image lies in, where all lie one folder deep and there are several; else no labels.

    Of deeper folders it cannot be told which name is the class, and folders that are called as splits are splits.
    """
    parts = [images.name(number).split("/") for number in range(len(images))]
    if any(len(part) != 2 for part in parts):
        return None
    folders = [folder for folder, _ in parts]
    return folders if len(set(folders)) > 1 and not SPLITS.issuperset(folders) else None


def _from_csv(data: str, split: str | None, label: str) -> ListedImages:
    path, root = csv_place(data)
    columns, rows = read_csv(path)
    # Images need no label; but a column that was asked for by name must be there.
    asked = [label] if label != "label" else []
    for name in ("file", *(["split"] if split else []), *asked):
        if name not in columns:
            raise CapiError(f'{path} has no column "{name}"{nearest(name, columns)} (it has {", ".join(columns)})')
    chosen = sorted((row for row in rows if not split or row["split"] == split), key=lambda row: row["file"])
    if not chosen:
        raise CapiError(f"{path} lists no images" + (f' of the split "{split}"' if split else ""))
    labels = [row[label] for row in chosen] if label in columns else None
    names = [row["file"] for row in chosen]
    refuse_outside(root, names, str(path))
    return ListedImages(Files(root, names), labels)
