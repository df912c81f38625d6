"""ImageNet-1k, with the test sets that reuse its classes."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from capi.errors import CapiError
from capi.evals.datasets.files import (
    answered,
    check_count,
    check_more,
    class_folders,
    existing_file,
    first_with,
    images_under,
    labelled,
    list_lines,
)
from capi.evals.datasets.imagenet_shifts import TEST_SETS
from capi.evals.datasets.matlab import read_matlab
from capi.evals.tasks import ClassificationData, DataOptions, Dataset

COUNTS = {"train": 1_281_167, "val": 50_000}
CLASSES = 1000
_WNID = re.compile(r"n\d{8}")
_VAL = re.compile(r"ILSVRC2012_val_(\d{8})\b")
_MAPPING = "LOC_synset_mapping.txt"


def load(root: Path, options: DataOptions) -> ClassificationData:
    """Classes are WordNet ids in their sorted order, the order that ReaL and V2 number them in."""
    check_more(options, TEST_SETS)
    given, root = root, first_with([root, root / "ILSVRC" / "Data" / "CLS-LOC"], "train")
    train = class_folders(root / "train")
    listed = next((path / _MAPPING for path in (root, given) if (path / _MAPPING).is_file()), None)
    classes = check_wnids([line.split()[0] for line in list_lines(listed)] if listed else [kind for _, kind in train])
    val = validation_rows(root / "val", [root, given])
    notes = check_count(len(train), COUNTS["train"], "training images", options)
    notes += check_count(len(val), COUNTS["val"], "validation images", options)
    notes += check_count(len(classes), CLASSES, "classes", options)
    unknown = sorted({kind for _, kind in (*train, *val)} - set(classes))
    if unknown:
        raise CapiError(f"the class {unknown[0]} is not among the {len(classes)} classes to train on")
    tests = {"val": answered(labelled(root / "val", val, classes))}
    # Numbers instead of ids are understood by the whole list of classes alone.
    numbered = listed is not None or len(classes) == CLASSES
    for name in (name for name in TEST_SETS if name in options.more):
        if name in {"real", "v2", "objectnet"} and not numbered:
            raise CapiError(f"{name} numbers the {CLASSES} classes: put the list of them, {_MAPPING}, into {given}")
        images = {number_of(image): image for image, _ in val} if name == "real" else {}
        tests[name], more = TEST_SETS[name](options.more[name], classes, (root / "val", images), options)
        notes += more
    return ClassificationData(tuple(classes), labelled(root / "train", train, classes), tests, notes)


def check_wnids(names: Sequence[str]) -> list[str]:
    """The WordNet ids among class folders, sorted; anything else is an error."""
    classes = sorted(set(names))
    wrong = next((name for name in classes if not _WNID.fullmatch(name)), None)
    if wrong is not None:
        raise CapiError(f'"{wrong}" is no WordNet id like n01440764, which the classes of ImageNet are named by')
    return classes


def number_of(name: str) -> int:
    """The number in the name of a validation image."""
    match = _VAL.search(name)
    if match is None:
        raise CapiError(f"the validation image {name} is not named like ILSVRC2012_val_00000001.JPEG")
    return int(match[1])


def validation_rows(folder: Path, roots: Sequence[Path]) -> list[tuple[str, str]]:
    """Validation images with their WordNet ids: by folder, or from a list where they lie in one folder."""
    names = images_under(folder)
    if any("/" in name for name in names):
        return class_folders(folder)
    wnids = _solution(roots) or _ground_truth(roots)
    if wnids is None:
        raise CapiError(
            f"the images in {folder} are not sorted into class folders: sort them, or put LOC_val_solution.csv or "
            f"ILSVRC2012_devkit_t12 into {roots[0]}"
        )
    missing = [name for name in names if number_of(name) not in wnids]
    if missing:
        raise CapiError(f"the list of validation classes lacks {missing[0]}: it is not the official list")
    return [(name, wnids[number_of(name)]) for name in names]


def _solution(roots: Sequence[Path]) -> dict[int, str] | None:
    """Classes by number from LOC_val_solution.csv, whose second column begins with the WordNet id."""
    path = next((root / "LOC_val_solution.csv" for root in roots if (root / "LOC_val_solution.csv").is_file()), None)
    if path is None:
        return None
    with path.open(newline="", encoding="utf-8") as file:
        return {number_of(row["ImageId"]): row["PredictionString"].split()[0] for row in csv.DictReader(file)}


def _ground_truth(roots: Sequence[Path]) -> dict[int, str] | None:
    """Classes by number from the development kit, whose class numbers are its own and are explained in meta.mat."""
    folders = [root / "ILSVRC2012_devkit_t12" / "data" for root in roots]
    folder = next((path for path in folders if path.is_dir()), None)
    if folder is None:
        return None
    synsets = read_matlab(existing_file(folder / "meta.mat"), "synsets")
    wnids = {int(synset.ILSVRC2012_ID): str(synset.WNID) for synset in synsets}
    numbers = [int(line) for line in list_lines(folder / "ILSVRC2012_validation_ground_truth.txt")]
    return {image: wnids[number] for image, number in enumerate(numbers, start=1)}


DATASET = Dataset(
    name="imagenet",
    title="ImageNet-1k (ILSVRC 2012)",
    layout="""\
ROOT/train/nXXXXXXXX/*.JPEG
ROOT/val/nXXXXXXXX/ILSVRC2012_val_*.JPEG, or all in ROOT/val with one of
  ROOT/LOC_val_solution.csv                       (the Kaggle release, with images in ROOT/ILSVRC/Data/CLS-LOC)
  ROOT/ILSVRC2012_devkit_t12/data/meta.mat and ILSVRC2012_validation_ground_truth.txt  (pip install 'capi[sbd]')
ROOT/LOC_synset_mapping.txt                       the list of classes (optional, taken from train otherwise)

Test sets for the same head, as more.NAME=PATH:
  real=real.json        reassessed labels of the validation images (GitHub: google-research/reassessed-imagenet): any
                        of several labels is right, images with none are skipped; found by the number in their names
  v2=FOLDER             ImageNetV2 (GitHub: modestyachts/ImageNetV2), folders 0 to 999, which are class numbers
  a=FOLDER, r=FOLDER    ImageNet-A and -R (GitHub: hendrycks/natural-adv-examples, hendrycks/imagenet-r), folders of
                        WordNet ids; only their own 200 classes are chosen among
  sketch=FOLDER         ImageNet-Sketch (GitHub: HaohanWang/ImageNet-Sketch), folders of WordNet ids
  objectnet=FOLDER      ObjectNet, with images/ and mappings/; classes that ImageNet lacks are skipped, and only the
                        overlapping classes are chosen among; the red frame of 2 pixels is cut off, as the evaluation
                        code of its authors does (GitHub: abarbu/objectnet-template-pytorch)

Classes are numbered by their sorted WordNet ids. Counts verified: 1281167 and 50000 images, 1000 classes; V2 10000
images; R 30000 images in 200 classes; A 200 classes; Sketch 1000 classes. The number of images of A, Sketch (its README
says 50000, copies hold more) and ObjectNet is not verified: no exact official figure was found.
""",
    classification=load,
    heeds=frozenset({"more"}),
)
