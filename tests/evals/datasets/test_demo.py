from pathlib import Path

import pytest

from capi.data.sources import EncodedImages, LabeledPhotos
from capi.errors import CapiError
from capi.evals.datasets.demo import load
from capi.evals.tasks import DataOptions


@pytest.fixture(autouse=True)
def _photos(monkeypatch: pytest.MonkeyPatch) -> None:
    def photos(split: str) -> LabeledPhotos:
        return LabeledPhotos(
            EncodedImages([f"{split}/1", f"{split}/2"], [b"one", b"two"]), [2, 0], ["ant", "bee", "cat"]
        )

    monkeypatch.setattr("capi.evals.datasets.demo.demo_photos", photos)


def test__the_built_in_photos_come_with_their_categories() -> None:
    data = load(Path(), DataOptions())
    assert data.classes == ("ant", "bee", "cat")
    assert data.train.labels.tolist() == [2, 0]
    assert data.train.images.name(0) == "train/1"
    assert data.tests["test"].answers.tolist() == [[2], [0]]
    assert data.tests["test"].images.read(1) == b"two"


def test__other_splits_are_named() -> None:
    data = load(Path(), DataOptions(train="val", tests=("test", "train")))
    assert data.train.images.name(0) == "val/1"
    assert list(data.tests) == ["test", "train"]
    with pytest.raises(CapiError, match=r'no split "valid"; did you mean "val"\? \(train, val, test\)'):
        load(Path(), DataOptions(train="valid"))
    with pytest.raises(CapiError, match="both trained and tested on"):
        load(Path(), DataOptions(train="test"))
