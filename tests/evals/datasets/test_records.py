import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capi.errors import CapiError
from capi.evals.datasets import DATASETS, load_classification
from capi.evals.datasets.records import BINARIES, Name
from capi.evals.tasks import DataOptions
from tests.evals.datasets.layouts import build_binary, planes

FEW = DataOptions(verify_counts=False)
NAMES: list[Name] = ["cifar10", "cifar100", "stl10"]


@pytest.mark.parametrize("name", NAMES)
def test__pixels_and_labels_are_those_of_the_records(tmp_path: Path, name: Name) -> None:
    build_binary(tmp_path, name)
    binary = BINARIES[name]
    for root in (tmp_path, tmp_path / binary.folder):
        data = load_classification(name, root, FEW)
        kinds = [*range(binary.classes)] * 3
        assert data.classes == tuple(f"class {kind}" for kind in range(binary.classes))
        assert data.train.labels.tolist() == kinds * len(binary.train)
        assert data.tests["test"].answers[:, 0].tolist() == kinds
        for index in (0, 1, len(data.train.images) - 1):
            number = index % len(kinds)
            with Image.open(io.BytesIO(data.train.images.read(index))) as image:
                expected = planes(kinds[number], number, binary.layout.side).transpose(1, 2, 0)
                assert np.array_equal(np.asarray(image), expected)
                assert image.getpixel((1, 0)) == (1, 2, 3)


def test__images_have_names_of_their_own_and_a_fingerprint_of_their_contents(tmp_path: Path) -> None:
    build_binary(tmp_path, "cifar10")
    images = load_classification("cifar10", tmp_path, FEW).train.images
    names = [images.name(index) for index in range(len(images))]
    assert len(set(names)) == len(names) == 150
    assert names[30] == "data_batch_2/00000"
    before = images.fingerprint
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_5.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert load_classification("cifar10", tmp_path, FEW).train.images.fingerprint != before
    copy = pickle.loads(pickle.dumps(images))  # noqa: S301 - as for a worker
    assert copy.read(149) == images.read(149)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test__pickles_are_not_read(tmp_path: Path, name: Name) -> None:
    binary = BINARIES[name]
    folder = tmp_path / str(binary.pickled)
    folder.mkdir()
    for file in ("test", "test_batch", "train", "meta"):
        # Opening it would be noticed: there is no such module.
        (folder / file).write_bytes(b"cnowhere\nnothing\n.")
    for root in (tmp_path, folder):
        with pytest.raises(CapiError, match=f"pickles.*get the binary version, {binary.folder}"):
            load_classification(name, root, FEW)


@pytest.mark.parametrize("name", NAMES)
def test__class_folders_are_read_too(tmp_path: Path, name: Name) -> None:
    for split in ("train", "test"):
        for kind in range(BINARIES[name].classes):
            (tmp_path / split / f"{kind:03d}").mkdir(parents=True)
            Image.new("RGB", (4, 4), (kind, 0, 0)).save(tmp_path / split / f"{kind:03d}" / "0.png")
    data = load_classification(name, tmp_path, FEW)
    assert data.train.labels.tolist() == list(range(BINARIES[name].classes))
    assert f"{BINARIES[name].classes} training images" in data.notes[0]
    with pytest.raises(CapiError, match=r"training images, but the official data set has"):
        load_classification(name, tmp_path, DataOptions())


@pytest.mark.parametrize("name", NAMES)
def test__damaged_files_are_reported(tmp_path: Path, name: Name) -> None:
    build_binary(tmp_path, name)
    binary = BINARIES[name]
    folder = tmp_path / binary.folder
    path = folder / binary.train[0]
    whole = path.read_bytes()
    for content in (b"", whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(CapiError, match="no whole records"):
            load_classification(name, tmp_path, FEW)
    path.write_bytes(whole)
    labels = folder / binary.labels[0] if binary.labels else path
    content = bytearray(labels.read_bytes())
    content[binary.layout.label_at] = 255
    labels.write_bytes(content)
    with pytest.raises(CapiError, match=r"one of 10+ classes"):
        load_classification(name, tmp_path, FEW)
    labels.write_bytes(whole if labels == path else content.replace(b"\xff", b"\x01"))
    (folder / binary.names).write_text("one\ntwo\n")
    with pytest.raises(CapiError, match="has 2 classes, expected 10"):
        load_classification(name, tmp_path, FEW)


@pytest.mark.parametrize("name", NAMES)
def test__an_empty_folder_names_the_layout(tmp_path: Path, name: Name) -> None:
    with pytest.raises(CapiError, match=f"capi datasets show {name}"):
        load_classification(name, tmp_path, FEW)
    assert BINARIES[name].folder in DATASETS[name].layout
