"""From what a user calls the images to a source: folders, CSVs, shards, tables, names of the Hub, several of these.

photos                          a folder of images, nested or flat; of tar shards; of parquet or arrow files
labels.csv                      the images that its column `file` names, below its folder
labels.csv?images=FOLDER        the same where they lie below another folder
path/{000000..001023}.tar       shards; also one file or a glob, and the same for .parquet and .arrow
photos.parquet?column=picture   a column by name
hf://owner/name?split=train     a data set of the Hub
demo                            the built-in photos
SOURCE@WEIGHT                   among several sources, how often one is drawn
"""

import glob
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from capi.data.demo import demo_photos
from capi.data.hub import SCHEME, open_hub
from capi.data.mixture import Mixture
from capi.data.shards import open_shards
from capi.data.sources import ENDINGS, ImageSource, csv_images, csv_place, image_folder, is_csv
from capi.data.tables import open_arrow, open_parquet_files
from capi.errors import CapiError, expect
from capi.runtime.links import is_regular, walk_folder

Data = str | Path | Sequence[str | Path]
TABLES = (".parquet", ".arrow")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".gz", ".zip")
_WEIGHTED = re.compile(r"(?P<source>.+)@(?P<weight>[+-]?(\d+(\.\d*)?|\.\d+|nan|inf))", re.DOTALL)
_COLUMN = re.compile(r"(?P<path>.+)\?column=(?P<column>.+)", re.DOTALL)
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")
_MOST_SHARDS = 1_000_000


class Weighted(NamedTuple):
    """A source by name, and its weight among others."""

    name: str
    weight: float | None = None


def open_images(data: Data, console: Console | None = None, *, index_beside: bool = True) -> ImageSource:
    """The training images of a run. With a console a bar shows the scan of shards that have no index yet.

    Without `index_beside` a new index of a shard goes to the user's cache, and nothing is written beside the shard.
    """
    sources = weighted_sources(data)
    if len(sources) == 1:
        return _open_one(sources[0].name, console, index_beside)
    parts = [_open_one(source.name, console, index_beside) for source in sources]
    weights = [source.weight for source in sources if source.weight is not None]
    return Mixture([source.name for source in sources], parts, weights or None)


def weighted_sources(data: Data) -> list[Weighted]:
    """The sources by name with their weights: of all of them, or of none."""
    expect("data", data, (str, Path, Sequence), "a folder of images or another source, or several (docs/data.md)")
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


def describe_data(data: Data, source: ImageSource) -> dict[str, Any]:
    """What run.json says of the images."""
    sources = weighted_sources(data)
    told = ", ".join(_written(each) for each in sources)
    facts: dict[str, Any] = {"path": told, "images": len(source), "fingerprint": source.fingerprint}
    if isinstance(source, Mixture):
        facts["sources"] = [
            {"path": each.name, "weight": each.weight, "images": len(part), "fingerprint": part.fingerprint}
            for each, part in zip(sources, source.parts, strict=True)
        ]
    return facts


def described_data(facts: Mapping[str, Any]) -> Data:
    """What run.json says of the images, as `open_images` takes it."""
    if "sources" not in facts:
        return str(facts["path"])
    return [_written(Weighted(each["path"], each["weight"])) for each in facts["sources"]]


def _written(source: Weighted) -> str:
    return source.name if source.weight is None else f"{source.name}@{source.weight!r}"


def _weighted(text: str) -> Weighted:
    """A file or folder whose own name looks like a weight is that file or folder."""
    found = _WEIGHTED.fullmatch(text)
    if found is None or os.path.exists(text):
        return Weighted(text)
    weight = float(found["weight"])
    if not (0 < weight < math.inf):
        raise CapiError(f"{text} has a weight of {weight:g}: expected more than 0, or leave the source out")
    return Weighted(found["source"], weight)


def _open_one(data: str, console: Console | None, index_beside: bool) -> ImageSource:
    if data == "demo":
        return demo_photos("train").images
    if data.startswith(SCHEME):
        return open_hub(data)
    if is_csv(data) and os.path.isfile(csv_place(data)[0]):
        return csv_images(data)
    named = None if os.path.exists(data) else _COLUMN.fullmatch(data)
    path, column = (named["path"], named["column"]) if named else (data, None)
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
    if len(kinds) > 1 or not kinds <= {".tar", *TABLES}:
        raise CapiError(
            f"{data} leads to files that end in {', '.join(sorted(kinds))}: expected .tar, .parquet or .arrow"
        )
    if kinds == {".tar"}:
        if column is not None:
            raise CapiError(f"{data} has shards, which have no columns: leave ?column={column} out")
        return open_shards([Path(file) for file in files], console, index_beside=index_beside)
    return (open_parquet_files if kinds == {".parquet"} else open_arrow)(files, column)


def _files(path: str) -> list[str] | None:
    """The shards or tables that a path or pattern stands for; None where it is no such thing."""
    if os.path.isdir(path):
        return _files_of_folder(Path(path))
    if path.lower().endswith((".tar", *TABLES, *_COMPRESSED)) or (not os.path.exists(path) and glob.has_magic(path)):
        return [path] if os.path.exists(path) else list(_expanded(path))
    return None


def _files_of_folder(folder: Path) -> list[str] | None:
    """A folder with images is a folder of images, whatever lies beside them."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        if "train" not in splits:
            raise CapiError(f"{folder} has no split train (it has {', '.join(splits)}): name the folder of a split")
        folder = folder / "train"
    files: dict[str, list[str]] = {".tar": [], **{ending: [] for ending in TABLES}}
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
        found = sorted(glob.glob(name, recursive=True))
        if not found:
            raise CapiError(
                f"no file matches {name}: check the pattern, and quote it so that the shell leaves it alone"
            )
        yield from found


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
