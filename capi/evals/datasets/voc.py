"""Pascal VOC 2012 segmentation, trained on the augmented list."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from capi.data.sources import Files
from capi.errors import CapiError
from capi.evals.datasets.files import check_count, check_more, check_present, first_with, list_lines, read_matlab
from capi.evals.datasets.mask_files import VOID, MaskFiles, MaskValues, known_labels, read_label_image
from capi.evals.tasks import DataOptions, Dataset, MaskedImages, SegmentationData

TRAIN, VAL, AUGMENTED = 1464, 1449, 10582
CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_LISTS = "ImageSets/Segmentation"
_SBD = "sbd/"


class VocMasks(MaskFiles):
    """Masks of VOC, and of SBD for images that VOC has none of; names of the latter begin with `sbd/`."""

    def __init__(self, root: Path, names: Sequence[str], sbd: Path | None = None) -> None:
        super().__init__(root, names, known_labels(dict(enumerate(CLASSES)), {VOID}))
        self.sbd = sbd

    def path(self, index: int) -> Path:
        name = self.name(index)
        if not name.startswith(_SBD):
            return self.files.root / name
        assert self.sbd is not None
        return self.sbd / name.removeprefix(_SBD)

    def numbers(self, index: int) -> MaskValues:
        path = self.path(index)
        if path.suffix != ".mat":
            return read_label_image(path)
        return np.asarray(read_matlab(path, "GTcls").Segmentation)


def load(root: Path, options: DataOptions) -> SegmentationData:
    """VOC's train list and SBD's lists without VOC's val list to train on, VOC's val list to test on."""
    check_more(options, ["sbd"])
    root = first_with([root, root / "VOC2012", root / "VOCdevkit" / "VOC2012"], _LISTS)
    own, val = (list_lines(root / _LISTS / f"{split}.txt") for split in ("train", "val"))
    notes = check_count(len(val), VAL, "test images", options)
    sbd, ending, extra = _sbd(options.more["sbd"]) if "sbd" in options.more else (None, "", [])
    train = augmented(own, extra, val)
    if sbd is None:
        notes += check_count(len(train), TRAIN, "training images", options)
        notes += (f"trained on VOC's own images, not on the augmented list of {AUGMENTED}: give more.sbd=FOLDER",)
    else:
        notes += check_count(len(train), AUGMENTED, "training images", options)
    with_own_mask = set(own)
    masks = [f"SegmentationClass/{name}.png" if name in with_own_mask else f"{_SBD}{name}{ending}" for name in train]
    return SegmentationData(
        classes=dict(enumerate(CLASSES)),
        ignored=frozenset({VOID}),
        train=_masked(root, train, VocMasks(root, masks, sbd)),
        test=_masked(root, sorted(val), VocMasks(root, [f"SegmentationClass/{name}.png" for name in sorted(val)])),
        test_name="val",
        notes=notes,
    )


def augmented(train: Collection[str], more: Collection[str], val: Collection[str]) -> list[str]:
    """The images of both lists to train on, sorted, without any that is tested on."""
    leaked = sorted(set(train) & set(val))
    if leaked:
        raise CapiError(f"train.txt and val.txt of VOC both name {leaked[0]}: these are not the official lists")
    names = sorted({*train, *more} - set(val))
    assert not set(names) & set(val)
    return names


def _sbd(given: Path) -> tuple[Path, str, list[str]]:
    """Where the masks of SBD lie, the ending of their names, and the images that SBD names."""
    roots = [given, given / "dataset", given / "benchmark_RELEASE" / "dataset"]
    root = next((path for path in roots if (path / "train.txt").is_file() and (path / "cls").is_dir()), None)
    if root is not None:
        return root / "cls", ".mat", [*list_lines(root / "train.txt"), *list_lines(root / "val.txt")]
    names = [path.stem for path in given.glob("*.png")]
    if not names:
        raise CapiError(
            f"more.sbd names {given}, which holds neither dataset/train.txt with dataset/cls nor masks as PNG: "
            "give the folder that SBD was unpacked to, or a folder SegmentationClassAug"
        )
    return given, ".png", names


def _masked(root: Path, names: Sequence[str], masks: VocMasks) -> MaskedImages:
    images = [f"JPEGImages/{name}.jpg" for name in names]
    check_present(root, "JPEGImages", images)
    missing = [index for index in range(len(masks)) if not masks.path(index).is_file()]
    if missing:
        first = masks.path(missing[0])
        raise CapiError(f"{len(missing)} of {len(masks)} masks are missing, the first is {first}: complete the files")
    return MaskedImages(Files(root, images), masks)


DATASET = Dataset(
    name="voc",
    title="Pascal VOC 2012 segmentation, augmented training list",
    layout="""\
ROOT/ImageSets/Segmentation/train.txt, val.txt
ROOT/JPEGImages/NAME.jpg
ROOT/SegmentationClass/NAME.png         palette PNG: the index is the class, 255 is void
ROOT is the folder VOC2012 of the official archive; its parents VOCdevkit or above are fine too.

more.sbd=FOLDER                         the Semantic Boundaries Dataset as unpacked:
  FOLDER/dataset/train.txt, val.txt     (or FOLDER/benchmark_RELEASE/dataset/...)
  FOLDER/dataset/cls/NAME.mat           read with SciPy: pip install 'capi[sbd]'
or more.sbd=FOLDER with the same masks as FOLDER/NAME.png, known as SegmentationClassAug.

Follows the development kit of VOC2012 (20 classes and background; train 1464, val 1449 images) and the description of
SBD (11355 annotated images of VOC 2011, whose lists contain images of VOC's val list). Trained on VOC train + SBD train
+ SBD val - VOC val, 10582 images; those that VOC has masks for keep VOC's masks. Without sbd: on VOC's 1464 images,
which the results note. Tested on VOC val. Void pixels are ignored.
""",
    segmentation=load,
    reads=frozenset({"more"}),
)
