"""A folder of class folders."""

from pathlib import Path

from capi.data.locations import SPLITS
from capi.errors import CapiError
from capi.evals.datasets.files import (
    check_splits_are_there,
    check_splits_differ,
    chosen_tests,
    class_folders,
    classification,
    divide,
    existing_folder,
    has_splits,
)
from capi.evals.tasks import ClassificationData, DataOptions, Dataset


def load(root: Path, options: DataOptions) -> ClassificationData:
    """Classes are the folders with images in any of the chosen splits, so that a class has one number in all."""
    splits = {entry.name for entry in existing_folder(root).iterdir() if entry.is_dir()}
    if splits == {"images", "masks"}:
        raise CapiError(f"{root} holds images and masks, not a folder for each class: choose masks/knn-segmentation")
    if not has_splits(splits & SPLITS, options, root):
        rows, note = divide(class_folders(root), options, root, by_class=True)
        return classification((root, rows["train"]), {"test": (root, rows["test"])}, notes=[note])
    train = options.train or "train"
    tests = chosen_tests(splits, options, root)
    check_splits_differ(train, tests)
    check_splits_are_there([train, *tests], splits, root, "folder")
    parts = {split: (root / split, class_folders(root / split)) for split in (train, *tests)}
    return classification(parts[train], {split: parts[split] for split in tests})


DATASET = Dataset(
    name="folder",
    title="Any folder of class folders",
    layout="""\
ROOT/train/CLASS/...     images to train on; folders inside of a class folder are searched too
ROOT/test/CLASS/...      images to test on; ROOT/val where there is no ROOT/test

ROOT/CLASS/...           or no splits at all: of each class 20 % are tested on (test_share=), chosen by a hash of their
                         names, so the same ones each time; the results say so. Folders called train, training, val,
                         validation, test or testing are splits

train= and tests= name other splits. The classes are the class folders that hold images, sorted by name. An image
beside the class folders is an error. A class that only test images have stays a class, and the results warn of it.
""",
    classification=load,
    reads=frozenset({"train", "tests", "test_share"}),
    own_split=True,
)
