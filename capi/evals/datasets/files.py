"""What the data sets share: walking folders, reading lists and files of MATLAB, numbering classes, checking counts."""

import hashlib
import importlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from capi.data.sources import ENDINGS, Files, image_names
from capi.errors import CapiError, counted, nearest
from capi.evals.tasks import AnsweredImages, ClassificationData, DataOptions, LabeledImages
from capi.runtime.documents import LIST_BYTES, read_text

# Share of the images that are tested on where nothing says which.
TEST_SHARE = 0.2


class MisplacedFilesError(CapiError):
    """Files that do not lie as the data set wants them; who knows its name adds where that can be read."""


def existing_folder(path: Path) -> Path:
    """The folder, or an error that it is missing."""
    if not path.is_dir():
        kind = "a file, not a folder" if path.exists() else "missing"
        raise MisplacedFilesError(f"the folder {path} is {kind}")
    return path


def existing_file(path: Path) -> Path:
    """The file, or an error that it is missing."""
    if not path.is_file():
        raise MisplacedFilesError(f"the file {path} is missing")
    return path


def list_lines(path: Path) -> list[str]:
    """The lines of a list, without those that are empty."""
    text = read_text(existing_file(path), limit=LIST_BYTES)
    return [line.strip() for line in text.splitlines() if line.strip()]


def images_under(root: Path) -> list[str]:
    """Names of all images under a folder, relative to it and sorted; hidden files and folders are left out."""
    return sorted(image_names(existing_folder(root)))


def class_folders(root: Path) -> list[tuple[str, str]]:
    """Every image in a folder of class folders, with its class: the folder directly under the root that it lies in."""
    names = images_under(root)
    if not names:
        raise CapiError(f"{root} holds no images (looked for {', '.join(ENDINGS)}): it must hold a folder a class")
    stray = [name for name in names if "/" not in name]
    if len(stray) == len(names):
        raise CapiError(f"{root} holds images, but no folder for each class: put every image into its class's folder")
    if stray:
        raise CapiError(f"{root / stray[0]} lies beside the class folders: move it into its class's folder, or away")
    # One string a class, not one an image: there may be millions.
    classes: dict[str, str] = {}
    return [(name, classes.setdefault(kind, kind)) for name in names for kind in [name.split("/", 1)[0]]]


def labeled(root: Path, rows: Sequence[tuple[str, str]], classes: Sequence[str]) -> LabeledImages:
    """Images given as (name, class)."""
    number = {name: index for index, name in enumerate(classes)}
    labels = torch.tensor([number[kind] for _, kind in rows], dtype=torch.int64)
    return LabeledImages(Files(root, [name for name, _ in rows]), labels)


def answered(images: LabeledImages) -> AnsweredImages:
    """A test set with one right answer an image."""
    return AnsweredImages(images.images, images.labels[:, None])


def classification(
    train: tuple[Path, Sequence[tuple[str, str]]],
    tests: Mapping[str, tuple[Path, Sequence[tuple[str, str]]]],
    classes: Sequence[str] | None = None,
    notes: Iterable[str] = (),
) -> ClassificationData:
    """Rows of (name, class) as a classification; classes are those of any row, sorted, unless they are given."""
    trained = {kind for _, kind in train[1]}
    tested = {kind for _, rows in tests.values() for _, kind in rows}
    if classes is None:
        classes = sorted(trained | tested)
    unknown = sorted((trained | tested) - set(classes))
    if unknown:
        raise CapiError(f'the class "{unknown[0]}" is not one of the {counted(len(classes), "class")} of the data set')
    return ClassificationData(
        classes=tuple(classes),
        train=labeled(*train, classes),
        tests={name: answered(labeled(*part, classes)) for name, part in tests.items()},
        notes=tuple(notes),
    )


def check_count(count: int, expected: int, what: str, options: DataOptions) -> tuple[str, ...]:
    """Notes about a number that is not the official one; an error where numbers are to be verified."""
    if count == expected:
        return ()
    if options.verify_counts:
        raise CapiError(
            f"found {count} {what}, but the official data set has {expected}: "
            "complete the files, or say verify_counts=false to continue with what is there"
        )
    return (f"{count} {what} instead of the official {expected}",)


def without_excluded(names: Sequence[str], options: DataOptions) -> tuple[frozenset[str], tuple[str, ...]]:
    """Which of the names stay, and a note about the rest. Lines of the file that begin with # are remarks."""
    if options.exclude is None:
        return frozenset(names), ()
    listed = {line for line in list_lines(options.exclude) if not line.startswith("#")}
    unknown = sorted(listed - set(names))
    if unknown:
        raise CapiError(
            f'{options.exclude} names "{unknown[0]}", which is no image of the data set'
            f"{nearest(unknown[0], names[:1000])} (names are like {names[0]})"
        )
    left = frozenset(names) - listed
    return left, (f"{counted(len(listed), 'image')} left out by {options.exclude.name}",) if listed else ()


def chosen_tests(present: Collection[str], options: DataOptions, where: Path) -> tuple[str, ...]:
    """The splits to test on: those asked for, else `test` where there is one, else `val`."""
    if options.tests is not None:
        if not options.tests:
            raise CapiError("tests= names no split: name at least one")
        return options.tests
    default = next((name for name in ("test", "val") if name in present), None)
    if default is None:
        if not present:
            raise CapiError(f"{where} has no test, no val and no other split: `capi datasets show` tells the layout")
        names = ", ".join(sorted(present))
        raise CapiError(f"{where} has neither test nor val, but {names}: name the split to test on with tests=")
    return (default,)


def has_splits(splits: Collection[str], options: DataOptions, where: Path) -> bool:
    """Whether the data has splits, or the user names some; else the images are divided here."""
    named = options.train is not None or options.tests is not None
    if options.test_share is not None and named:
        raise CapiError("test_share= divides data without splits, train= and tests= name splits: leave one out")
    if options.test_share is not None and splits:
        names = ", ".join(sorted(splits))
        raise CapiError(f"test_share= divides data without splits, but {where} has {names}: leave it out")
    return named or bool(splits)


def divide(
    rows: Sequence[tuple[str, str]], options: DataOptions, where: Path, *, by_class: bool
) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """Rows of (name, value) for "train" and for "test", in their order, and a note that says how they were divided.

    Of each class (or of all images) those whose names have the lowest SHA-256 are tested on: the same ones on every
    machine, for every seed, and nearly the same ones after images came or went.
    """
    share = options.test_share or TEST_SHARE
    groups: dict[str, list[str]] = defaultdict(list)
    for name, value in rows:
        groups[value if by_class else ""].append(name)
    tested: set[str] = set()
    for names in groups.values():
        names.sort(key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())
        # A class has images on both sides where it has two.
        tested.update(names[: min(max(round(share * len(names)), 1), len(names) - 1)])
    if not tested:
        raise CapiError(
            f"{where} has no splits, and no image to test on is left of {counted(len(rows), 'image')} in "
            f"{counted(len(groups), 'class')}: add some"
            if by_class
            else f"{where} has no splits, and no image to test on is left of {counted(len(rows), 'image')}: add some"
        )
    parts = {"train": [row for row in rows if row[0] not in tested], "test": [row for row in rows if row[0] in tested]}
    of_each = " of each class" if by_class else ""
    return parts, (
        f"{where.name} names no splits: {len(tested)} of {len(rows)} images are tested on, "
        f"{100 * share:g} %{of_each} by the hash of their names (test_share={share:g})"
    )


def one_test(tests: Sequence[str]) -> str:
    """Segmentation has one test split."""
    if len(tests) != 1:
        raise CapiError(f"segmentation is tested on one split, but tests= names {len(tests)}: {', '.join(tests)}")
    return tests[0]


def check_splits_differ(train: str, tests: Sequence[str]) -> None:
    """Testing on what was trained on would be no test."""
    if train in tests:
        raise CapiError(f'the split "{train}" is both trained and tested on: choose others with train= and tests=')


def check_splits_are_there(asked: Sequence[str], splits: Collection[str], where: Path, what: str) -> None:
    """A split that the files lack is named with its nearest neighbor; `what` a split is, such as a folder."""
    for split in asked:
        if split not in splits:
            names = ", ".join(sorted(splits)) or "none"
            raise CapiError(f'{where} has no {what} "{split}"{nearest(split, splits)} (it has {names})')


def refuse(options: DataOptions, names: Collection[str], task: str) -> None:
    """An option that a data set reads in its other task only."""
    for name in sorted(names):
        if getattr(options, name):
            raise CapiError(f"{name}= means nothing for the {task} of this data set: leave it out")


def check_more(options: DataOptions, names: Collection[str]) -> None:
    """Names of further files that the data set knows nothing of."""
    for name in options.more:
        if name not in names:
            raise CapiError(
                f'more= has no "{name}" for this data set{nearest(name, names)} (it knows {", ".join(names)})'
            )


def check_present(root: Path, folder: str, names: Sequence[str]) -> None:
    """That every name in a list, relative to the root, is a file of this flat folder."""
    present = {f"{folder}/{entry.name}" for entry in os.scandir(existing_folder(root / folder))}
    missing = [name for name in names if name not in present]
    if missing:
        raise CapiError(
            f"files of the lists that are missing: {len(missing)} of {len(names)}, the first is {root / missing[0]}: "
            "complete the files"
        )


def first_with(roots: Sequence[Path], inside: str) -> Path:
    """The first of several folders that holds a file or folder; data sets are unpacked more or less deep."""
    folder = next((root for root in roots if (root / inside).exists()), None)
    if folder is None:
        raise MisplacedFilesError(f"there is no {roots[0] / inside}")
    return folder


def read_matlab(path: Path, variable: str) -> Any:
    """A variable of a .mat file, structures simplified to objects with attributes."""
    try:
        reader = importlib.import_module("scipy.io")
    except ImportError as error:
        raise CapiError(f"reading {path} needs an extra: pip install 'capi[sbd]'") from error
    if not path.is_file():
        raise CapiError(f"the file {path} is missing: complete the files")
    try:
        values = reader.loadmat(path, variable_names=[variable], squeeze_me=True, struct_as_record=False)
    except Exception as error:
        # The reader raises whatever it likes about a broken file.
        raise CapiError(f"{path} cannot be read as a file of MATLAB ({error}): complete the files") from error
    if variable not in values:
        raise CapiError(f'{path} holds no variable "{variable}": it is not the file of the official data set')
    return values[variable]
