"""SUN397: scenes, in the partitions of its authors."""

from pathlib import Path

from capi.errors import CapiError
from capi.evals.datasets.files import check_count, classification, first_with, list_lines
from capi.evals.tasks import ClassificationData, DataOptions, Dataset

CLASSES, EACH = 397, 50


def load(root: Path, options: DataOptions) -> ClassificationData:
    """Classes in the order of ClassName.txt; an image's class is its folder."""
    train, tests = options.train or "Training_01", options.tests or ("Testing_01",)
    lists = first_with([root, root / "Partitions"], f"{train}.txt")
    classes = [line.strip("/") for line in list_lines(first_with([root, lists], "ClassName.txt") / "ClassName.txt")]
    parts = {name: (root, _rows(lists / f"{name}.txt")) for name in (train, *tests)}
    notes = check_count(len(classes), CLASSES, "classes", options)
    for name, (_, rows) in parts.items():
        notes += check_count(len(rows), CLASSES * EACH, f"images of {name}.txt", options)
    for name in tests:
        both = {image for image, _ in parts[train][1]} & {image for image, _ in parts[name][1]}
        if both:
            raise CapiError(f"{train}.txt and {name}.txt both name {min(both)}: take lists of the same partition")
    first = parts[train][1][0][0]
    first_with([root], first)
    return classification(parts[train], {name: parts[name] for name in tests}, classes, notes)


def _rows(path: Path) -> list[tuple[str, str]]:
    names = sorted(line.lstrip("/") for line in list_lines(path))
    if not names:
        raise CapiError(f"{path} names no images: it is not the official list")
    return [(name, name.rpartition("/")[0]) for name in names]


DATASET = Dataset(
    name="sun397",
    title="SUN397",
    layout="""\
ROOT/a/abbey/sun_*.jpg             the folder SUN397 of the archive
ROOT/ClassName.txt                 lines like /a/abbey
ROOT/Partitions/Training_01.txt    lines like /a/abbey/sun_aaalbzqrimafwbiv.jpg
ROOT/Partitions/Testing_01.txt     (the lists may lie in ROOT itself)

As on the page of the data set (https://vision.princeton.edu/projects/2010/SUN/): 397 classes and ten partitions with 50
images of each class to train on and 50 to test on, 19850 each. Partition 01 unless train= and tests= name other lists,
such as Training_02 and Testing_02.
""",
    classification=load,
    reads=frozenset({"train", "tests"}),
)
