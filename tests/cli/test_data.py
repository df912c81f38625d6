"""shards, data check, and --data several times."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capi import api
from tests.cli.conftest import RunHere, assert_refused


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 255, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


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
    found = json.loads(Path("found.json").read_text())
    assert found["broken"] == {"photos: 5.png": "no image that can be read"}
    assert found["readable"] == 11
    mean = ",".join(f"{value:.3f}" for value in found["mean"])
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
        (["shards", "photos", "--out", "x"], "pack_shards", "Stopped. x has 0 complete shards; the same command goes"),
        (["data", "check", "photos"], "check_data", "Stopped, and nothing was written."),
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
