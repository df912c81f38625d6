"""Oxford-IIIT Pet: breeds of cats and dogs, and where in the photo the animal is."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from capi.errors import CapiError
from capi.evals.datasets.files import check_count, check_present, classification, list_lines, without_excluded
from capi.evals.datasets.mask_files import VOID, MaskFiles, MaskValues, check_all_masked, masked
from capi.evals.tasks import ClassificationData, DataOptions, Dataset, MaskedImages, SegmentationData

COUNTS = {"trainval": 3680, "test": 3669}
BREEDS = 37
CAT, DOG = 1, 2
# What the numbers of a trimap stand for.
_FOREGROUND, _BACKGROUND, _BORDER = 1, 2, 3


class Pet(NamedTuple):
    """A line of a list."""

    name: str
    breed: int
    species: int


class Trimaps(MaskFiles):
    """Trimaps whose foreground is a cat or a dog, by the species of the photo."""

    def __init__(self, root: Path, pets: Sequence[Pet]) -> None:
        names = [f"annotations/trimaps/{pet.name}.png" for pet in pets]
        super().__init__(root, names, {_FOREGROUND: CAT, _BACKGROUND: 0, _BORDER: VOID})
        self.species = [pet.species for pet in pets]

    def read(self, index: int) -> MaskValues:
        # The table calls every foreground a cat.
        labels = super().read(index)
        return np.where(labels == CAT, np.uint8(self.species[index]), labels)


def load_classification(root: Path, options: DataOptions) -> ClassificationData:
    """The 37 breeds, numbered as in the lists."""
    splits, notes = _splits(root, options)
    breeds = _breeds([pet for pets in splits.values() for pet in pets])
    notes += check_count(len(breeds), BREEDS, "breeds", options)
    numbers = sorted(breeds)
    train, test = ([(f"images/{pet.name}.jpg", breeds[pet.breed]) for pet in splits[split]] for split in COUNTS)
    return classification((root, train), {"test": (root, test)}, [breeds[number] for number in numbers], notes)


def load_segmentation(root: Path, options: DataOptions) -> SegmentationData:
    """Background, cat and dog."""
    splits, notes = _splits(root, options)
    train, test = (_masked(root, splits[split]) for split in COUNTS)
    return SegmentationData(
        classes={0: "background", CAT: "cat", DOG: "dog"},
        ignored=frozenset({VOID}),
        train=train,
        test=test,
        notes=notes,
    )


def _masked(root: Path, pets: Sequence[Pet]) -> MaskedImages:
    pairs = [(f"images/{pet.name}.jpg", f"annotations/trimaps/{pet.name}.png") for pet in pets]
    present = {path.name for path in (root / "annotations" / "trimaps").glob("*.png")}
    missing = [image for image, trimap in pairs if trimap.rsplit("/", 1)[1] not in present]
    check_all_masked(missing, root, len(pairs))
    return masked(root, Trimaps(root, pets), pairs)


def _splits(root: Path, options: DataOptions) -> tuple[dict[str, list[Pet]], tuple[str, ...]]:
    """The photos of the two lists, sorted, without those to be left out."""
    splits = {
        split: sorted(_pet(line, root) for line in list_lines(root / "annotations" / f"{split}.txt"))
        for split in COUNTS
    }
    notes: tuple[str, ...] = ()
    for split, expected in COUNTS.items():
        notes += check_count(len(splits[split]), expected, f"photos in {split}.txt", options)
    names = [f"images/{pet.name}.jpg" for pets in splits.values() for pet in pets]
    check_present(root, "images", names)
    left, more = without_excluded(names, options)
    return {
        split: [pet for pet in pets if f"images/{pet.name}.jpg" in left] for split, pets in splits.items()
    }, notes + more


def _pet(line: str, root: Path) -> Pet:
    fields = line.split()
    if len(fields) != 4 or not all(field.isdigit() for field in fields[1:]) or int(fields[2]) not in {CAT, DOG}:
        raise CapiError(f'a list in {root / "annotations"} holds "{line}": expected a name, class, species and breed')
    return Pet(fields[0], int(fields[1]), int(fields[2]))


def _breeds(pets: Sequence[Pet]) -> dict[int, str]:
    """The breed of each number: the name of its photos without their number."""
    breeds: dict[int, str] = {}
    for pet in pets:
        name = pet.name.rsplit("_", 1)[0]
        if breeds.setdefault(pet.breed, name) != name:
            raise CapiError(f"class {pet.breed} is both {breeds[pet.breed]} and {name}: the lists are not the official")
    return breeds


DATASET = Dataset(
    name="pets",
    title="Oxford-IIIT Pet",
    layout="""\
ROOT/images/NAME.jpg
ROOT/annotations/trainval.txt           lines of: NAME class species breed
ROOT/annotations/test.txt
ROOT/annotations/trimaps/NAME.png       1 foreground, 2 background, 3 not classified

As in the archives images.tar.gz and annotations.tar.gz, whose annotations/README describes the lists and the trimaps
(data set of the Visual Geometry Group, Oxford: https://www.robots.ox.ac.uk/~vgg/data/pets/). Trained on trainval.txt
(3680 photos), tested on test.txt (3669). Classification: the 37 breeds. Segmentation: background, cat and dog, with
the border of the trimaps ignored; the official data set has no such task, this labelling is a choice made here.
exclude= names a file with photos to leave out, a line each, like images/NAME.jpg.
""",
    classification=load_classification,
    segmentation=load_segmentation,
    reads=frozenset({"exclude"}),
)
