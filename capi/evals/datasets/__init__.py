"""Data sets of the evaluations, by name: one small file each, whose layout says how the files of the user must lie.

Another one is a file with a `DATASET` and its name in `_MODULES`. Nothing is ever downloaded.
"""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

from capi.errors import CapiError, nearest
from capi.evals.datasets.copies import noting_copies
from capi.evals.datasets.files import MisplacedFilesError
from capi.evals.datasets.records import CIFAR10, CIFAR100, STL10
from capi.evals.fitted_probes import PROBES
from capi.evals.tasks import ClassificationData, DataOptions, Dataset, SegmentationData
from capi.runtime.protocol import Task

# Their modules, in the order in which they are listed.
_MODULES = (
    *("folder", "csv", "masks", "demo", "pets", "voc", "ade20k", "cityscapes", "camvid"),
    *("imagenet", "imagenette", "imagenet22k", "inaturalist2021", "places205", "sun397"),
)
_OF_MODULES: list[Dataset] = [importlib.import_module(f"{__name__}.{name}").DATASET for name in _MODULES]
DATASETS = {dataset.name: dataset for dataset in (*_OF_MODULES, CIFAR10, CIFAR100, STL10)}
_OPTIONS = ("train", "tests", "test_share", "label", "exclude", "ignored", "class_names", "more")


def load_classification(name: str, root: Path | None, options: DataOptions) -> ClassificationData:
    """The images and classes of a data set that lies at `root`."""
    data: ClassificationData = _load(name, "classification", root, options)
    return data


def load_segmentation(name: str, root: Path | None, options: DataOptions) -> SegmentationData:
    """The images and masks of a data set that lies at `root`."""
    data: SegmentationData = _load(name, "segmentation", root, options)
    return data


def _load(name: str, task: Task, root: Path | None, options: DataOptions) -> Any:
    dataset = dataset_named(name)
    check_task(name, task)
    try:
        data = getattr(dataset, task)(_checked(dataset, root, options), options)
    except MisplacedFilesError as error:
        raise CapiError(f"{error}: the files must lie as `capi datasets show {name}` says") from error
    return noting_copies(data, root) if dataset.own_split else data


def check_task(name: str, task: Task) -> None:
    """A data set without labels for a task is an error that names the protocols it has labels for."""
    if getattr(dataset_named(name), task) is not None:
        return
    segmented = task == "classification"
    has = "masks, but no classes of images" if segmented else "classes of images, but no masks"
    protocols = [kind for kind, probe in sorted(PROBES.items()) if hasattr(probe, "segment") == segmented]
    raise CapiError(
        f'the data set "{name}" has {has}: choose {" or ".join(f"{name}/{protocol}" for protocol in protocols)}'
    )


def dataset_named(name: str) -> Dataset:
    """The data set of this name; an unknown name is an error that suggests one."""
    if name not in DATASETS:
        raise CapiError(f'there is no data set "{name}"{nearest(name, DATASETS)} (there are {", ".join(DATASETS)})')
    return DATASETS[name]


def _checked(dataset: Dataset, root: Path | None, options: DataOptions) -> Path:
    """The folder to read, once the options are known to mean something to the data set."""
    for option in _OPTIONS:
        given = getattr(options, option)
        if option not in dataset.reads and given is not None and given != {}:
            listed = ", ".join(sorted(dataset.reads)) or "none"
            raise CapiError(f'{option}= means nothing to the data set "{dataset.name}" (options it reads: {listed})')
    twice = next((name for name, count in Counter(options.tests or ()).items() if count > 1), None)
    if twice is not None:
        raise CapiError(f'tests= names the split "{twice}" twice: name each once')
    if not dataset.needs_folder:
        if root is not None:
            raise CapiError(f'the data set "{dataset.name}" is built in: leave out data={root}')
        return Path()
    if root is None:
        raise CapiError(f'the data set "{dataset.name}" needs to know where its files lie: give data=PATH')
    if root.suffix.lower() == ".zip" and root.is_file():
        raise CapiError(
            f"{root} is a zip, which training and `capi extract` read as it is: unzip it to evaluate on it, and give "
            "data=FOLDER"
        )
    return root
