import gzip
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from capi.data import shards
from capi.data.shards import ShardIndex, find_index, image_members, index_places, make_index, read_facts
from capi.errors import CapiError
from tests.data.shard_files import plain, write_shards, write_tar

LONG = "folder/" * 20 + "long.name.jpg"
MEMBERS = {
    "a/0001.jpg": b"one",
    "a/0001.json": b"{}",
    "b.PNG": b"",
    ".hidden.png": b"x",
    "a/._0001.jpg": b"x",
    LONG: b"long" * 300,
    "ä ö.webp": b"umlauts",
}
IMAGES = ["a/0001.jpg", "b.PNG", LONG, "ä ö.webp"]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test__the_index_leads_to_the_bytes_of_every_image(tmp_path: Path, format: int) -> None:
    shard = write_tar(tmp_path / "a.tar", MEMBERS, format)
    with tarfile.open(shard, "a") as tar:
        folder = tarfile.TarInfo("folder.png")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    place, facts = make_index(shard)
    assert place == tmp_path / "a.tar.index"
    index, content = ShardIndex(place), shard.read_bytes()
    assert len(index) == facts.images == 4
    assert [index.name(number) for number in range(4)] == IMAGES
    assert [index.member(number) for number in range(4)] == list(image_members(shard))
    for number, name in enumerate(IMAGES):
        offset, size = index.place(number)
        assert content[offset : offset + size] == MEMBERS[name]
    assert index.sizes().tolist() == [len(MEMBERS[name]) for name in IMAGES]


def test__an_index_counts_as_long_as_it_is_true(tmp_path: Path) -> None:
    (shard,) = write_shards(tmp_path, [20])
    assert find_index(shard) is None
    made = make_index(shard)
    assert find_index(shard) == made
    # Copied without its time, it is still the same tar.
    os.utime(shard, ns=(1, 1))
    assert find_index(shard) == made
    # Of the same size, with other members.
    other = write_tar(tmp_path / "other.tar", {f"other{number}.png": plain(number) for number in range(20)})
    padded = other.read_bytes().ljust(shard.stat().st_size, b"\0")
    shard.write_bytes(padded[: shard.stat().st_size])
    assert find_index(shard) is None
    assert make_index(shard)[1].digest != made[1].digest
    shard.write_bytes(shard.read_bytes() + b"\0" * 512)
    assert find_index(shard) is None


def test__an_index_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (shard,) = write_shards(tmp_path, [2])
    place, _ = make_index(shard)
    whole = place.read_bytes()
    for content in (b"", b"nonsense", whole[:30], whole[:-4], whole.replace(b"shard index 1", b"shard index 9")):
        place.write_bytes(content)
        assert read_facts(place) is None
        assert find_index(shard) is None


def test__where_the_shards_cannot_be_written_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = write_shards(tmp_path / "shards", [3])
    write = shards.write_index
    refused: list[Path] = []

    def guarded(path: Path, *arguments: object) -> object:
        if path.parent in refused:
            raise PermissionError(13, "Permission denied", str(path))
        return write(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "write_index", guarded)
    refused.append(shard.parent)
    place, facts = make_index(shard)
    assert place.parent == tmp_path / "cache" / "capi" / "shards"
    assert find_index(shard) == (place, facts)
    # Another folder with a tar of the same name has an index of its own.
    moved = Path(shutil.copytree(shard.parent, tmp_path / "moved")) / shard.name
    assert index_places(moved)[1] != place
    refused.append(place.parent)
    with pytest.raises(CapiError, match=r"can be written neither beside it nor at .*: make one of them writable"):
        make_index(shard)


def test__what_is_no_whole_tar_is_refused(tmp_path: Path) -> None:
    (shard,) = write_shards(tmp_path, [5])
    whole = shard.read_bytes()
    places = [member.offset for member in image_members(shard)]
    broken = {
        "is no tar that can be read": [
            b"",
            b"no tar at all" * 100,
            whole[:300],
            whole[: places[2] + 20],
            whole[: places[4] + 3],
        ],
        "is damaged or cut off at byte": [
            whole[: places[3] - 512],
            whole[: places[3] - 300],
            whole[: places[2] - 512] + b"\xff" * 512 + whole[places[2] :],
        ],
    }
    for message, contents in broken.items():
        for content in contents:
            shard.write_bytes(content)
            with pytest.raises(CapiError, match=message):
                make_index(shard)
    assert not (tmp_path / "000.tar.index").exists()


def test__a_compressed_tar_is_refused_whatever_its_name(tmp_path: Path) -> None:
    (shard,) = write_shards(tmp_path, [2])
    shard.write_bytes(gzip.compress(shard.read_bytes()))
    with pytest.raises(CapiError, match=r"is compressed \(gzip\), .* unpack it to a plain \.tar"):
        make_index(shard)
