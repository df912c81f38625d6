"""Which images `capi report` opens by itself: those of the run, on this machine, and nothing else."""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import tarfile
from pathlib import Path
from typing import Any

import pytest

import capi
from capi.data.locations import open_images
from tests.cli.conftest import RunHere
from tests.photos import noise_photos

SMALL = [
    *("data.image_size=16", "data.workers=0", "model.width=32", "model.depth=1", "model.heads=1", "model.patch_size=4"),
    *("masking.predict=2", "optimization.batch_size=4", "optimization.steps=2", "clustering.prototypes=16"),
    *("run.loggers=[]", "run.snapshots=0", "run.report=false"),
]
NOT_DRAWN = "The prototypes are not drawn: "


def write_tar(path: Path, photos: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for photo in sorted(photos.iterdir()):
            tar.add(photo, photo.name)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a report, and the photos it was trained on."""
    folder = tmp_path_factory.mktemp("made")
    photos = noise_photos(folder / "photos", size=(20, 20), seed=0)
    capi.pretrain("tiny4", SMALL, data=photos, out=folder / "run", device="cpu")
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run and its photos, private photos with the same names beside them, and no network."""
    folder = tmp_path / "work"
    shutil.copytree(made, folder)
    noise_photos(folder / "private", size=(20, 20), seed=1)
    write_tar(folder / "private.tar", folder / "private")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    set_data(folder, path=str(folder / "photos"))
    return folder


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the network."""
    asked: list[Any] = []

    def refuse(*arguments: object, **_: object) -> None:
        asked.append(arguments)
        raise OSError("there is no network here")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return asked


def set_data(folder: Path, **facts: object) -> None:
    record = json.loads((folder / "run" / "run.json").read_text())
    record["data"] |= facts
    (folder / "run" / "run.json").write_text(json.dumps(record))


def outside(folder: Path) -> dict[Path, bytes]:
    """Every file beside the run."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "run" not in path.parts}


def has_gallery(folder: Path) -> bool:
    return (folder / "run" / "pictures" / "prototypes").exists()


def reported(run_here: RunHere, folder: Path) -> str:
    ran = run_here("report", "run", "--device", "cpu")
    assert ran.code == 0, ran.stderr
    return (folder / "run" / "report.html").read_text(encoding="utf-8")


def test__the_images_of_the_run_are_shown_where_they_still_are(run_here: RunHere, work: Path) -> None:
    before = outside(work)
    assert NOT_DRAWN not in reported(run_here, work)
    assert has_gallery(work)
    assert outside(work) == before


def test__an_index_of_shards_is_not_written_beside_them(run_here: RunHere, work: Path) -> None:
    tar = write_tar(work / "photos.tar", work / "photos")
    shutil.rmtree(work / "run")
    capi.pretrain("tiny4", SMALL, data=tar, out="run", device="cpu")
    (work / "photos.tar.index").unlink()
    before = outside(work)
    assert NOT_DRAWN not in reported(run_here, work)
    assert has_gallery(work)
    assert outside(work) == before


# Of what names a folder of private photos, the names of the files are easily guessed; what they show is not.
HOSTILE: dict[str, dict[str, object]] = {
    "private photos with the same names": {"path": "private"},
    "a link to private photos": {"path": "link"},
    "a list of private photos": {"path": "run/list.csv"},
    "a list of private photos, with their folder": {"path": "run/names.csv?images=private"},
    "private photos in a tar": {"path": "private.tar"},
    "several tars": {"path": "both", "sources": [{"path": "private.tar", "weight": None}] * 2},
    "a pattern": {"path": "*.tar"},
    "nowhere": {"path": "nowhere"},
    "no name": {"path": None},
    "a number as sources": {"sources": 7},
    "a source without a name": {"sources": [{"weight": 1.0}]},
    "the fingerprint of an older version": {"sample": None},
}
FAR: dict[str, dict[str, object]] = {
    "the Hub": {"path": "hf://owner/name?split=train"},
    "a streamed data set": {"path": "hf://owner/name?split=train&streaming=true"},
    "an address": {"path": "https://example.com/photos.parquet"},
    "a bucket": {"path": "s3://bucket/photos.parquet"},
    "a cached address": {"path": "simplecache::https://example.com/photos.parquet"},
    "a server": {"path": "\\\\server\\share\\photos.parquet"},
    "one source of several": {
        "path": "both",
        "sources": [{"path": "photos", "weight": None}, {"path": "hf://owner/name", "weight": None}],
    },
}


@pytest.mark.parametrize("facts", [*HOSTILE.values(), *FAR.values()], ids=[*HOSTILE, *FAR])
def test__other_images_are_neither_shown_nor_fetched_nor_written_beside(
    run_here: RunHere, work: Path, connections: list[Any], facts: dict[str, object]
) -> None:
    (work / "link").symlink_to(work / "private")
    files = [f"../private/{number}.png" for number in range(6)]
    (work / "run" / "list.csv").write_text("\n".join(["file", *files]))
    (work / "run" / "names.csv").write_text("\n".join(["file", *(f"{number}.png" for number in range(6))]))
    set_data(work, **facts)
    if isinstance(facts.get("path"), str) and (work / str(facts["path"]).partition("?")[0]).exists():
        # Whoever wrote the record guessed the names right.
        with contextlib.suppress(capi.CapiError):
            guessed = open_images(str(facts["path"]), index_beside=False)
            set_data(work, fingerprint=guessed.fingerprint, images=len(guessed))
        shutil.rmtree(work.parent / "cache", ignore_errors=True)
    before = outside(work)
    written = reported(run_here, work)
    assert written.count(NOT_DRAWN) == 1
    assert not has_gallery(work)
    assert outside(work) == before
    assert connections == []


def test__photos_that_changed_are_not_shown(run_here: RunHere, work: Path) -> None:
    shutil.rmtree(work / "photos")
    noise_photos(work / "photos", size=(20, 20), seed=2)
    assert f"{NOT_DRAWN}the images that lie where the run found its own are others." in reported(run_here, work)
    assert not has_gallery(work)


def test__special_files_are_not_read(run_here: RunHere, work: Path) -> None:
    """They would never end. The checksum is that of a file without contents."""
    os.mkfifo(work / "pipe")
    nothing = hashlib.sha256(b"0\n").digest()
    for name in ("/dev/zero", "../pipe"):
        (work / "run" / "list.csv").write_text(f"file\n{name}\n")
        guessed = hashlib.sha256(b"1\n" + nothing).hexdigest()
        set_data(work, path="run/list.csv", sample=guessed)
        assert NOT_DRAWN in reported(run_here, work)


@pytest.mark.parametrize("command", [["doctor"], ["export", "--out", "weights.safetensors"]])
def test__no_other_command_looks_for_the_images_of_a_run(
    run_here: RunHere, work: Path, connections: list[Any], command: list[str]
) -> None:
    set_data(work, **FAR["the Hub"])
    before = outside(work)
    assert run_here(command[0], "run", *command[1:]).code in (0, 1)
    (work / "weights.safetensors").unlink(missing_ok=True)
    assert (outside(work), connections) == (before, [])


def test__a_run_on_images_elsewhere_records_no_contents(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them would fetch them."""
    opened = open_images("photos")
    monkeypatch.setattr("capi.train.run.open_images", lambda *_: opened)
    capi.pretrain("tiny4", SMALL, data="hf://owner/name", out="far", device="cpu")
    assert "sample" not in json.loads((work / "far" / "run.json").read_text())["data"]
    assert len(json.loads((work / "run" / "run.json").read_text())["data"]["sample"]) == 64
