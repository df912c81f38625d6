"""A folder of images with a folder of masks."""

from pathlib import Path

from capi.data.locations import SPLITS
from capi.errors import CapiError
from capi.evals.datasets.files import (
    check_splits_are_there,
    check_splits_differ,
    chosen_tests,
    divide,
    existing_folder,
    has_splits,
    one_test,
    without_excluded,
)
from capi.evals.datasets.mask_files import Pairs, paired, segmentation_of_own_masks
from capi.evals.tasks import DataOptions, Dataset, SegmentationData


def load(root: Path, options: DataOptions) -> SegmentationData:
    """Images and masks are matched by their names in the two folders, without the ending."""
    folder = root.absolute()
    if folder.name in ("images", "masks") and not (root / "images").is_dir() and (folder.parent / "images").is_dir():
        raise CapiError(f"{root} is one of the folders images and masks: give data={root.parent}, which holds both")
    splits = {entry.name for entry in existing_folder(root / "images").iterdir() if entry.is_dir()}
    if not has_splits(splits & SPLITS, options, root / "images"):
        return _without_splits(root, options)
    train = options.train or "train"
    test = one_test(chosen_tests(splits, options, root / "images"))
    check_splits_differ(train, [test])
    pairs: dict[str, Pairs] = {}
    notes: list[str] = []
    check_splits_are_there([train, test], splits, root / "images", "folder")
    for split in (train, test):
        pairs[split], more = paired(root / "images" / split, existing_folder(root / "masks" / split))
        notes += more
    left, more = without_excluded([f"{split}/{image}" for split in pairs for image, _ in pairs[split]], options)
    parts = {
        split: (
            root / "images" / split,
            root / "masks" / split,
            [pair for pair in pairs[split] if f"{split}/{pair[0]}" in left],
        )
        for split in pairs
    }
    return segmentation_of_own_masks(parts[train], parts[test], options, test, [*notes, *more])


def _without_splits(root: Path, options: DataOptions) -> SegmentationData:
    images, masks = root / "images", existing_folder(root / "masks")
    pairs, notes = paired(images, masks)
    left, more = without_excluded([image for image, _ in pairs], options)
    parts, note = divide([pair for pair in pairs if pair[0] in left], options, root, by_class=False)
    train, test = ((images, masks, parts[split]) for split in ("train", "test"))
    return segmentation_of_own_masks(train, test, options, "test", [*notes, *more, note])


DATASET = Dataset(
    name="masks",
    title="Any folder of images with a folder of masks",
    layout="""\
ROOT/images/train/...    images to train on, in folders or not
ROOT/masks/train/...     their masks: the same names but for the ending, PNG, one number a pixel (palettes are not
                         looked up: the index is the label)
ROOT/images/test/...     images to test on; val where there is no test
ROOT/masks/test/...

Without splits, ROOT/images/... and ROOT/masks/..., 20 % of the images are tested on (test_share=), chosen by a hash of
their names.

train= and tests= name other splits. Every label found in the masks is a class but for those of ignored=; with
class_names= the labels are 0, 1, 2, ... and any other is an error. exclude= names a file with the images to leave out,
a line each, like train/NAME.jpg. An image without a mask is an error; of a label that no
training patch has the results warn.
""",
    segmentation=load,
    reads=frozenset({"train", "tests", "test_share", "ignored", "class_names", "exclude"}),
    own_split=True,
)
