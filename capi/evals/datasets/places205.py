"""Places205: scenes."""

from pathlib import Path

from capi.errors import CapiError
from capi.evals.datasets.files import check_count, classification, first_with, list_lines
from capi.evals.tasks import ClassificationData, DataOptions, Dataset

COUNTS = {"train": 2_448_873, "val": 20_500}
SCENES = 205


def load(root: Path, options: DataOptions) -> ClassificationData:
    """Classes have the numbers of the lists, and the names of their folders."""
    lists = first_with([root, root / "trainvalsplit_places205"], "train_places205.csv")
    numbered = {split: _numbered(lists / f"{split}_places205.csv") for split in COUNTS}
    folders = _folders(numbered["train"] + numbered["val"], lists)
    notes: tuple[str, ...] = ()
    for split, expected in COUNTS.items():
        notes += check_count(len(numbered[split]), expected, f"images of {split}", options)
    notes += check_count(len(folders), SCENES, "scenes", options)
    places = [root / "data" / "vision" / "torralba" / "deeplearning" / "images256", root / "images256", root]
    images = first_with(places, numbered["train"][0][0])
    train, val = ([(name, folders[number]) for name, number in numbered[split]] for split in COUNTS)
    classes = [folders[number] for number in sorted(folders)]
    return classification((images, train), {"val": (images, val)}, classes, notes)


def _numbered(path: Path) -> list[tuple[str, int]]:
    """Lines of a name and a class number, sorted by name."""
    rows = []
    for line in list_lines(path):
        name, _, number = line.rpartition(" ")
        if not (name and number.isdecimal()):
            raise CapiError(f'{path} holds "{line}": expected the name of an image and the number of its class')
        rows.append((name.strip().lstrip("/"), int(number)))
    if not rows:
        raise CapiError(f"{path} names no images: it is not the official list")
    return sorted(rows)


def _folders(rows: list[tuple[str, int]], lists: Path) -> dict[int, str]:
    folders: dict[int, str] = {}
    for name, number in rows:
        folder = name.rpartition("/")[0]
        if folders.setdefault(number, folder) != folder:
            raise CapiError(f"the lists in {lists} call class {number} both {folders[number]} and {folder}")
    return folders


DATASET = Dataset(
    name="places205",
    title="Places205",
    layout="""\
ROOT/trainvalsplit_places205/train_places205.csv      lines of: a/abbey/NAME.jpg 0
ROOT/trainvalsplit_places205/val_places205.csv
ROOT/data/vision/torralba/deeplearning/images256/a/abbey/NAME.jpg
The lists may lie in ROOT itself, the images in ROOT/images256/ or ROOT.

As in the official archives of the resized images and the lists (http://places.csail.mit.edu/downloadData.html). 205
scenes; 2448873 images to train on and 100 of each scene, 20500, to validate on, as its authors describe the training of
their network. Tested on val: the labels of the test images are not public. Only the first image of the lists is looked
for at the start, a missing one is an error when it is read.
""",
    classification=load,
)
