"""Sources by the names that a user gives: folders, CSVs, shards, tables, names of the Hub, several of these.

photos                          a folder of images, nested or flat; of tar shards; of parquet or arrow files
labels.csv                      the images that its column `file` names, below its folder
labels.csv?images=FOLDER        the same where they lie below another folder
photos.zip                      the images in a zip, read where they lie
path/{000000..001023}.tar       shards; also one file or a glob, and the same for .zip, .parquet and .arrow
photos.parquet?column=picture   a column by name
cifar-10-batches-bin            the training images of CIFAR-10, also CIFAR-100 and STL-10, in their binary files
hf://owner/name?split=train     a data set of the Hub; other schemes are in `SCHEMES`
demo                            the built-in photos
SOURCE@WEIGHT                   among several sources, how often one is drawn

hf://NAME?split=train[&column=image][&revision=...][&config=...][&streaming=true]: without streaming `datasets`
downloads them once and keeps arrow files, which are read row by row. With it only parquet files will do: their row
groups are fetched where they lie when they are wanted, so the order is as exact as ever. NAME may be a folder here as
well (`hf://./folder`).

Images to extract features of are any of these; the names of class folders are their labels.
"""

import glob
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from rich.console import Console

from capi.data.records import open_records
from capi.data.shards import open_shards
from capi.data.sources import (
    COUNTS,
    ENDINGS,
    Files,
    ImageSource,
    ListedNames,
    Mixture,
    csv_images,
    csv_place,
    demo_photos,
    image_folder,
    is_csv,
    masks_among,
    read_csv,
)
from capi.data.tables import TableImages, open_arrow, open_parquet_files, require_pyarrow
from capi.data.zips import ZipImages
from capi.errors import CapiError, expect, nearest
from capi.runtime.atomic import is_regular, walk_folder
from capi.runtime.image_files import refuse_outside
from capi.runtime.plugins import register

DataLocation = str | Path | Sequence[str | Path]
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".gz")
_WEIGHTED = re.compile(r"(?P<source>.+)@(?P<weight>[+-]?(\d+(\.\d*)?|\.\d+|nan|inf))", re.DOTALL)
_COLUMN = re.compile(r"(?P<path>.+)\?column=(?P<column>.+)", re.DOTALL)
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")
_MOST_SHARDS = 1_000_000


# Tables by the ending of their files: from files and the name of a column, or None, to the images.
TABLE_READERS: dict[str, Callable[[list[str], str | None], ImageSource]] = {
    ".parquet": open_parquet_files,
    ".arrow": open_arrow,
}


class Weighted(NamedTuple):
    """A source by name, and its weight among others."""

    name: str
    weight: float | None = None


def open_images(data: DataLocation, console: Console | None = None, *, index_beside: bool = True) -> ImageSource:
    """The training images of a run. With a console a bar shows the scan of shards that have no index yet.

    Without `index_beside` a new index of a shard goes to the user's cache, and nothing is written beside the shard.
    """
    sources = weighted_sources(data)
    if len(sources) == 1:
        return _open_source(sources[0].name, console, index_beside)
    parts = [_open_source(source.name, console, index_beside) for source in sources]
    weights = [source.weight for source in sources if source.weight is not None]
    return Mixture([source.name for source in sources], parts, weights or None)


def weighted_sources(data: DataLocation) -> list[Weighted]:
    """The sources by name with their weights: of all of them, or of none."""
    wanted = "a folder of images or another source, or several (docs/guides/data.md)"
    expect("data", data, (str, Path, Sequence), wanted)
    names = [str(data)] if isinstance(data, str | Path) else [str(name) for name in data]
    if not names:
        raise CapiError("no images are named: give at least one source")
    sources = [_weighted(name) for name in names]
    given = [source for source in sources if source.weight is not None]
    if given and len(sources) == 1:
        raise CapiError(
            f"{names[0]} has a weight, which has a meaning among several sources only: leave @{given[0].weight:g} out "
            "(or there is no such file or folder)"
        )
    if given and len(given) < len(sources):
        without = next(source.name for source in sources if source.weight is None)
        raise CapiError(f"{without} has no weight and others have: give SOURCE@WEIGHT for all, or for none")
    return sources


def photos_alone(data: DataLocation, source: ImageSource) -> list[str] | None:
    """The same sources, of folders with photos and masks the photos alone; None where there are no masks to leave."""
    parts, names, has_masks = source.parts if isinstance(source, Mixture) else [source], list[str](), False
    for each, part in zip(weighted_sources(data), parts, strict=True):
        folders = list[str]()
        if isinstance(part, Files) and os.path.isdir(each.name):
            folders = [str(part.root / folder) for folder in masks_among(part)[1]]
        weight = None if each.weight is None else each.weight / max(len(folders), 1)
        names += [_written(Weighted(name, weight)) for name in folders or [each.name]]
        has_masks = has_masks or bool(folders)
    return names if has_masks else None


def describe_data(data: DataLocation, source: ImageSource) -> dict[str, Any]:
    """What run.json says of the images."""
    sources = weighted_sources(data)
    names = ", ".join(_written(each) for each in sources)
    facts: dict[str, Any] = {"path": names, "images": len(source), "fingerprint": source.fingerprint}
    if isinstance(source, Mixture):
        facts["sources"] = [
            {"path": each.name, "weight": each.weight, "images": len(part), "fingerprint": part.fingerprint}
            for each, part in zip(sources, source.parts, strict=True)
        ]
    return facts


def described_data(facts: Mapping[str, Any]) -> DataLocation:
    """What run.json says of the images, as `open_images` takes it."""
    if "sources" not in facts:
        return str(facts["path"])
    return [_written(Weighted(each["path"], each["weight"])) for each in facts["sources"]]


def _written(source: Weighted) -> str:
    return source.name if source.weight is None else f"{source.name}@{source.weight!r}"


def _weighted(text: str) -> Weighted:
    """A file or folder whose own name looks like a weight is that file or folder."""
    match = _WEIGHTED.fullmatch(text)
    if match is None or os.path.exists(text):
        return Weighted(text)
    weight = float(match["weight"])
    if not (0 < weight < math.inf):
        raise CapiError(f"{text} has a weight of {weight:g}: expected more than 0, or leave the source out")
    return Weighted(match["source"], weight)


def _open_source(data: str, console: Console | None, index_beside: bool) -> ImageSource:
    if data == "demo":
        return demo_photos("train").images
    scheme, separator, _ = data.partition("://")
    if separator and not os.path.exists(data):
        if scheme not in SCHEMES:
            raise CapiError(
                f'{data}: there are no sources "{scheme}://"{nearest(scheme, SCHEMES)}: expected a path, or one of '
                f"{', '.join(SCHEMES)}"
            )
        return SCHEMES[scheme](data)
    if is_csv(data) and os.path.isfile(csv_place(data)[0]):
        return csv_images(data)
    named = None if os.path.exists(data) else _COLUMN.fullmatch(data)
    path, column = (named["path"], named["column"]) if named else (data, None)
    records = open_records(Path(path)) if os.path.isdir(path) else None
    if records is not None:
        return records
    files = _files(path)
    if files is None:
        if column is not None:
            raise CapiError(f"{data} names a column, which parquet and arrow files have: {path} is something else")
        return csv_images(path) if is_csv(path) else image_folder(Path(path))
    return _open_files(files, path, column, console, index_beside)


def _open_files(
    files: list[str], data: str, column: str | None, console: Console | None, index_beside: bool
) -> ImageSource:
    kinds = {os.path.splitext(file)[1].lower() for file in files}
    compressed = next((file for file in files if file.lower().endswith(_COMPRESSED)), None)
    if compressed:
        raise CapiError(
            f"{compressed} is compressed, and its images cannot be read one by one: unpack it to a plain .tar "
            "(images are compressed already) or to a folder"
        )
    if len(kinds) > 1 or not kinds <= {".tar", ".zip", *TABLE_READERS}:
        raise CapiError(
            f"{data} leads to files that end in {', '.join(sorted(kinds))}: expected one of .tar, .zip, "
            f"{', '.join(TABLE_READERS)}"
        )
    (kind,) = kinds
    if kind in TABLE_READERS:
        return TABLE_READERS[kind](files, column)
    if column is not None:
        raise CapiError(f"{data} has tar or zip files, which have no columns: leave ?column={column} out")
    if kind == ".zip":
        return ZipImages([Path(file) for file in files])
    return open_shards([Path(file) for file in files], console, index_beside=index_beside)


def _files(path: str) -> list[str] | None:
    """The shards or tables that a path or pattern stands for; None where it is no such thing."""
    if os.path.isdir(path):
        return _files_of_folder(Path(path))
    if path.lower().endswith((".tar", ".zip", *TABLE_READERS, *_COMPRESSED)) or (
        not os.path.exists(path) and glob.has_magic(path)
    ):
        return [path] if os.path.exists(path) else list(_expanded(path))
    return None


def _files_of_folder(folder: Path) -> list[str] | None:
    """A folder with images is a folder of images, whatever lies beside them."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        if "train" not in splits:
            raise CapiError(f"{folder} has no split train (it has {', '.join(splits)}): name the folder of a split")
        folder = folder / "train"
    files: dict[str, list[str]] = {".tar": [], ".zip": [], **{ending: [] for ending in TABLE_READERS}}
    for name, entry in walk_folder(folder):
        ending = os.path.splitext(name)[1]
        if ending.lower() in ENDINGS and is_regular(entry):
            return None
        if ending in files:
            files[ending].append(str(folder / name))
    return next((sorted(paths) for paths in files.values() if paths), None)


def _expanded(pattern: str) -> Iterator[str]:
    """Braces name files that must be there, stars those that are."""
    for name in _braces(pattern):
        if not glob.has_magic(name):
            yield name
            continue
        files = sorted(glob.glob(name, recursive=True))
        if not files:
            raise CapiError(
                f"no file matches {name}: check the pattern, and quote it so that the shell leaves it alone"
            )
        yield from files


def _braces(pattern: str) -> list[str]:
    if "{" not in pattern:
        return [pattern]
    try:
        import braceexpand
    except ImportError as error:
        raise CapiError("patterns with braces need an extra: pip install 'capi[shards]'") from error
    # The library makes all names at once.
    ranges = _RANGE.findall(pattern)
    if any(len(number) > len(str(_MOST_SHARDS**2)) for pair in ranges for number in pair):
        raise CapiError(f"{pattern} counts to a number that is too large: check its numbers")
    lengths = [abs(int(end) - int(start)) + 1 for start, end in ranges]
    lengths += [words.count(",") + 1 for words in _CHOICE.findall(pattern)]
    if math.prod(lengths) > _MOST_SHARDS:
        raise CapiError(f"{pattern} stands for more than {_MOST_SHARDS} files: check its numbers")
    try:
        return list(braceexpand.braceexpand(pattern))
    except ValueError as error:
        raise CapiError(
            f"{pattern} has a brace without its partner: expected a pattern like {{000..123}}.tar"
        ) from error


SCHEME = "hf://"
OPTIONS = ("split", "column", "revision", "config", "streaming")


class HubName(NamedTuple):
    """A data set by name."""

    name: str
    split: str = "train"
    column: str | None = None
    revision: str | None = None
    config: str | None = None
    streaming: bool = False


def parse_name(text: str) -> HubName:
    """What stands behind `hf://`."""
    name, _, query = text.removeprefix(SCHEME).partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    for key in options:
        if key not in OPTIONS:
            raise CapiError(f'{text} has no option "{key}"{nearest(key, OPTIONS)} (there are {", ".join(OPTIONS)})')
    if not name or len(pairs) != query.count("=") or len(options) != len(pairs) or not all(options.values()):
        raise CapiError(f"{text} is no name of a data set: expected hf://owner/name?split=train")
    streaming = options.pop("streaming", "false")
    if streaming not in {"true", "false"}:
        raise CapiError(f"{text} has streaming={streaming}: expected true or false")
    return HubName(name, streaming=streaming == "true", **options)


def open_hub(text: str) -> TableImages:
    """The images of a data set of the Hub."""
    wanted = parse_name(text)
    datasets = _library()
    try:
        return _streamed(datasets, wanted) if wanted.streaming else _downloaded(datasets, wanted)
    except CapiError:
        raise
    except Exception as error:
        # The library lets through what any of its many formats and connections raises.
        hint = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise CapiError(
            f"{text} could not be opened{hint}: {str(error).strip().splitlines()[0] if str(error) else type(error)}: "
            "check the name, the split and the connection; a private data set needs `hf auth login`"
        ) from error


def _downloaded(datasets: Any, wanted: HubName) -> TableImages:
    opened = datasets.load_dataset(wanted.name, wanted.config, split=wanted.split, revision=wanted.revision)
    files = [entry["filename"] for entry in opened.cache_files]
    if not files:
        raise CapiError(
            f"{SCHEME}{wanted.name} is not kept in files by `datasets`: save it with save_to_disk, use that"
        )
    # What the library downloaded or found in a folder here, and wrote down by path.
    caches = (datasets.config.HF_CACHE_HOME, datasets.config.HF_DATASETS_CACHE)
    folders = [Path(cache) for cache in caches] + ([Path(wanted.name)] if os.path.isdir(wanted.name) else [])
    images = open_arrow(files, wanted.column, folders)
    if len(images) != len(opened):
        raise CapiError(f'the split "{wanted.split}" is a part of its files: name a whole split')
    return images


def _streamed(datasets: Any, wanted: HubName) -> TableImages:
    builder = datasets.load_dataset_builder(wanted.name, wanted.config, revision=wanted.revision)
    if not type(builder).__module__.startswith("datasets.packaged_modules.parquet"):
        raise CapiError(
            f"{SCHEME}{wanted.name} is no set of parquet files, and only these can be read at any place without a "
            "download: leave streaming=true out"
        )
    files = builder.config.data_files or {}
    if wanted.split not in files:
        raise CapiError(f'{SCHEME}{wanted.name} has no split "{wanted.split}" (it has {", ".join(map(str, files))})')
    return open_parquet_files([str(file) for file in files[wanted.split]], wanted.column)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise CapiError("data sets of the Hub need an extra: pip install 'capi[hf]'") from error
    require_pyarrow()
    return datasets


# Sources by what stands before `://`, each opened with its whole name.
SCHEMES: dict[str, Callable[[str], ImageSource]] = {"hf": open_hub}


def register_source(scheme: str, opener: Callable[[str], ImageSource]) -> None:
    """Make `SCHEME://...` a source of images in this process: `opener` gets the whole name."""
    register(SCHEMES, scheme, opener, "source")


SPLITS = frozenset({"train", "training", "val", "validation", "test", "testing"})


class ListedImages(NamedTuple):
    """A source, and the label of each image or None."""

    images: ImageSource
    labels: list[str] | None


def list_images(data: str, split: str | None = None, label: str = "label") -> ListedImages:
    """The images that a name stands for. A split is a column of a CSV, a folder in a folder, or one of `demo`."""
    if data == "demo":
        split = split or "train"
        if split not in COUNTS:
            splits = ", ".join(COUNTS)
            raise CapiError(f'the built-in photos have no split "{split}"{nearest(split, COUNTS)} ({splits})')
        photos = demo_photos(split)
        return ListedImages(photos.images, [photos.categories[number] for number in photos.labels])
    if is_csv(data):
        return _from_csv(data, split, label)
    if not os.path.isdir(data):
        if split is not None and os.path.exists(data):
            raise CapiError(f"{data} has no splits, as a folder, a CSV and demo have: leave --split {split} out")
        return labeled_images(data)
    images = image_folder(Path(data) / split if split else Path(data))
    return ListedImages(images, class_folders(images))


def labeled_images(data: DataLocation, console: Console | None = None) -> ListedImages:
    """Whatever a run can be trained on, with labels where its folders or its CSV give them."""
    source = open_images(data, console)
    if data == "demo":
        return list_images("demo")
    if isinstance(source, Files | ZipImages) and isinstance(data, str | Path):
        if not is_csv(data):
            return ListedImages(source, class_folders(source))
        listed = list_images(str(data))
        if listed.labels is not None:
            by_name = {listed.images.name(number): label for number, label in enumerate(listed.labels)}
            return ListedImages(source, [by_name[source.name(number)] for number in range(len(source))])
    return ListedImages(source, None)


def class_folders(images: ListedNames) -> list[str] | None:
    """The folder that each image lies in, where all lie one folder deep and there are several; else no labels.

    Deeper folders do not say which name is the class, and folders that are called as splits are splits.
    """
    parts = [images.name(number).split("/") for number in range(len(images))]
    if any(len(part) != 2 for part in parts):
        return None
    folders = [folder for folder, _ in parts]
    return folders if len(set(folders)) > 1 and not SPLITS.issuperset(folders) else None


def _from_csv(data: str, split: str | None, label: str) -> ListedImages:
    path, root = csv_place(data)
    columns, rows = read_csv(path)
    # Images need no label; but a column that was asked for by name must be there.
    asked = [label] if label != "label" else []
    for name in ("file", *(["split"] if split else []), *asked):
        if name not in columns:
            raise CapiError(f'{path} has no column "{name}"{nearest(name, columns)} (it has {", ".join(columns)})')
    chosen = sorted((row for row in rows if not split or row["split"] == split), key=lambda row: row["file"])
    if not chosen:
        raise CapiError(f"{path} lists no images" + (f' of the split "{split}"' if split else ""))
    labels = [row[label] for row in chosen] if label in columns else None
    names = [row["file"] for row in chosen]
    refuse_outside(root, names, str(path))
    return ListedImages(Files(root, names), labels)
