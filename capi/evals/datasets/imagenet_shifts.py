"""Test sets that reuse the classes of ImageNet-1k: ReaL, V2, A, R, Sketch, ObjectNet."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capi.data.sources import Files
from capi.errors import CapiError
from capi.evals.datasets.files import check_count, class_folders, existing_file, labelled, list_lines
from capi.evals.tasks import NO_ANSWER, AnsweredImages, DataOptions
from capi.runtime.documents import read_json
from capi.runtime.image_files import open_image
from capi.types import Int

Validation = tuple[Path, Mapping[int, str]]
"""The folder of the validation images, and their names by number."""
Result = tuple[AnsweredImages, tuple[str, ...]]
Reader = Callable[[Path, Sequence[str], Validation, DataOptions], Result]
FRAME = 2


def read_real(path: Path, classes: Sequence[str], validation: Validation, options: DataOptions) -> Result:
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


def read_v2(path: Path, classes: Sequence[str], _: Validation, options: DataOptions) -> Result:
    """Folders are class numbers, whatever their order as text."""
    rows = class_folders(path)
    notes = check_count(len(rows), 10_000, "images of ImageNetV2", options)
    wrong = next((kind for _, kind in rows if not (kind.isdecimal() and int(kind) < len(classes))), None)
    if wrong is not None:
        raise CapiError(f'{path} holds the folder "{wrong}", expected class numbers below {len(classes)}')
    return AnsweredImages(Files(path, [name for name, _ in rows]), padded([[int(kind)] for _, kind in rows])), notes


def read_adversarial(path: Path, classes: Sequence[str], _: Validation, options: DataOptions) -> Result:
    """ImageNet-A: a choice among the classes it has folders of."""
    test, own = _subset(path, classes)
    return test, check_count(own, 200, "classes of ImageNet-A", options)


def read_renditions(path: Path, classes: Sequence[str], _: Validation, options: DataOptions) -> Result:
    """ImageNet-R: a choice among the classes it has folders of."""
    test, own = _subset(path, classes)
    notes = check_count(own, 200, "classes of ImageNet-R", options)
    return test, notes + check_count(len(test.images), 30_000, "images of ImageNet-R", options)


def read_sketch(path: Path, classes: Sequence[str], _: Validation, options: DataOptions) -> Result:
    """Sketches of all classes, so nothing is left out of the choice."""
    test, own = _subset(path, classes)
    return AnsweredImages(test.images, test.answers), check_count(own, 1000, "classes of ImageNet-Sketch", options)


def read_objectnet(path: Path, classes: Sequence[str], _: Validation, __: DataOptions) -> Result:
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


TEST_SETS: dict[str, Reader] = {
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
    """For each folder of ObjectNet the ImageNet classes that stand for its object, by number.

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
    images = labelled(path, rows, classes)
    numbers = [classes.index(wnid) for wnid in own]
    itself = _standing_for_themselves(numbers, len(classes))
    return AnsweredImages(images.images, images.labels[:, None], itself, restricted=True), len(own)


def _standing_for_themselves(numbers: Sequence[int], classes: int) -> Int[Tensor, " c"]:
    answer_of_class = torch.full((classes,), NO_ANSWER)
    answer_of_class[list(numbers)] = torch.tensor(list(numbers))
    return answer_of_class


def _json(path: Path) -> Any:
    return read_json(existing_file(path))
