import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capi.data.sources import EncodedImages, LabeledPhotos
from capi.errors import CapiError
from capi.evals.datasets import DATASETS, load_classification, load_segmentation
from capi.evals.tasks import (
    NO_ANSWER,
    AnsweredImages,
    ClassificationData,
    DataOptions,
    MaskedImages,
    MaskSource,
    SegmentationData,
)
from tests.evals.datasets.layouts import BUILDERS, root_of

CLASSIFICATION = [name for name, dataset in DATASETS.items() if dataset.classification]
SEGMENTATION = [name for name, dataset in DATASETS.items() if dataset.segmentation]
Content = dict[str, Any]


class Shuffled:
    """`os.scandir` in an order that no file system would give twice."""

    def __init__(self, path: Any = ".") -> None:
        with scandir(path) as entries:
            self.entries = list(entries)
        random.shuffle(self.entries)

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return iter(self.entries)

    def __enter__(self) -> "Shuffled":
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...


scandir, listdir = os.scandir, os.listdir


@pytest.fixture(autouse=True)
def _few_photos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three photos instead of all that are built in, since reading those takes seconds."""

    def photos(split: str) -> LabeledPhotos:
        return LabeledPhotos(
            EncodedImages([f"{split}/{i}" for i in range(3)], [b"photo"] * 3), [2, 0, 1], ["a", "b", "c"]
        )

    monkeypatch.setattr("capi.evals.datasets.demo.demo_photos", photos)


def shuffled_names(path: Any = ".") -> list[str]:
    names = listdir(path)
    random.shuffle(names)
    return names


def classes_by_name(data: ClassificationData) -> Content:
    train = [(data.train.images.name(i), int(label)) for i, label in enumerate(data.train.labels)]
    tests = {
        name: [(test.images.name(i), row.tolist()) for i, row in enumerate(test.answers)]
        for name, test in data.tests.items()
    }
    prints = [data.train.images.fingerprint, *(test.images.fingerprint for test in data.tests.values())]
    return {"classes": data.classes, "train": train, "tests": tests, "prints": prints, "notes": data.notes}


def pixels_by_name(data: SegmentationData) -> Content:
    def content(part: MaskedImages) -> list[tuple[str, str, list[list[int]]]]:
        count = range(len(part.images))
        return [(part.images.name(i), part.masks.name(i), part.masks.read(i).tolist()) for i in count]

    prints = [source.fingerprint for part in (data.train, data.test) for source in (part.images, part.masks)]
    return {
        "classes": data.classes,
        "train": content(data.train),
        "test": content(data.test),
        "prints": prints,
        "notes": data.notes,
    }


def check_answers(test: AnsweredImages, classes: int) -> None:
    assert len(test.images) == len(test.answers) > 0
    assert test.answers.min() >= NO_ANSWER
    assert test.answers.max() < classes
    assert (test.answers != NO_ANSWER).any(1).all()
    assert not test.restricted or test.answer_of_class is not None
    if test.answer_of_class is not None:
        assert test.answer_of_class.shape == (classes,)
        assert set(test.answers.flatten().tolist()) <= {*test.answer_of_class.tolist(), NO_ANSWER}


def test__every_data_set_has_a_tiny_copy_and_a_layout() -> None:
    assert set(BUILDERS) == set(DATASETS)
    for name, dataset in DATASETS.items():
        assert dataset.name == name
        assert dataset.title
        assert len(dataset.layout.strip()) > 100
        assert max(map(len, dataset.layout.splitlines())) <= 120
        assert dataset.classification or dataset.segmentation


@pytest.mark.parametrize("name", CLASSIFICATION)
def test__a_classification_has_labels_within_its_classes_and_files_that_exist(name: str, tmp_path: Path) -> None:
    options = BUILDERS[name](tmp_path)
    data = load_classification(name, root_of(name, tmp_path), options)
    assert len(set(data.classes)) == len(data.classes) >= 3
    assert len(data.train.images) == len(data.train.labels) > 0
    assert set(data.train.labels.tolist()) <= set(range(len(data.classes)))
    assert data.tests
    for source in (data.train.images, *(test.images for test in data.tests.values())):
        content = source.read(len(source) - 1)
        assert isinstance(content, bytes) or content.is_file()
    for test in data.tests.values():
        check_answers(test, len(data.classes))


@pytest.mark.parametrize("name", SEGMENTATION)
def test__a_segmentation_has_masks_of_its_labels_in_the_size_of_the_images(name: str, tmp_path: Path) -> None:
    options = BUILDERS[name](tmp_path)
    data = load_segmentation(name, root_of(name, tmp_path), options)
    assert not data.ignored & set(data.classes)
    labels = set()
    for part in (data.train, data.test):
        assert isinstance(part.masks, MaskSource)
        assert len(part.images) == len(part.masks) > 0
        for index in range(len(part.images)):
            path = part.images.read(index)
            assert isinstance(path, Path)
            assert path.is_file()
            mask = part.masks.read(index)
            assert mask.shape == (8, 8)
            labels |= set(np.unique(mask).tolist())
    assert labels <= data.ignored | set(data.classes)
    assert len(labels & set(data.classes)) >= 2


@pytest.mark.parametrize(
    ("name", "load", "contents_of"),
    [
        *((name, load_classification, classes_by_name) for name in CLASSIFICATION if name != "demo"),
        *((name, load_segmentation, pixels_by_name) for name in SEGMENTATION),
    ],
)
def test__a_data_set_does_not_depend_on_the_order_of_files(
    name: str, load: Callable, contents_of: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = []
    for forwards in (True, False):
        root = tmp_path / str(forwards)
        options = BUILDERS[name](root, forwards)
        with monkeypatch.context() as patch:
            if not forwards:
                patch.setattr(os, "scandir", Shuffled)
                patch.setattr(os, "listdir", shuffled_names)
            data = load(name, root_of(name, root), options)
        contents.append(contents_of(data))
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    "name", sorted(name for name, each in DATASETS.items() if each.needs_folder and not each.own_split)
)
def test__other_than_the_official_counts_are_an_error_or_else_a_note(name: str, tmp_path: Path) -> None:
    options = BUILDERS[name](tmp_path)
    for names, load in ((CLASSIFICATION, load_classification), (SEGMENTATION, load_segmentation)):
        if name in names:
            data = load(name, tmp_path, options)
            assert any("instead of the official" in note for note in data.notes)
            with pytest.raises(CapiError, match=r"found \d+ .* official data set has \d+.*verify_counts=false"):
                load(name, tmp_path, DataOptions(more=options.more))


def test__a_misspelt_name_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(CapiError, match='no data set "cityscape"; did you mean "cityscapes"'):
        load_segmentation("cityscape", Path(), DataOptions())


def test__a_task_that_a_data_set_lacks_is_an_error() -> None:
    with pytest.raises(CapiError, match="no classes of images: choose ade20k/knn-segmentation or ade20k/logistic-"):
        load_classification("ade20k", Path(), DataOptions())
    with pytest.raises(CapiError, match="no masks: choose imagenet/attentive or imagenet/knn or imagenet/linear"):
        load_segmentation("imagenet", Path(), DataOptions())


@pytest.mark.parametrize("name", [name for name in DATASETS if "tests" in DATASETS[name].reads])
def test__a_split_is_tested_on_once(name: str, tmp_path: Path) -> None:
    load = load_classification if name in CLASSIFICATION else load_segmentation
    root = None if name == "demo" else root_of(name, tmp_path)
    with pytest.raises(CapiError, match='tests= names the split "val" twice: name each once'):
        load(name, root, DataOptions(tests=("val", "test", "val")))


@pytest.mark.parametrize("name", ["folder", "masks", "pets", "ade20k", "cityscapes"])
def test__a_missing_folder_says_where_the_layout_is_shown(name: str, tmp_path: Path) -> None:
    load = load_classification if name in CLASSIFICATION else load_segmentation
    with pytest.raises(CapiError, match=f"{tmp_path}/.*: the files must lie as `capi datasets show {name}` says$"):
        load(name, tmp_path / "nowhere", DataOptions())


@pytest.mark.parametrize(
    "options",
    [
        DataOptions(train="val"),
        DataOptions(tests=()),
        DataOptions(label="kind"),
        DataOptions(exclude=Path("list")),
        DataOptions(ignored=frozenset()),
        DataOptions(class_names=("a",)),
    ],
)
def test__an_option_that_is_not_heeded_is_an_error(options: DataOptions) -> None:
    with pytest.raises(CapiError, match=r'means nothing to the data set "voc" \(options it reads: more\)'):
        load_segmentation("voc", Path(), options)


def test__further_files_that_are_not_heeded_are_an_error() -> None:
    with pytest.raises(CapiError, match=r'more= means nothing to the data set "ade20k" \(options it reads: none\)'):
        load_segmentation("ade20k", Path(), DataOptions(more={"sbd": Path()}))
    with pytest.raises(CapiError, match='more= has no "sdb" for this data set; did you mean "sbd"'):
        load_segmentation("voc", Path(), DataOptions(more={"sdb": Path()}))


def test__a_folder_must_be_given_unless_the_data_set_is_built_in(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match='"folder" needs to know where its files lie'):
        load_classification("folder", None, DataOptions())
    with pytest.raises(CapiError, match='"demo" is built in'):
        load_classification("demo", tmp_path, DataOptions())


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"demo"}))
def test__an_empty_folder_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    load = load_classification if name in CLASSIFICATION else load_segmentation
    with pytest.raises(CapiError, match=str(tmp_path)):
        load(name, root_of(name, tmp_path), DataOptions())
