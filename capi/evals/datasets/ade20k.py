"""ADE20K as the scene parsing challenge gives it: 150 classes."""

from pathlib import Path

from capi.errors import CapiError
from capi.evals.datasets.files import check_count, first_with, list_lines
from capi.evals.datasets.mask_files import VOID, MaskFiles, known_labels, masked, paired
from capi.evals.tasks import DataOptions, Dataset, MaskedImages, SegmentationData

COUNTS = {"training": 20210, "validation": 2000}
CLASSES = 150
OTHER = 0


def load(root: Path, options: DataOptions) -> SegmentationData:
    """Classes 1 to 150; 0, the other objects, is ignored."""
    root = first_with([root, root / "ADEChallengeData2016"], "annotations")
    classes = _classes(root / "objectInfo150.txt")
    ignored = frozenset({OTHER, VOID})
    parts: dict[str, MaskedImages] = {}
    notes: tuple[str, ...] = ()
    for split, expected in COUNTS.items():
        pairs, more = paired(root / "images" / split, root / "annotations" / split)
        notes += more + check_count(len(pairs), expected, f"{split} images", options)
        names = [mask for _, mask in pairs]
        masks = MaskFiles(root / "annotations" / split, names, known_labels(classes, ignored))
        parts[split] = masked(root / "images" / split, masks, pairs)
    return SegmentationData(classes, ignored, parts["training"], parts["validation"], "validation", notes)


def _classes(path: Path) -> dict[int, str]:
    """Names by number, from the challenge's own list where it lies with the images; else the numbers."""
    if not path.is_file():
        return {number: str(number) for number in range(1, CLASSES + 1)}
    rows = [line.split("\t") for line in list_lines(path)[1:]]
    classes = {int(row[0]): row[-1].strip() for row in rows if row[0].strip().isdigit()}
    if sorted(classes) != list(range(1, CLASSES + 1)):
        raise CapiError(f"{path} does not name the classes 1 to {CLASSES}: it is not the list of the challenge")
    return classes


DATASET = Dataset(
    name="ade20k",
    title="ADE20K, scene parsing challenge",
    layout="""\
ROOT/images/training/ADE_train_*.jpg
ROOT/images/validation/ADE_val_*.jpg
ROOT/annotations/training/ADE_train_*.png
ROOT/annotations/validation/ADE_val_*.png     0 other objects, 1 to 150 the classes
ROOT/objectInfo150.txt                        names of the classes (optional)
ROOT may also be the parent of ADEChallengeData2016.

Follows the README of the challenge's development kit (GitHub: CSAILVision/sceneparsing): 20210 training and 2000
validation images, 150 classes, pixels of label 0 not considered. 0 and 255 are ignored. Tested on validation.
""",
    segmentation=load,
)
