"""What runs leave to be seen, by whole runs in small."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import capi
from capi.config.files import parse_config
from capi.config.schema import Config
from capi.report import run_report
from capi.report.snapshots import snapshot_steps
from tests.photos import noise_photos
from tests.variants import varied

CPU = torch.device("cpu")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return noise_photos(tmp_path / "images", 8)


def changed(config: Config, **run: Any) -> Config:
    tree = config.model_dump(mode="json")
    tree["optimization"] |= {"steps": 6}
    tree["data"] |= {"workers": 0}
    tree["run"] |= {"log_steps": 2, "loggers": [], **run}
    return parse_config(tree)


def test__a_run_ends_with_snapshots_a_gallery_and_a_report(small_config: Config, images: Path, tmp_path: Path) -> None:
    done = capi.pretrain(changed(small_config, snapshots=3), data=images, out=tmp_path / "run", device="cpu")
    assert done.report == tmp_path / "run" / "report.html"
    assert done.report.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert snapshot_steps(done.path / "pictures" / "snapshots") == [0, 2, 4, 6]
    assert (done.path / "pictures" / "prototypes" / "index.json").exists()


@pytest.mark.parametrize("kind", ["ema_head", "pixels"])
def test__a_run_without_clustering_ends_without_a_gallery_and_without_a_warning(
    small_config: Config, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    config = varied(changed(small_config, snapshots=0), f"target.kind={kind}")
    with caplog.at_level(logging.WARNING, logger="capi"):
        done = capi.pretrain(config, data=images, out=tmp_path / "run", device="cpu")
    assert "prototypes" not in caplog.text
    assert not (done.path / "pictures" / "prototypes").exists()
    assert f"Nothing is clustered in this run (target.kind={kind})" in done.report.read_text(encoding="utf-8")


def test__both_can_be_turned_off(small_config: Config, images: Path, tmp_path: Path) -> None:
    config = changed(small_config, snapshots=0, report=False)
    done = capi.pretrain(config, data=images, out=tmp_path / "run", device="cpu")
    assert done.report is None
    assert not (done.path / "report.html").exists()
    assert not (done.path / "pictures" / "snapshots").exists()


def test__seeing_changes_nothing_of_what_is_computed(small_config: Config, images: Path, tmp_path: Path) -> None:
    with_pictures, without = changed(small_config, snapshots=3), changed(small_config, snapshots=0, report=False)
    encoders = []
    for name, config in (("with", with_pictures), ("without", without)):
        encoders.append(capi.load(capi.pretrain(config, data=images, out=tmp_path / name, device="cpu").path))
    for first, second in zip(*(encoder.parameters() for encoder in encoders), strict=True):
        assert torch.equal(first, second)


def test__a_report_that_cannot_be_written_is_reported_and_the_run_stands(
    small_config: Config,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_run: Path) -> None:
        raise OSError("no room")

    monkeypatch.setattr(run_report, "write_report", fail)
    with caplog.at_level(logging.WARNING, logger="capi"):
        done = capi.pretrain(changed(small_config), data=images, out=tmp_path / "run", device="cpu")
    assert (done.finished, done.report) == (True, None)
    assert "the report could not be written (no room)" in caplog.text


def test__a_report_that_is_written_again_draws_a_missing_gallery_where_the_images_are(
    small_config: Config, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = changed(small_config, report=False)
    done = capi.pretrain(config, data=images, out=tmp_path / "run", device="cpu")
    gallery = done.path / "pictures" / "prototypes" / "index.json"
    assert run_report.report(done.path, device=CPU) == done.path / "report.html"
    assert gallery.exists()
    shutil.rmtree(gallery.parent)
    shutil.rmtree(images)
    with caplog.at_level(logging.WARNING, logger="capi"):
        assert capi.report(done.path, tmp_path / "elsewhere.html", device="cpu") == tmp_path / "elsewhere.html"
    assert "prototypes and nearest images could not be drawn" in caplog.text
    assert not gallery.exists()


def test__a_folder_that_is_no_run_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(capi.CapiError, match="no run"):
        capi.report(tmp_path, device="cpu")
