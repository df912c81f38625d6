"""ImageNet-1k, with the test sets that reuse its classes: ReaL, V2, A, R, Sketch, ObjectNet."""

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capi.data.sources import Files
from capi.errors import CapiError
from capi.evals.datasets.files import (
    answered,
    check_count,
    check_more,
    class_folders,
    existing_file,
    first_with,
    images_under,
    labeled,
    list_lines,
    read_matlab,
)
from capi.evals.tasks import NO_ANSWER, AnsweredImages, ClassificationData, DataOptions, Dataset
from capi.runtime.documents import read_json
from capi.runtime.image_files import open_image
from capi.types import Int

Validation = tuple[Path, Mapping[int, str]]
"""The folder of the validation images, and their names by number."""
TestSet = tuple[AnsweredImages, tuple[str, ...]]
TestSetReader = Callable[[Path, Sequence[str], Validation, DataOptions], TestSet]
FRAME = 2


def read_real(path: Path, classes: Sequence[str], validation: Validation, options: DataOptions) -> TestSet:
    """Reassessed labels: entry i is about validation image i + 1; images without labels are left out."""
    entries = _json(path / "real.json" if path.is_dir() else path)
    folder, names = validation
    notes = check_count(len(entries), 50_000, "entries of reassessed labels", options)
    beyond = [number for number in names if not 1 <= number <= len(entries)]
    if beyond:
        raise CapiError(f"{path} has {len(entries)} entries, none for {names[beyond[0]]}: it is not the official file")
    rows = sorted((name, entries[number - 1]) for number, name in names.items() if entries[number - 1])
    wrong = next((name for name, labels in rows if not all(0 <= label < len(classes) for label in labels)), None)
    if wrong is not None:
        raise CapiError(f"{path} gives {wrong} a class that is not below {len(classes)}")
    return AnsweredImages(Files(folder, [name for name, _ in rows]), padded([labels for _, labels in rows])), notes


def read_v2(path: Path, classes: Sequence[str], _: Validation, options: DataOptions) -> TestSet:
    """Folders are class numbers, whatever their order as text."""
    rows = class_folders(path)
    notes = check_count(len(rows), 10_000, "images of ImageNetV2", options)
    wrong = next((kind for _, kind in rows if not (kind.isdecimal() and int(kind) < len(classes))), None)
    if wrong is not None:
        raise CapiError(f'{path} holds the folder "{wrong}", expected class numbers below {len(classes)}')
    return AnsweredImages(Files(path, [name for name, _ in rows]), padded([[int(kind)] for _, kind in rows])), notes


def read_adversarial(path: Path, classes: Sequence[str], _: Validation, options: DataOptions) -> TestSet:
    """ImageNet-A: a choice among the classes it has folders of."""
    test, own = _subset(path, classes)
    return test, check_count(own, 200, "classes of ImageNet-A", options)


def read_renditions(path: Path, classes: Sequence[str], _: Validation, options: DataOptions) -> TestSet:
    """ImageNet-R: a choice among the classes it has folders of."""
    test, own = _subset(path, classes)
    notes = check_count(own, 200, "classes of ImageNet-R", options)
    return test, notes + check_count(len(test.images), 30_000, "images of ImageNet-R", options)


def read_sketch(path: Path, classes: Sequence[str], _: Validation, options: DataOptions) -> TestSet:
    """Sketches of all classes, so nothing is left out of the choice."""
    test, own = _subset(path, classes)
    return AnsweredImages(test.images, test.answers), check_count(own, 1000, "classes of ImageNet-Sketch", options)


def read_objectnet(path: Path, classes: Sequence[str], _: Validation, __: DataOptions) -> TestSet:
    """Any ImageNet class that stands for the object is right; objects that none stands for are left out."""
    right = objectnet_classes(path / "mappings", len(classes))
    rows = class_folders(path / "images")
    unknown = next((kind for _, kind in rows if kind not in right), None)
    if unknown is not None:
        raise CapiError(f'{path / "mappings"} says nothing of the folder "{unknown}": it is not the official file')
    images_of_classes = [(name, right[kind]) for name, kind in rows if right[kind]]
    if not images_of_classes:
        raise CapiError(f"{path} holds no object that ImageNet has a class of")
    overlapping = [number for numbers in right.values() for number in numbers]
    images = FramedFiles(path / "images", [name for name, _ in images_of_classes])
    answers = padded([numbers for _, numbers in images_of_classes])
    return AnsweredImages(images, answers, _standing_for_themselves(overlapping, len(classes)), restricted=True), ()


TEST_SETS: dict[str, TestSetReader] = {
    "real": read_real,
    "v2": read_v2,
    "a": read_adversarial,
    "r": read_renditions,
    "sketch": read_sketch,
    "objectnet": read_objectnet,
}


class FramedFiles(Files):
    """Images whose frame of two pixels is cut off when they are read."""

    def read(self, index: int) -> Path | bytes:
        path = self.root / self.name(index)
        try:
            with open_image(path) as image:
                inside = image.crop((FRAME, FRAME, image.width - FRAME, image.height - FRAME))
        except OSError as error:
            raise CapiError(f"{path} cannot be read ({error}): repair it") from error
        buffer = io.BytesIO()
        # Without loss, and hardly compressed: it is read again at once.
        inside.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()


def objectnet_classes(mappings: Path, classes: int) -> dict[str, list[int]]:
    """The ImageNet classes, by number, that stand for the object of each folder of ObjectNet.

    The files name the classes in English; a line of `imagenet_to_label_2012_v2` is a class in the order of the
    development kit, and `pytorch_to_imagenet_2012_id.json` leads from our order to that one.
    """
    label_of = _json(mappings / "folder_to_objectnet_label.json")
    names_of = _json(mappings / "objectnet_to_imagenet_1k.json")
    line_of = {name: line for line, name in enumerate(list_lines(mappings / "imagenet_to_label_2012_v2"))}
    ours = {int(line): int(number) for number, line in _json(mappings / "pytorch_to_imagenet_2012_id.json").items()}
    result = {}
    for folder, label in label_of.items():
        names = [name.strip() for name in names_of.get(label, "").split(";") if name.strip()]
        lost = next((name for name in names if ours.get(line_of.get(name, -1), classes) >= classes), None)
        if lost is not None:
            raise CapiError(f'{mappings} does not lead from "{lost}" to a class of ImageNet: the files do not agree')
        result[folder] = sorted(ours[line_of[name]] for name in names)
    return result


def padded(answers: Sequence[Sequence[int]]) -> Int[Tensor, "s m"]:
    """Answers of each image as rows of equal length."""
    width = max((len(row) for row in answers), default=1)
    return torch.tensor([[*row, *[NO_ANSWER] * (width - len(row))] for row in answers]).reshape(len(answers), width)


def _subset(path: Path, classes: Sequence[str]) -> tuple[AnsweredImages, int]:
    """Folders of WordNet ids, the choice restricted to them, and how many they are."""
    rows = class_folders(path)
    own = sorted({kind for _, kind in rows})
    unknown = sorted(set(own) - set(classes))
    if unknown:
        raise CapiError(f'{path} holds the folder "{unknown[0]}", which is none of the {len(classes)} classes')
    images = labeled(path, rows, classes)
    numbers = [classes.index(wnid) for wnid in own]
    itself = _standing_for_themselves(numbers, len(classes))
    return AnsweredImages(images.images, images.labels[:, None], itself, restricted=True), len(own)


def _standing_for_themselves(numbers: Sequence[int], classes: int) -> Int[Tensor, " c"]:
    answer_of_class = torch.full((classes,), NO_ANSWER)
    answer_of_class[list(numbers)] = torch.tensor(list(numbers))
    return answer_of_class


def _json(path: Path) -> Any:
    return read_json(existing_file(path))


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
    tests = {"val": answered(labeled(root / "val", val, classes))}
    # Numbers instead of ids are understood by the whole list of classes alone.
    numbered = listed is not None or len(classes) == CLASSES
    for name in (name for name in TEST_SETS if name in options.more):
        if name in {"real", "v2", "objectnet"} and not numbered:
            raise CapiError(f"{name} numbers the {CLASSES} classes: put the list of them, {_MAPPING}, into {given}")
        images = {number_of(image): image for image, _ in val} if name == "real" else {}
        tests[name], more = TEST_SETS[name](options.more[name], classes, (root / "val", images), options)
        notes += more
    return ClassificationData(tuple(classes), labeled(root / "train", train, classes), tests, notes)


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
    reads=frozenset({"more"}),
)
