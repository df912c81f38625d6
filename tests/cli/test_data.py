"""shards, data check, and --data several times."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capi import api
from capi.data import survey
from tests.cli.conftest import RunHere, assert_refused
from tests.photos import noise_photos


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return noise_photos(tmp_path / "photos", size=(30, 40))


# A machine may have fewer cores than workers.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test__a_folder_is_packed_and_looked_through(photos: Path, run_here: RunHere) -> None:
    ran = run_here("shards", "photos", "--out", "packed", "--per-shard", "4", "--workers", "2")
    assert ran.code == 0
    first, last = ran.stdout.splitlines()
    assert first.startswith("packed has 6 images in 2 shards, 0.1 MB.")
    assert last == "Train on them with --data 'packed/{000000..000001}.tar'"
    (photos / "5.png").write_bytes(b"no image")
    (photos / "4.png").write_bytes((photos / "3.png").read_bytes())
    ran = run_here("data", "check", "packed/{000000..000001}.tar", "photos", "--json", "found.json", "--workers", "1")
    assert ran.code == 0
    rows = {line[:12].strip(): line[12:] for line in ran.stdout.splitlines()}
    assert rows["images"] == "12; 11 can be read, 1 cannot"
    assert "photos: 5.png (no image that can be read)" in rows["broken"]
    assert rows["copies"].startswith("5 with the same bytes as another: ")
    report = json.loads(Path("found.json").read_text())
    assert report["broken"] == {"photos: 5.png": "no image that can be read"}
    assert report["readable"] == 11
    mean = ",".join(f"{value:.3f}" for value in report["mean"])
    assert f"data.mean=[{mean}]" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shards", "nowhere", "--out", "x"], "there is no folder nowhere"),
        (["shards", "photos", "--out", "x", "--per-shard", "0"], "a shard must hold something"),
        (["shards", "photos", "--out", "photos"], "is not empty and holds no shards of ours"),
        (["data", "check", "{0..3}.tar"], "4 of 4 shards are missing"),
        (["data", "check", "photos", "--json", "no/where.json"], "there is no folder"),
        (["pretrain", "tiny4", "--check", "--data", "photos@2"], "has a meaning among several sources only"),
        (["pretrain", "tiny4", "--data", "photos@2", "--data", "photos", "--out", "x"], "photos has no weight"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test__bad_input_is_reported_in_a_sentence(
    photos: Path, run_here: RunHere, arguments: list[str], message: str
) -> None:
    assert_refused(run_here(*arguments), message)
    assert not Path("x").exists()


# A machine may have fewer cores than workers.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test__one_file_that_is_no_image_is_one_file(photos: Path, run_here: RunHere) -> None:
    (photos / "5.png").write_bytes(b"no image")
    ran = run_here("shards", "photos", "--out", "packed", "--workers", "1")
    assert ran.code == 0
    said = ran.stdout.splitlines()[1]
    assert said.startswith("1 file is no image that can be read and was left out, 5.png: ")


@pytest.mark.parametrize(
    ("arguments", "name", "said"),
    [
        (["shards", "photos", "--out", "x"], "pack_shards", "Stopped before a shard was complete"),
        (["data", "check", "photos"], "check_data", "Stopped before an image was looked at."),
    ],
)
def test__an_interruption_says_what_was_done(
    photos: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str, said: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, name, interrupted)
    ran = run_here(*arguments)
    assert (ran.code, ran.stderr) == (130, "")
    assert ran.stdout.startswith(said)


# A machine may have fewer cores than workers.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test__an_interrupted_check_says_what_it_had_found(
    photos: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capi.data.survey._CHUNK", 2)
    given = []

    def interrupted(self: survey.TaskProgress, count: int = 1) -> None:
        given.append(count)
        if len(given) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(survey.TaskProgress, "advance", interrupted)
    (photos / "1.png").write_bytes(b"no image")
    ran = run_here("data", "check", "photos", "--workers", "1")
    assert ran.code == 130
    first, *rows = ran.stdout.splitlines()
    assert first.startswith("Stopped after 4 of 6 images.")
    assert "6, of which 4 were looked at; 3 can be read, 1 cannot" in rows[0]
    assert "1.png" in rows[1]


# A machine may have fewer cores than workers.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test__masks_beside_photos_are_reported_by_every_command_that_looks_at_images(
    photos: Path, run_here: RunHere, tmp_path: Path
) -> None:
    scenes = tmp_path / "scenes"
    scenes.mkdir()
    photos.rename(scenes / "images")
    (scenes / "masks").mkdir()
    for number in range(6):
        Image.fromarray(np.zeros((30, 40), dtype=np.uint8)).save(scenes / "masks" / f"{number}.png")
    warning = "6 of 12 files look like masks: give --data scenes/images"
    small = ("model.width=32", "model.depth=1", "model.heads=2", "optimization.batch_size=4", "optimization.steps=1")
    for command in (
        ("data", "check", "scenes", "--workers", "1"),
        ("plan", "--suggest", "scenes", "--gpu", "l4"),
        ("pretrain", "tiny4", *small, "run.report=false", "--data", "scenes", "--out", "x", "--device", "cpu"),
    ):
        ran = run_here(*command)
        assert ran.code == 0, ran.stderr
        assert warning in " ".join((ran.stdout + ran.stderr).split()), command
