import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from torch import Tensor

import capi
from capi.data.sources import Files, image_folder
from capi.errors import CapiError
from capi.evals import tiles
from capi.evals.feature_files import read_features
from capi.evals.features import Encoding
from capi.evals.tiles import Tiling, spans, stitch, tiling_of
from capi.models.features import CapiEncoder
from capi.runtime.atomic import Output
from capi.types import Features
from tests.data.pictures import noise, photo


class Places:
    """An encoder whose patches say where in their own image they lie, and what the mean of their pixels is."""

    width, patch_size = 3, 4

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
        means = torch.nn.functional.avg_pool2d(images, 4).mean(1)
        rows, columns = (torch.arange(side) for side in means.shape[1:])
        grid = torch.meshgrid(rows, columns, indexing="ij")
        places = [each.expand_as(means).float() for each in grid]
        return Features(None, torch.zeros(len(images), 0, 3), torch.stack([*places, means], -1))


def folder_of(tmp_path: Path, **images: np.ndarray) -> Files:
    for name, pixels in images.items():
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    return image_folder(tmp_path)


def stitched(
    encoder: object, source: Files, out: Path, tiling: Tiling, *, overwrite: bool = False, **settings: object
) -> Tensor:
    stitch(
        encoder, source, 0, Output(out, overwrite), tiling=tiling, encoding=Encoding(batch_size=2), about={}, **settings
    )
    return read_features(out).array("patch")[0]


def test__tiles_without_overlap_are_the_features_of_each_tile_by_itself(tmp_path: Path, model: CapiEncoder) -> None:
    image = photo(48, 64)
    whole = folder_of(tmp_path / "large" if (tmp_path / "large").mkdir() is None else tmp_path, scene=image)
    cut = tmp_path / "cut"
    cut.mkdir()
    for row in range(3):
        for column in range(4):
            part = image[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            Image.fromarray(part).save(cut / f"{row}_{column}.png")
    done = capi.extract(model, cut, out=tmp_path / "cut.safetensors", kinds="patch", image_size=16, whole=True)
    parts = read_features(done.path)
    side = 16 // model.patch_size
    separate = parts.array("patch").view(3, 4, side, side, -1).permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1, 2)
    together = stitched(model, whole, tmp_path / "map.safetensors", Tiling(side, 0))
    torch.testing.assert_close(together, separate, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("length", "side", "overlap"), [(40, 8, 2), (41, 8, 3), (8, 8, 2), (5, 8, 2), (9, 8, 7)])
def test__every_patch_comes_from_the_tile_in_which_it_lies_deepest(length: int, side: int, overlap: int) -> None:
    parts = spans(length, Tiling(side, overlap))
    side = min(side, length)
    owner = [part for part in parts for _ in range(part.first, part.last)]
    assert len(owner) == length
    for patch, own in enumerate(owner):
        # How far a patch lies from the edge of a tile; an edge of the image is none.
        depths = [
            min(
                patch - each.start if each.start else length,
                each.start + side - 1 - patch if each.start + side < length else length,
            )
            for each in parts
            if each.start <= patch < each.start + side
        ]
        mine = min(
            patch - own.start if own.start else length,
            own.start + side - 1 - patch if own.start + side < length else length,
        )
        assert mine >= max(depths) - 1
        assert own.start <= patch < own.start + side


def test__a_map_covers_the_image_in_its_order_up_to_less_than_a_patch(tmp_path: Path) -> None:
    image = noise(43, 70, 3)
    feature_map = stitched(Places(), folder_of(tmp_path, scene=image), tmp_path / "m.safetensors", Tiling(4, 1))
    assert feature_map.shape == (10, 17, 3)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = ((torch.from_numpy(image) / 255 - mean) / std).mean(-1)[:40, :68]
    torch.testing.assert_close(feature_map[..., 2], pixels.view(10, 4, 17, 4).mean((1, 3)), atol=1e-5, rtol=1e-4)
    # Rows and columns within their tiles: no patch is taken from the edge of a tile that another one has inside.
    assert feature_map[5, :, 1].max() <= 3


def test__an_interrupted_map_resumes_and_other_settings_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of(tmp_path, scene=noise(64, 48, 3))
    expected = stitched(Places(), source, tmp_path / "whole.safetensors", Tiling(4, 1))
    rows = []
    real = tiles.image_crop

    def failing(*arguments: object) -> object:
        rows.append(arguments[2])
        if len(rows) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(tiles, "image_crop", failing)
    out = tmp_path / "again.safetensors"
    with pytest.raises(KeyboardInterrupt):
        stitched(Places(), source, out, Tiling(4, 1))
    assert not out.exists()
    with pytest.raises(CapiError, match="its overlap is 4, not 8"):
        stitched(Places(), source, out, Tiling(4, 2))
    first = len(rows)
    assert torch.equal(stitched(Places(), source, out, Tiling(4, 1)), expected)
    # The two rows of tiles that were complete are not read again.
    assert len(rows) - first == len(spans(16, Tiling(4, 1))) - 2
    assert not out.with_name(".again.safetensors.partial").exists()
    with pytest.raises(CapiError, match="is there already, and its tile is 16, not 20"):
        stitched(Places(), source, out, Tiling(5, 1))
    assert stitched(Places(), source, out, Tiling(5, 1), overwrite=True).shape == expected.shape


def test__tiles_are_whole_patches_and_overlap_by_an_eighth(caplog: pytest.LogCaptureFixture) -> None:
    assert tiling_of(Places(), 64, None) == Tiling(16, 2)
    assert tiling_of(Places(), 64, 0) == Tiling(16, 0)
    assert not caplog.records
    assert tiling_of(Places(), 63, 5) == Tiling(16, 2)
    assert "tiles of 64 pixels that overlap by 8" in caplog.text
    with pytest.raises(CapiError, match="does not fit tiles of 64"):
        tiling_of(Places(), 64, 64)


def test__what_does_not_fit_is_reported_in_a_sentence(tmp_path: Path) -> None:
    small = folder_of(tmp_path, scene=noise(3, 90, 3))
    with pytest.raises(CapiError, match="less than a patch"):
        stitched(Places(), small, tmp_path / "a.safetensors", Tiling(4, 1))
    (tmp_path / "scene.png").write_bytes(b"nothing")
    with pytest.raises(CapiError, match="cannot be read"):
        stitched(Places(), small, tmp_path / "a.safetensors", Tiling(4, 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scene.png"]


MEASURED = """
import sys, torch, capi
from capi.types import Features

class Means:
    width, patch_size = 3, 32
    def __call__(self, images, *, pooled=True):
        means = torch.nn.functional.avg_pool2d(images, 32)
        return Features(None, torch.zeros(len(images), 0, 3), means.permute(0, 2, 3, 1))

print(capi.extract_tiles(Means(), sys.argv[1], out=sys.argv[2], tile=512)[0].grid)
"""


def peak_of_extraction(image: Path, out: Path) -> tuple[float, str]:
    """Megabytes of a process that extracts the map of an image, and what it printed."""
    started = subprocess.Popen([sys.executable, "-c", MEASURED, image, out], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    with started.stdout as output:
        printed = output.read()
    _, status, usage = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss / 1024, printed.strip()


@pytest.mark.thorough
def test__memory_does_not_grow_with_the_image_where_it_is_read_in_parts(tmp_path: Path) -> None:
    tile = noise(64, 64, 3, dtype=np.uint16).repeat(8, 0).repeat(8, 1)
    for name, side in (("small", 1024), ("large", 10_240)):
        tifffile.imwrite(
            tmp_path / f"{name}.tif",
            (tile for _ in range((side // 512) ** 2)),
            shape=(side, side, 3),
            dtype=np.uint16,
            tile=(512, 512),
            photometric="rgb",
            compression="zlib",
        )
    (small, grid), (large, large_grid) = (
        peak_of_extraction(tmp_path / f"{name}.tif", tmp_path / name) for name in ("small", "large")
    )
    assert (grid, large_grid) == ("(32, 32)", "(320, 320)")
    # The pixels of the large one are 1.26 GB as floats; a row of tiles is 63 MB, and is copied a few times.
    assert large - small < 400, (large, small)
    assert (tmp_path / "large" / "large.tif.pca.png").stat().st_size > 0
