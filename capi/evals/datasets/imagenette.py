"""Imagenette: ten classes of ImageNet that are easy to tell apart."""

from pathlib import Path

from capi.evals.datasets.files import check_count, class_folders, classification, first_with
from capi.evals.datasets.imagenet import check_wnids
from capi.evals.tasks import ClassificationData, DataOptions, Dataset

COUNTS = {"train": 9469, "val": 3925}
CLASSES = 10
_FOLDERS = ("imagenette2", "imagenette2-320", "imagenette2-160")


def load(root: Path, options: DataOptions) -> ClassificationData:
    """Classes are WordNet ids in their sorted order."""
    root = first_with([root, *(root / name for name in _FOLDERS)], "train")
    train, val = (class_folders(root / split) for split in COUNTS)
    classes = check_wnids([kind for _, kind in (*train, *val)])
    notes = check_count(len(train), COUNTS["train"], "training images", options)
    notes += check_count(len(val), COUNTS["val"], "validation images", options)
    notes += check_count(len(classes), CLASSES, "classes", options)
    return classification((root / "train", train), {"val": (root / "val", val)}, classes, notes)


DATASET = Dataset(
    name="imagenette",
    title="Imagenette, ten classes of ImageNet-1k",
    layout="""\
ROOT/train/nXXXXXXXX/*.JPEG
ROOT/val/nXXXXXXXX/*.JPEG

As in imagenette2.tgz, imagenette2-320.tgz or imagenette2-160.tgz (GitHub: fastai/imagenette), or the folder of that
name in ROOT. Trained on train (9469 photos), tested on val (3925); counts verified.
""",
    classification=load,
)
