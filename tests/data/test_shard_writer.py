import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

import capi
from capi.data import shard_writer
from capi.data.locations import open_images
from capi.data.shard_writer import Packed, PackingSettings, pack
from capi.data.shards import Shards
from capi.data.sources import EncodedImages, Files, image_folder
from capi.errors import CapiError
from tests.data.pictures import encoded, noise
from tests.data.shard_files import plain, with_webdataset

COUNT = 30


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders, with names that a tar of webdataset could not have. Not to be changed."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(COUNT):
        folder = root / ("cat" if number % 3 else "dog")
        folder.mkdir(exist_ok=True)
        (folder / f"photo {number:02d}.v1.png").write_bytes(encoded(noise(6, number + 4, 3, seed=number), "PNG"))
    return root


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.tar"))}


def contents(source: Shards | Files) -> list[bytes]:
    read = [source.read(number) for number in range(len(source))]
    return [content.read_bytes() if isinstance(content, Path) else content for content in read]


def test__the_shards_hold_all_images_with_names_and_labels_and_webdataset_reads_them(
    photos: Path, tmp_path: Path
) -> None:
    packed = capi.pack_shards(photos, tmp_path / "out", per_shard=8)
    assert (packed.shards, packed.images, packed.reused, packed.left_out) == (4, COUNT, 0, {})
    assert packed.pattern == str(tmp_path / "out" / "{000000..000003}.tar")
    source = image_folder(photos)
    wanted = {source.name(number): content for number, content in enumerate(contents(source))}
    theirs = with_webdataset(packed.pattern)
    packed_images = {json.loads(sample["json"])["name"]: sample["png"] for sample in theirs}
    assert packed_images == wanted
    manifest = json.loads((tmp_path / "out" / "shards.json").read_text())
    assert manifest["classes"] == ["cat", "dog"]
    for sample in theirs:
        about = json.loads(sample["json"])
        assert about["label"] == about["name"].split("/")[0] == manifest["classes"][int(sample["cls"])]
    assert len({sample["__key__"] for sample in theirs}) == COUNT
    ours = open_images(packed.pattern)
    assert isinstance(ours, Shards)
    assert contents(ours) == [sample["png"] for sample in theirs]


def test__the_manifest_is_true_and_the_index_needs_no_scan(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = capi.pack_shards(photos, tmp_path, per_shard=8)
    manifest = json.loads((tmp_path / "shards.json").read_text())
    assert {entry["file"]: entry["sha256"] for entry in manifest["shards"]} == digests(tmp_path)
    assert [entry["images"] for entry in manifest["shards"]] == [8, 8, 8, 6]
    sizes = [(tmp_path / entry["file"]).stat().st_size for entry in manifest["shards"]]
    assert sizes == [entry["bytes"] for entry in manifest["shards"]]
    assert manifest["bytes"] == packed.bytes == sum(sizes)

    def fail(*_: object) -> None:
        raise AssertionError("the headers were scanned")

    monkeypatch.setattr("capi.data.shards.make_index", fail)
    assert len(open_images(tmp_path)) == COUNT


def test__the_bytes_do_not_depend_on_workers_and_the_order_on_the_seed(photos: Path, tmp_path: Path) -> None:
    ways: dict[str, dict[str, object]] = {
        "one": {"workers": 1},
        "four": {"workers": 4},
        "seed": {"shuffle": 1},
        "ordered": {"shuffle": None},
    }
    for name, options in ways.items():
        capi.pack_shards(photos, tmp_path / name, per_shard=7, **options)  # type: ignore[arg-type]
    made = {name: digests(tmp_path / name) for name in ways}
    assert made["one"] == made["four"]
    assert len({str(each) for each in made.values()}) == 3
    ordered = open_images(tmp_path / "ordered")
    assert isinstance(ordered, Shards)
    assert contents(ordered) == contents(image_folder(photos))
    shuffled = open_images(tmp_path / "one")
    assert isinstance(shuffled, Shards)
    assert sorted(contents(shuffled)) == sorted(contents(ordered))
    assert contents(shuffled) != contents(ordered)


def test__a_size_bounds_the_shards(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(1000, 60_000, 50)
    source = EncodedImages(
        [f"{number}.png" for number in range(50)], [b"\xff\xd8\xff" + b"x" * (size - 3) for size in sizes.tolist()]
    )
    packed = pack(source, tmp_path, PackingSettings(shard_megabytes=0.2))
    file_sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.tar"))]
    assert len(file_sizes) == packed.shards == -(-(sizes.sum() + 50 * shard_writer._OVERHEAD) // 200_000)
    assert max(file_sizes) < 200_000 + 60_000 + tarfile.RECORDSIZE
    assert packed.images == 50


def test__the_same_command_keeps_what_is_complete_and_mends_the_rest(photos: Path, tmp_path: Path) -> None:
    capi.pack_shards(photos, tmp_path, per_shard=8)
    expected, written_at = digests(tmp_path), (tmp_path / "000001.tar").stat().st_mtime_ns
    (tmp_path / "000000.tar").unlink()
    with (tmp_path / "000002.tar").open("r+b") as file:
        file.truncate(5000)
    (tmp_path / "000003.tar.index").unlink()
    (tmp_path / ".000000.tar.0123456789abcdef.partial").write_bytes(b"half")
    again = capi.pack_shards(photos, tmp_path, per_shard=8)
    assert (again.reused, again.images) == (1, COUNT)
    assert digests(tmp_path) == expected
    assert (tmp_path / "000001.tar").stat().st_mtime_ns == written_at
    assert not list(tmp_path.glob(".*"))


def test__other_settings_or_images_in_the_same_folder_are_refused(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    capi.pack_shards(photos, out, per_shard=8)
    before = digests(out)
    with pytest.raises(CapiError, match=r"of something else \(shards was 4, is 3; per_shard was 8, is 10\)"):
        capi.pack_shards(photos, out, per_shard=10)
    with pytest.raises(CapiError, match="shuffle was 0, is 5"):
        capi.pack_shards(photos, out, per_shard=8, shuffle=5)
    with pytest.raises(CapiError, match=r"source was .*; images was 30, is 10"):
        capi.pack_shards(photos / "dog", out, per_shard=8)
    assert digests(out) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(CapiError, match="is not empty and holds no shards of ours"):
        capi.pack_shards(photos, tmp_path / "mine")
    with pytest.raises(CapiError, match="cannot be a folder for shards"):
        capi.pack_shards(photos, tmp_path / "mine" / "notes.txt")
    for options in ({"per_shard": 3, "shard_megabytes": 1.0}, {"per_shard": 0}, {"shard_megabytes": -1.0}):
        with pytest.raises(CapiError, match="`shard_megabytes`"):
            capi.pack_shards(photos, tmp_path / "new", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test__images_that_cannot_be_read_are_left_out_and_counted_also_when_it_continues(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(plain(1))
    source = Files(tmp_path / "in", ["a.png", "gone.png", "also gone.png"])
    for reused in (0, 3):
        packed = pack(source, tmp_path / "out", PackingSettings(per_shard=1))
        assert (packed.images, packed.reused) == (1, reused)
        assert set(packed.left_out) == {"gone.png", "also gone.png"}
        assert "No such file" in packed.left_out["gone.png"]
    assert len(open_images(tmp_path / "out")) == 1
    with pytest.raises(CapiError, match="1 image tried, and none could be read"):
        pack(Files(tmp_path / "in", ["gone.png"]), tmp_path / "none", PackingSettings(per_shard=1))


def test__files_that_are_no_images_are_named_and_left_out(tmp_path: Path) -> None:
    for kind in ("png", "jpg", "webp", "tif", "bmp", "gif", "ppm"):
        Image.new("RGB", (8, 8), "red").save(tmp_path / f"photo.{kind}")
    (tmp_path / "page.jpg").write_bytes(b"<html>not found</html>")
    (tmp_path / "empty.png").touch()
    packed = pack(image_folder(tmp_path), tmp_path / "out", PackingSettings(per_shard=100))
    assert packed.images == 7
    assert set(packed.left_out) == {"page.jpg", "empty.png"}
    assert "it is no image (it begins with b'<html>not fo')" in packed.left_out["page.jpg"]


def test__tables_and_shards_can_be_packed_too(tmp_path: Path, photos: Path) -> None:
    rows = [encoded(noise(5, 5, 3, seed=number), "JPEG" if number % 2 else "PNG") for number in range(6)]
    pyarrow.parquet.write_table(pyarrow.table({"image": rows}), tmp_path / "a.parquet", row_group_size=2)
    packed = capi.pack_shards(tmp_path / "a.parquet", tmp_path / "out", per_shard=4, shuffle=None)
    with tarfile.open(tmp_path / "out" / "000000.tar") as tar:
        names = [name for name in tar.getnames() if not name.endswith("json")]
    assert names == ["000000000.png", "000000001.jpg", "000000002.png", "000000003.jpg"]
    again = capi.pack_shards(packed.pattern, tmp_path / "again", shard_megabytes=1.0, shuffle=None)
    assert isinstance(again, Packed)
    source = open_images(tmp_path / "again")
    assert [source.read(number) for number in range(6)] == rows
    with pytest.raises(CapiError, match="give `per_shard`"):
        capi.pack_shards(tmp_path / "a.parquet", tmp_path / "sized")


def test__a_csv_gives_labels(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(plain(number))
    (tmp_path / "list.csv").write_text("file,label,split\n1.png,b,train\n0.png,a,train\n2.png,a,test\n")
    packed = capi.pack_shards(tmp_path / "list.csv", tmp_path / "out", shuffle=None)
    samples = with_webdataset(str(tmp_path / "out" / "000000.tar"))
    assert packed.images == 2
    assert [(json.loads(sample["json"]), sample["cls"]) for sample in samples] == [
        ({"name": "0.png", "label": "a"}, b"0"),
        ({"name": "1.png", "label": "b"}, b"1"),
    ]


_KILLED = """
import os, sys, signal
from pathlib import Path
from capi.data import shard_writer
from capi.data.sources import image_folder
add, done = shard_writer._Tar.add, []

def slow(self, name, content):
    done.append(name)
    if len(done) == 29:
        os.kill(os.getpid(), signal.SIGKILL)
    return add(self, name, content)

shard_writer._Tar.add = slow
settings = shard_writer.PackingSettings(per_shard=6)
shard_writer.pack(image_folder(Path(sys.argv[1])), Path(sys.argv[2]), settings, workers=2)
"""


def test__a_killed_process_leaves_what_the_next_one_continues_from(photos: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(photos), str(tmp_path / "out")]
    ended = subprocess.run(command, check=False, capture_output=True, cwd=Path(__file__).parents[2])
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    there = digests(tmp_path / "out")
    assert 0 < len(there) < 5
    assert list((tmp_path / "out").glob(".*.partial"))
    settings = PackingSettings(per_shard=6)
    resumed = pack(image_folder(photos), tmp_path / "out", settings)
    assert resumed.reused == len(there)
    pack(image_folder(photos), tmp_path / "whole", settings)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert not list((tmp_path / "out").glob(".*.partial"))


def test__a_full_disk_ends_all_threads_and_the_command_continues_later(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, written = shard_writer._Tar.add, []

    def full(self: shard_writer._Tar, name: str, content: bytes) -> int:
        written.append(name)
        if len(written) > 20:
            raise OSError(28, "No space left on device")
        return add(self, name, content)

    monkeypatch.setattr(shard_writer._Tar, "add", full)
    with pytest.raises(OSError, match="No space left"):
        pack(image_folder(photos), tmp_path, PackingSettings(per_shard=5), workers=2)
    assert not (tmp_path / "shards.json").exists()
    monkeypatch.undo()
    assert pack(image_folder(photos), tmp_path, PackingSettings(per_shard=5)).images == COUNT
    assert os.listdir(tmp_path).count("shards.json") == 1
