"""Cityscapes, fine annotations, the 19 classes that are evaluated."""

from pathlib import Path

from capi.evals.datasets.files import check_count, existing_folder, images_under
from capi.evals.datasets.mask_files import VOID, MaskFiles, check_all_masked, masked
from capi.evals.tasks import DataOptions, Dataset, MaskedImages, SegmentationData

COUNTS = {"train": 2975, "val": 500}
# The label id of each class, in the order of the train ids 0 to 18.
LABEL_IDS = {
    7: "road",
    8: "sidewalk",
    11: "building",
    12: "wall",
    13: "fence",
    17: "pole",
    19: "traffic light",
    20: "traffic sign",
    21: "vegetation",
    22: "terrain",
    23: "sky",
    24: "person",
    25: "rider",
    26: "car",
    27: "truck",
    28: "bus",
    31: "train",
    32: "motorcycle",
    33: "bicycle",
}
_IMAGE = "_leftImg8bit.png"
_LABEL_IDS, _TRAIN_IDS = "_gtFine_labelIds.png", "_gtFine_labelTrainIds.png"


def train_ids() -> dict[int, int]:
    """What becomes of each label id from 0 to 33: its train id, or void."""
    numbers = {label: number for number, label in enumerate(LABEL_IDS)}
    return {label: numbers.get(label, VOID) for label in range(34)}


def load(root: Path, options: DataOptions) -> SegmentationData:
    """Masks with label ids are mapped to the 19 train ids; masks with train ids are taken where there are no others."""
    parts: dict[str, MaskedImages] = {}
    notes: tuple[str, ...] = ()
    for split, expected in COUNTS.items():
        parts[split] = _masked(root / "leftImg8bit" / split, existing_folder(root / "gtFine" / split))
        notes += check_count(len(parts[split].images), expected, f"{split} images", options)
    classes = dict(enumerate(LABEL_IDS.values()))
    return SegmentationData(classes, frozenset({VOID}), parts["train"], parts["val"], "val", notes)


def _masked(images: Path, annotations: Path) -> MaskedImages:
    names = [name for name in images_under(images) if name.endswith(_IMAGE)]
    present = set(images_under(annotations))
    ending = _TRAIN_IDS if not any(name.endswith(_LABEL_IDS) for name in present) else _LABEL_IDS
    pairs = [(name, name.removesuffix(_IMAGE) + ending) for name in names]
    check_all_masked([image for image, mask in pairs if mask not in present], images, len(pairs))
    identity = {label: label for label in (*range(len(LABEL_IDS)), VOID)}
    table = train_ids() if ending == _LABEL_IDS else identity
    return masked(images, MaskFiles(annotations, [mask for _, mask in pairs], table), pairs)


DATASET = Dataset(
    name="cityscapes",
    title="Cityscapes, fine annotations",
    layout="""\
ROOT/leftImg8bit/train/CITY/*_leftImg8bit.png
ROOT/leftImg8bit/val/CITY/*_leftImg8bit.png
ROOT/gtFine/train/CITY/*_gtFine_labelIds.png          (or *_gtFine_labelTrainIds.png where there are no labelIds)
ROOT/gtFine/val/CITY/*_gtFine_labelIds.png

Follows the README and helpers/labels.py of the official scripts (GitHub: mcordts/cityscapesScripts): 2975 training and
500 validation images; the 19 classes with a train id, all other labels become 255 and are ignored. Tested on val.
""",
    segmentation=load,
)
