"""Images of microscopes and satellites, by commands: many channels, pages, stacks, 12 bits in files of 16."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.cli.conftest import RunHere
from tests.data.pictures import Pixels, photo

SMALL = ["model.depth=1", "model.width=32", "model.heads=2", "clustering.prototypes=16", "optimization.batch_size=4"]
SHORT = [*SMALL, "optimization.steps=2", "run.log_steps=1", "run.loggers=[]", "run.report=false"]
MANY = ["model.channels=5", "data.mean=auto", "data.std=auto"]
AUTO = "data.mean=auto data.std=auto"
STACKS: dict[str, dict[str, Any]] = {
    "axes": {"metadata": {"axes": "CYX"}},
    "imagej": {"imagej": True, "metadata": {"axes": "CYX"}},
    "ome": {"ome": True, "metadata": {"axes": "CYX"}},
    "plain": {"photometric": "minisblack"},
}


def many_channels(seed: int, height: int = 40, width: int = 36) -> Pixels:
    """Five channels (5, height, width) of which each has a brightness of its own."""
    parts = [photo(height, width, seed + 10 * number)[:, :, 0].astype(np.uint16) for number in range(5)]
    return np.stack([part * 40 + 12_000 * number for number, part in enumerate(parts)]).astype(np.uint16)


def dim(seed: int, height: int = 64, width: int = 64) -> Pixels:
    """A camera of 12 bits that sees little light: a mean of about 0.007 in units of 16 bits."""
    return (photo(height, width, seed)[:, :, 0].astype(np.uint16) * 2 + 200).astype(np.uint16)


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """12 bits in files of 16, some as PNG and some as TIFF."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    for number in range(8):
        if number % 2:
            Image.fromarray(dim(number)).save(tmp_path / "deep" / f"{number}.png")
        else:
            tifffile.imwrite(tmp_path / "deep" / f"{number}.tif", dim(number))
    return tmp_path / "deep"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for number in range(8):
        Image.fromarray(photo(64, 64, number)).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


def rows(stdout: str) -> dict[str, str]:
    """Values by name, those over several lines joined."""
    joined = re.sub(r"\n {12}", " ", stdout)
    return {line[:12].strip(): line[12:] for line in joined.splitlines()}


@pytest.mark.parametrize("kind", STACKS)
def test__pages_are_channels_for_every_command(tmp_path: Path, run_here: RunHere, kind: str) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(5):
        tifffile.imwrite(images / f"{number}.tif", many_channels(number), **STACKS[kind])
    ran = run_here("data", "check", images, "--channels", "5", "--workers", "1", "--json", tmp_path / "found.json")
    report = json.loads((tmp_path / "found.json").read_text())
    expected = np.mean([many_channels(number).mean((1, 2)) / 65535 for number in range(5)], axis=0)
    assert (report["readable"], len(report["mean"])) == (5, 5)
    np.testing.assert_allclose(report["mean"], expected, atol=0.02)
    assert "5 can be read, 0 cannot" in ran.stdout
    ran = run_here("pretrain", "tiny4", *SHORT, *MANY, "--data", images, "--out", tmp_path / "run", "--device", "cpu")
    assert ran.code == 0, ran
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    np.testing.assert_allclose(record["data"]["statistics"]["mean"], expected, atol=0.02)


def test__other_channels_than_the_models_are_named_with_the_setting(tmp_path: Path, run_here: RunHere) -> None:
    for folder, options in (("pages", STACKS["axes"]), ("samples", {"planarconfig": "contig"})):
        images = tmp_path / folder
        images.mkdir()
        for number in range(4):
            values = many_channels(number)
            stored = values if folder == "pages" else np.moveaxis(values, 0, 2)
            tifffile.imwrite(images / f"{number}.tif", stored, photometric="minisblack", **options)
        ran = run_here("data", "check", images, "--workers", "1")
        assert "4; 4 can be read, 0 cannot" in ran.stdout
        assert "set model.channels=5" in rows(ran.stdout)["channels"]
        ran = run_here("data", "check", images, "--workers", "1", "--channels", "3")
        assert "4; 0 can be read, 4 cannot" in ran.stdout
        assert "(5 channels in place of 3)" in rows(ran.stdout)["broken"]
        assert "use model.channels=5 (capi data check: --channels 5)" in rows(ran.stdout)["others"]
        for command in (["--check"], ["--out", tmp_path / "run"]):
            ran = run_here("pretrain", "tiny4", *SMALL, "--data", images, *command)
            assert (ran.code, ran.stdout) == (2, "")
            assert "5 channels in place of 3: use model.channels=5" in ran.stderr
        ran = run_here("plan", "--suggest", images)
        assert ran.code == 0, ran
        assert "model.channels=5 data.mean=auto data.std=auto" in ran.stdout


def test__stacks_are_refused_with_what_to_do(tmp_path: Path, run_here: RunHere) -> None:
    for number in range(3):
        stack = np.stack([many_channels(number + plane) for plane in range(4)])
        tifffile.imwrite(tmp_path / f"{number}.tif", stack, ome=True, metadata={"axes": "ZCYX"})
    ran = run_here("data", "check", tmp_path, "--channels", "5", "--workers", "1")
    assert "3; 0 can be read, 3 cannot" in ran.stdout
    assert "a stack with axes ZCYX (4 x 5 x 40 x 36)" in rows(ran.stdout)["broken"]
    assert "choose a plane, and write it to a file of its own with axes CYX" in rows(ran.stdout)["broken"]
    training = ["pretrain", "tiny4", *SMALL, *MANY, "--data", tmp_path]
    for command in ([*training, "--out", tmp_path / "run"], [*training, "--check"], ["plan", "--suggest", tmp_path]):
        ran = run_here(*command)
        assert (ran.code, ran.stdout) == (2, "")
        assert "a stack with axes ZCYX" in ran.stderr
        assert "choose a plane, and write it to a file of its own with axes CYX" in ran.stderr


def test__moving_pictures_are_counted(photos: Path, run_here: RunHere) -> None:
    frames = [Image.fromarray(photo(20, 20, seed)) for seed in range(3)]
    for ending in ("gif", "webp", "png"):
        frames[0].save(photos / f"moving.{ending}", save_all=True, append_images=frames[1:])
    ran = run_here("data", "check", photos, "--workers", "1")
    assert rows(ran.stdout)["frames"] == "3 with several frames, of which the first is read"
    assert rows(ran.stdout)["images"] == "11; 11 can be read, 0 cannot"


def test__a_range_far_from_the_configs_is_reported_by_every_command(
    deep: Path, run_here: RunHere, tmp_path: Path
) -> None:
    ran = run_here("data", "check", deep, "--workers", "1")
    assert AUTO in rows(ran.stdout)["range"]
    # Three digits, of numbers that three places would round to 0.007 and 0.001.
    assert "data.mean=[0.00" in rows(ran.stdout)["mean, std"]
    means = rows(ran.stdout)["mean, std"].split("[")[1].split("]")[0].split(",")
    assert all(len(mean.removeprefix("0.00")) == 3 for mean in means)
    ran = run_here("pretrain", "tiny4", *SMALL, "--check", "--rounds", "1", "--data", deep, "--device", "cpu")
    assert AUTO in ran.stdout
    assert f"{means[0]},{means[0]}" in ran.stdout
    ran = run_here("plan", "--suggest", deep)
    assert AUTO in ran.stdout.splitlines()[-1]
    ran = run_here("pretrain", "tiny4", *SHORT, "--data", deep, "--out", tmp_path / "run", "--device", "cpu")
    assert ran.code == 0
    assert [line for line in ran.stderr.splitlines() if line.startswith("Warning: the images have mean 0.00")]
    assert AUTO in ran.stderr
    ran = run_here("doctor", tmp_path / "run")
    assert "Range of the images: the images have mean 0.00" in ran.stdout
    assert f"Start another run with {AUTO}" in ran.stdout


def test__a_range_that_fits_is_not_spoken_of(deep: Path, photos: Path, run_here: RunHere, tmp_path: Path) -> None:
    ran = run_here("data", "check", photos, "--workers", "1")
    assert "range" not in rows(ran.stdout)
    ran = run_here("plan", "--suggest", photos)
    assert "auto" not in ran.stdout
    for name, images, more in (("a", photos, []), ("b", deep, AUTO.split())):
        given = ["tiny4", *SHORT, *more, "--data", images, "--device", "cpu"]
        assert "auto" not in run_here("pretrain", *given, "--check", "--rounds", "1").stdout
        ran = run_here("pretrain", *given, "--out", tmp_path / name)
        assert ran.code == 0
        assert "Warning" not in ran.stderr
        ran = run_here("doctor", tmp_path / name)
        assert "Range of the images: mean and std are near data.mean and data.std" in ran.stdout


def test__pictures_of_dim_images_have_contrast(deep: Path, run_here: RunHere, tmp_path: Path) -> None:
    ran = run_here("pretrain", "tiny4", *SHORT, "run.snapshots=2", "--data", deep, "--out", tmp_path / "run")
    assert ran.code == 0, ran
    ran = run_here("visualize", tmp_path / "run", deep, "--out", tmp_path / "drawn", "--kind", "pca", "--size", "32")
    assert ran.code == 0, ran
    drawn = sorted((tmp_path / "drawn" / "photos").rglob("*.jpg"))
    snapshots = sorted((tmp_path / "run" / "pictures" / "snapshots").rglob("*.jpg"))
    assert len(drawn) == 8
    assert snapshots
    for path in (*drawn, *snapshots):
        with Image.open(path) as picture:
            dark, bright = picture.convert("L").getextrema()
        assert (dark < 20, bright > 235) == (True, True), path
