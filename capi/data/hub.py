"""Data sets of the Hugging Face Hub: `hf://NAME?split=train[&column=image][&revision=...][&config=...][&streaming=true]`.

Without streaming `datasets` downloads them once and keeps arrow files, which are read row by row. With it only parquet
files will do: their row groups are fetched where they lie when they are wanted, so the order is as exact as ever. NAME
may be a folder here as well (`hf://./folder`).
"""

import os
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from capi.data.tables import TableImages, open_arrow, open_parquet_files, require_pyarrow
from capi.errors import CapiError, nearest

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
