"""The binary files of CIFAR and STL-10 are training images like any others."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import capi
from capi.data.locations import open_images
from capi.errors import CapiError
from capi.evals.datasets.records import BINARIES, Name
from tests.api.test_demo import SMALL
from tests.evals.datasets.layouts import build_binary, planes


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10"])
def test__the_folder_is_a_source_of_its_training_images(name: Name, tmp_path: Path) -> None:
    build_binary(tmp_path, name)
    binary = BINARIES[name]
    source = open_images(tmp_path / binary.folder)
    assert len(source) == 3 * binary.classes * len(binary.train)
    last = len(source) - 1
    content = source.read(last)
    assert isinstance(content, bytes)
    with Image.open(io.BytesIO(content)) as image:
        expected = planes(binary.classes - 1, 3 * binary.classes - 1, binary.layout.side)
        assert np.array_equal(np.asarray(image), expected.transpose(1, 2, 0))


def test__a_run_trains_on_them(tmp_path: Path) -> None:
    build_binary(tmp_path, "cifar10")
    folder = tmp_path / "cifar-10-batches-bin"
    run = capi.pretrain("tiny4", [*SMALL, "data.workers=0"], data=folder, out=tmp_path / "run", device="cpu")
    assert run.finished


def test__a_missing_or_cut_file_is_reported(tmp_path: Path) -> None:
    build_binary(tmp_path, "cifar10")
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    os.truncate(path, 1000)
    with pytest.raises(CapiError, match=r"data_batch_3\.bin has 1000 bytes, which are no whole records of 3073"):
        open_images(path.parent)
    path.unlink()
    with pytest.raises(CapiError, match=r"data_batch_3\.bin is missing.*unpack the archive again"):
        open_images(path.parent)
