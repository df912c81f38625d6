from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import capi
from capi.api.arguments import choose_device


def test__a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu").type == "cpu"
    for name in ("cuda:99", "toaster"):
        with pytest.raises(capi.CapiError, match="is not there"):
            choose_device(name)


@pytest.mark.parametrize("given", [str, Path, lambda path: [path]])
def test__a_single_name_is_a_list_of_one(class_folders: Path, tmp_path: Path, given: Callable[[Path], Any]) -> None:
    options = [f"data={class_folders}", "image_size=8", "neighbours=[1]"]
    capi.evaluate("pixels:4", "folder/knn", options, out=tmp_path / "out", device="cpu")
    probe, images = tmp_path / "out" / "probe.safetensors", given(class_folders / "val")
    done = capi.predict("pixels:4", probe, images, out=tmp_path / "p", device="cpu")
    assert done.images == 6
    compared = capi.compare("pixels:4", "folder/knn", options, out=tmp_path / "cmp", device="cpu")
    assert (compared.models, len(compared.columns), compared.failed) == (("pixels:4",), 1, [])
