"""ImageNet-22k: the whole of ImageNet."""

from pathlib import Path

from capi.errors import CapiError
from capi.evals.datasets.files import check_count, check_more, class_folders, classification, list_lines
from capi.evals.datasets.imagenet import check_wnids
from capi.evals.tasks import ClassificationData, DataOptions, Dataset

IMAGES, CLASSES = 14_197_122, 21_841
EVERY = 50


def load(root: Path, options: DataOptions) -> ClassificationData:
    """All images but those held out, which a file names or a rule picks."""
    check_more(options, ["test"])
    rows = class_folders(root)
    classes = check_wnids([kind for _, kind in rows])
    notes = check_count(len(rows), IMAGES, "images", options) + check_count(len(classes), CLASSES, "classes", options)
    if "test" in options.more:
        held_out = _listed(options.more["test"], {name for name, _ in rows})
        notes += (f"tested on the images of {options.more['test'].name}: there is no official split",)
    else:
        held_out = every_so_many(rows)
        notes += (f"tested on every {EVERY}th image of each class: there is no official split",)
    train = [row for row in rows if row[0] not in held_out]
    test = [row for row in rows if row[0] in held_out]
    if not (train and test):
        raise CapiError(
            f"{len(train)} images to train on and {len(test)} to test on are left of {root}: both are needed"
        )
    return classification((root, train), {"test": (root, test)}, classes, notes)


def every_so_many(rows: list[tuple[str, str]]) -> set[str]:
    """The 50th, the 100th and so on of the images of each class, in sorted order."""
    held_out: set[str] = set()
    seen: dict[str, int] = {}
    for name, kind in rows:
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] % EVERY == 0:
            held_out.add(name)
    return held_out


def _listed(path: Path, names: set[str]) -> set[str]:
    listed = set(list_lines(path))
    unknown = sorted(listed - names)
    if unknown:
        raise CapiError(f"{path} names {unknown[0]}, which is not there: names are like n00000001/n00000001_1.JPEG")
    return listed


DATASET = Dataset(
    name="imagenet22k",
    title="ImageNet-22k",
    layout="""\
ROOT/nXXXXXXXX/*.JPEG        a folder for each WordNet id

more.test=FILE               a list of the images to test on, lines like nXXXXXXXX/nXXXXXXXX_1.JPEG
Without it, every 50th image of each class (sorted by name) is tested on: there is no official split. The results say
which of the two was done.

The release of fall 2011 has 14197122 images in 21841 classes (figures of the ILSVRC article for the whole of ImageNet);
these are verified. The release of winter 2021 removed classes and images (said on GitHub: Alibaba-MIIL/ImageNet21K),
so it needs verify_counts=false, and the numbers found go into the results.
""",
    classification=load,
    reads=frozenset({"more"}),
)
