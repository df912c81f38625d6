"""Masks: label images that are read as numbers, never as colours, unless a data set keeps its labels as colours."""

import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from capi.data.sources import Files
from capi.errors import CapiError, counted, some_of
from capi.evals.datasets.files import images_under
from capi.evals.tasks import DataOptions, MaskedImages, MaskSource, SegmentationData
from capi.runtime.devices import choose_workers
from capi.runtime.image_files import open_image

MaskValues = npt.NDArray[Any]
Pairs = Sequence[tuple[str, str]]
VOID = 255
# Pillow stretches grey values of 2 and 4 bits over 0 to 255; labels are what the file holds.
_STRETCHED = {"L;2": 85, "L;4": 17}
_ONE_NUMBER_A_PIXEL = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")


class MaskFiles:
    """Masks in files. `table` says what each number of a file stands for; a number that it lacks is an error."""

    def __init__(
        self, root: Path, names: Sequence[str], table: Mapping[int, int] | None = None, hint: str = ""
    ) -> None:
        self.files, self.table, self.hint = Files(root, names), dict(table) if table is not None else None, hint

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return self.files.name(index)

    def read(self, index: int) -> MaskValues:
        values = self.numbers(index)
        return values if self.table is None else self._looked_up(values, index)

    def numbers(self, index: int) -> MaskValues:
        """What the file holds, before the table."""
        return read_label_image(self.path(index))

    def path(self, index: int) -> Path:
        return self.files.root / self.files.name(index)

    @property
    def fingerprint(self) -> str:
        table = "" if self.table is None else repr(sorted(self.table.items()))
        return hashlib.sha256(f"{self.files.fingerprint} {table}".encode()).hexdigest()[:16]

    @cached_property
    def _lookup(self) -> MaskValues:
        assert self.table is not None
        lookup = np.full(max(self.table, default=0) + 1, -1, dtype=np.int32)
        lookup[list(self.table)] = list(self.table.values())
        return lookup

    def _looked_up(self, values: MaskValues, index: int) -> MaskValues:
        inside = np.clip(values, 0, len(self._lookup) - 1)
        labels = np.where(inside == values, self._lookup[inside], -1)
        unknown = labels < 0
        if unknown.any():
            reason = "which is neither a class nor ignored" + (f": {self.hint}" if self.hint else "")
            raise CapiError(f"{self.path(index)} holds {self.describe(int(values[unknown][0]))}, {reason}")
        return labels.astype(np.uint8) if labels.size and labels.max() <= 255 else labels

    def describe(self, value: int) -> str:
        return f"the label {value}"


class ColorMasks(MaskFiles):
    """Masks whose labels are colours; the table's numbers are red * 65536 + green * 256 + blue, matched exactly."""

    def numbers(self, index: int) -> MaskValues:
        image = _opened(self.path(index))
        if image.mode not in {"RGB", "P"}:
            raise CapiError(f"{self.path(index)} is no colour image (mode {image.mode}): its labels should be colours")
        red, green, blue = np.asarray(image.convert("RGB")).astype(np.int32).transpose(2, 0, 1)
        return red * 65536 + green * 256 + blue

    def describe(self, value: int) -> str:
        return f"the colour {value >> 16} {value >> 8 & 255} {value & 255}"


def read_label_image(path: Path) -> MaskValues:
    """The numbers that an image file holds: palette images as indices, small bit depths unstretched."""
    image = _opened(path)
    if image.mode not in _ONE_NUMBER_A_PIXEL:
        raise CapiError(f"{path} is a colour image (mode {image.mode}): a mask holds one number a pixel")
    values = np.asarray(image)
    if values.dtype == np.bool_:
        return values.astype(np.uint8)
    factor = _STRETCHED.get(image.info.get("raw mode", ""), 1)
    return values if factor == 1 else values // factor


def _opened(path: Path) -> Image.Image:
    """A decoded image, its raw mode noted in `info`."""
    try:
        with open_image(path) as image:
            if image.format in {"JPEG", "MPO"}:
                raise CapiError(f"{path} is a JPEG, which changes labels: a mask must be stored without loss, as PNG")
            tiles: Any = getattr(image, "tile", None)
            tile = tiles[0] if tiles else None
            raw = tile[3] if tile is not None else ""
            image.load()
            image.info["raw mode"] = raw[0] if isinstance(raw, tuple) else raw
            return image
    except CapiError:
        raise
    except FileNotFoundError as error:
        raise CapiError(f"there is no mask {path}: put it there, or leave its image out") from error
    except Exception as error:
        # Codecs raise whatever they like about a broken file.
        raise CapiError(f"the mask {path} cannot be read ({error}): repair it, or leave its image out") from error


def labels_in(masks: MaskSource) -> set[int]:
    """Every label of the masks."""

    def labels_of(index: int) -> list[int]:
        return [int(label) for label in np.unique(masks.read(index))]

    with ThreadPoolExecutor(choose_workers(None, None)) as pool:
        return set(itertools.chain.from_iterable(pool.map(labels_of, range(len(masks)))))


def paired(images: Path, masks: Path) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Images and masks that share their name but for the ending. An image without a mask is an error."""
    image_of, mask_of = _by_stem(images), _by_stem(masks)
    check_all_masked([name for stem, name in image_of.items() if stem not in mask_of], images, len(image_of))
    spare = sorted(name for stem, name in mask_of.items() if stem not in image_of)
    notes = (f"not used: {counted(len(spare), 'mask')} without an image: {some_of(spare, 5)}",) if spare else ()
    return [(name, mask_of[stem]) for stem, name in image_of.items()], notes


def check_all_masked(missing: Sequence[str], where: Path, total: int) -> None:
    """An error that names the first image without a mask."""
    if missing:
        raise CapiError(
            f"no mask for {len(missing)} of {counted(total, 'image')}, the first is {where / missing[0]}: "
            "add the masks, or leave these images out"
        )


def _by_stem(folder: Path) -> dict[str, str]:
    """Images of a folder, by their name without its ending; two that differ in it alone are an error."""
    result: dict[str, str] = {}
    for name in images_under(folder):
        stem = str(PurePosixPath(name).with_suffix(""))
        if stem in result:
            raise CapiError(f"{folder} holds both {result[stem]} and {name}: which of them is meant is unclear")
        result[stem] = name
    if not result:
        raise CapiError(f"{folder} holds no images")
    return result


def masked(images: Path, masks: MaskFiles, pairs: Pairs) -> MaskedImages:
    """Pairs of names as sources."""
    return MaskedImages(Files(images, [image for image, _ in pairs]), masks)


def known_labels(classes: Mapping[int, str], ignored: Collection[int]) -> dict[int, int]:
    """The table that takes every label as it is, and no other."""
    return {label: label for label in sorted({*classes, *ignored})}


def segmentation_of_own_masks(
    train: tuple[Path, Path, Pairs],
    test: tuple[Path, Path, Pairs],
    options: DataOptions,
    test_name: str,
    notes: Sequence[str] = (),
) -> SegmentationData:
    """Masks of a user's own: (folder of images, folder of masks, pairs). Labels are found in the masks, or named."""
    ignored = options.ignored or frozenset()
    if options.class_names is not None:
        classes = {label: name for label, name in enumerate(options.class_names) if label not in ignored}
        more: tuple[str, ...] = ()
    else:
        labels = sorted((labels_in(_files(train, None)) | labels_in(_files(test, None))) - ignored)
        note = f"the label {VOID} counts as a class; if it means pixels that do not count, say ignored=[{VOID}]"
        classes, more = ({label: str(label) for label in labels}, (note,) if VOID in labels else ())
    if not classes:
        raise CapiError("no label of the masks counts, since all are ignored: look at ignored= and class_names=")
    table = known_labels(classes, ignored)
    return SegmentationData(
        classes=classes,
        ignored=ignored,
        train=masked(train[0], _files(train, table), train[2]),
        test=masked(test[0], _files(test, table), test[2]),
        test_name=test_name,
        notes=(*notes, *more),
    )


def _files(part: tuple[Path, Path, Pairs], table: Mapping[int, int] | None) -> MaskFiles:
    hint = "if its pixels do not count, say ignored=[...] with this number; else name it in class_names="
    return MaskFiles(part[1], [mask for _, mask in part[2]], table, hint)
