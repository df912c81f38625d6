"""A CSV that names files, their splits, and their classes or masks."""

import difflib
import itertools
from collections.abc import Sequence
from pathlib import Path

from capi.data.sources import csv_place, read_csv
from capi.errors import CapiError, nearest
from capi.evals.datasets.files import (
    check_splits_are_there,
    check_splits_differ,
    chosen_tests,
    classification,
    divide,
    has_splits,
    one_test,
    refuse,
    without_excluded,
)
from capi.evals.datasets.mask_files import check_all_masked, segmentation_of_own_masks
from capi.evals.tasks import ClassificationData, DataOptions, Dataset, SegmentationData
from capi.runtime.image_files import refuse_outside

CsvRows = list[tuple[str, str, str]]


def load_classification(path: Path, options: DataOptions) -> ClassificationData:
    """The label column is the class, as text; classes are those of the chosen splits, sorted."""
    refuse(options, {"ignored", "class_names"}, "classification")
    path, root = csv_place(path)
    column = options.label or "label"
    rows, notes = _read(path, column, options, by_class=True)
    train, tests = _chosen(rows, path, options)
    unlabeled = [file for split in (train, *tests) for file, value in _of_split(rows, split) if not value]
    if unlabeled:
        raise CapiError(f'{path} has nothing in the column "{column}" for {unlabeled[0]}: fill it in or take it out')
    refuse_outside(root, [file for file, _, _ in rows], str(path))
    parts = {split: (root, _of_split(rows, split)) for split in (train, *tests)}
    return classification(parts[train], {split: parts[split] for split in tests}, notes=notes)


def load_segmentation(path: Path, options: DataOptions) -> SegmentationData:
    """The column `mask` names the mask of each image."""
    refuse(options, {"label"}, "segmentation")
    if options.tests is not None:
        one_test(options.tests)
    path, root = csv_place(path)
    rows, notes = _read(path, "mask", options, by_class=False)
    train, (test,) = _chosen(rows, path, options)
    pairs = [pair for split in (train, test) for pair in _of_split(rows, split)]
    refuse_outside(root, [name for pair in pairs for name in pair if name], str(path))
    missing = [file for file, mask in pairs if not (mask and (root / mask).is_file())]
    check_all_masked(missing, root, len(pairs))
    return segmentation_of_own_masks(
        (root, root, _of_split(rows, train)), (root, root, _of_split(rows, test)), options, test, notes
    )


def _read(path: Path, column: str, options: DataOptions, *, by_class: bool) -> tuple[CsvRows, tuple[str, ...]]:
    """Rows of (file, split, value of the column), sorted by file; without a column `split` they are divided here."""
    if not path.is_file():
        raise CapiError(f"there is no file {path}: this data set is a CSV with the columns file, {column} and split")
    columns, table = read_csv(path)
    # A column that is all but called so is misspelt.
    splitless = not difflib.get_close_matches("split", [name for name in columns if name != column], 1, 0.75)
    for name in ("file", column, *([] if splitless else ["split"])):
        if name not in columns:
            raise CapiError(f'{path} has no column "{name}"{nearest(name, columns)} (it has {", ".join(columns)})')
    rows = sorted((row["file"], "" if splitless else row["split"], row[column]) for row in table)
    twice = next((file for (file, *_), (after, *_) in itertools.pairwise(rows) if file == after), None)
    if twice is not None:
        raise CapiError(f"{path} names {twice} twice: an image has one row, in one split")
    left, notes = without_excluded([file for file, _, _ in rows], options)
    rows = [row for row in rows if row[0] in left]
    if has_splits({split for _, split, _ in rows if split}, options, path) or not splitless:
        if splitless:
            raise CapiError(f'{path} has no column "split": add it, or leave out train= and tests= to have it divided')
        return rows, notes
    parts, note = divide([(file, value) for file, _, value in rows], options, path, by_class=by_class)
    return [(file, split, value) for split in parts for file, value in parts[split]], (*notes, note)


def _chosen(rows: CsvRows, path: Path, options: DataOptions) -> tuple[str, tuple[str, ...]]:
    splits = {split for _, split, _ in rows}
    train = options.train or "train"
    tests = chosen_tests(splits, options, path)
    check_splits_differ(train, tests)
    check_splits_are_there([train, *tests], splits, path, "images of the split")
    return train, tests


def _of_split(rows: Sequence[tuple[str, str, str]], split: str) -> list[tuple[str, str]]:
    return [(file, value) for file, its_split, value in rows if its_split == split]


DATASET = Dataset(
    name="csv",
    title="Any images that a CSV names",
    layout="""\
The folder that is given is a file here: a CSV in UTF-8, one row an image, with the columns
  file     the image, relative to the folder of the CSV
  split    its split; train= (train unless said) is trained on, tests= (test, else val) is tested on. Without this
           column 20 % are tested on (test_share=; of each class), chosen by a hash of their names
  label    its class, for classification; label= names another column
  mask     its mask, for segmentation, relative to the folder of the CSV: an image that holds one number a pixel

Every label found in the masks is a class but for those of ignored=; with class_names= the labels are 0, 1, 2, ... and
any other is an error. Files lie below the folder of the CSV, or below the one that is named, as
data=FILE.csv?images=FOLDER; their names are then relative to that folder, or absolute. exclude= names a file with the
images to leave out, a line each, spelt as in the CSV.
""",
    classification=load_classification,
    segmentation=load_segmentation,
    reads=frozenset({"train", "tests", "test_share", "label", "exclude", "ignored", "class_names"}),
    own_split=True,
)
