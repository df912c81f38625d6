"""Data sets of the evaluations, by name: one small file each, whose layout says how the files of the user must lie.

Another one is a file with a `DATASET` and a line in the dict. Nothing is ever downloaded.
"""

from pathlib import Path

from capi.errors import CapiError, nearest
from capi.evals.datasets import (
    ade20k,
    camvid,
    cityscapes,
    csv,
    demo,
    folder,
    imagenet,
    imagenet22k,
    inaturalist2021,
    masks,
    pets,
    places205,
    sun397,
    voc,
)
from capi.evals.tasks import ClassificationData, DataOptions, Dataset, SegmentationData

_MODULES = (
    *(folder, csv, masks, demo, pets, voc, ade20k, cityscapes, camvid),
    *(imagenet, imagenet22k, inaturalist2021, places205, sun397),
)
DATASETS: dict[str, Dataset] = {module.DATASET.name: module.DATASET for module in _MODULES}
WITHOUT_FOLDER = frozenset({"demo"})
_OPTIONS = ("train", "tests", "label", "exclude", "ignored", "class_names", "more")


def load_classification(name: str, root: Path | None, options: DataOptions) -> ClassificationData:
    """The images and classes of a data set that lies at `root`."""
    dataset = dataset_named(name)
    if dataset.classification is None:
        raise CapiError(f'the data set "{name}" has masks, but no classes of images: choose a protocol of segmentation')
    return dataset.classification(_checked(dataset, root, options), options)


def load_segmentation(name: str, root: Path | None, options: DataOptions) -> SegmentationData:
    """The images and masks of a data set that lies at `root`."""
    dataset = dataset_named(name)
    if dataset.segmentation is None:
        raise CapiError(f'the data set "{name}" has classes of images, but no masks: choose one of classification')
    return dataset.segmentation(_checked(dataset, root, options), options)


def dataset_named(name: str) -> Dataset:
    """The data set of this name; an unknown name is an error that suggests one."""
    if name not in DATASETS:
        raise CapiError(f'there is no data set "{name}"{nearest(name, DATASETS)} (there are {", ".join(DATASETS)})')
    return DATASETS[name]


def _checked(dataset: Dataset, root: Path | None, options: DataOptions) -> Path:
    """The folder to read, once the options are known to mean something to the data set."""
    for option in _OPTIONS:
        given = getattr(options, option)
        if option not in dataset.heeds and given is not None and given != {}:
            heeded = ", ".join(sorted(dataset.heeds)) or "none"
            raise CapiError(f'{option}= means nothing to the data set "{dataset.name}" (options it heeds: {heeded})')
    if dataset.name in WITHOUT_FOLDER:
        if root is not None:
            raise CapiError(f'the data set "{dataset.name}" is built in: leave out data={root}')
        return Path()
    if root is None:
        raise CapiError(f'the data set "{dataset.name}" needs to know where its files lie: give data=PATH')
    return root
