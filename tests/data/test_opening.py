import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import capi
from capi.data.locations import SCHEMES, Weighted, describe_data, described_data, open_images, weighted_sources
from capi.data.shards import Shards
from capi.data.sources import EncodedImages, Files, ImageSource, Mixture
from capi.data.tables import ParquetImages
from capi.errors import CapiError
from tests.data.shard_files import plain, write_shards


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos, shards and a table, which are named from here on."""
    monkeypatch.chdir(tmp_path)
    for folder, count in (("photos", 3), ("photos@2", 2), ("both", 1)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            (tmp_path / folder / f"{number}.png").write_bytes(plain(number))
    write_shards(tmp_path / "shards", [2, 3, 4])
    shutil.copy(tmp_path / "shards" / "000.tar", tmp_path / "both" / "photos.tar")
    (tmp_path / "tables").mkdir()
    table = pyarrow.table({"a": [plain(0), plain(1)], "b": [plain(2), plain(3)]})
    pyarrow.parquet.write_table(table, tmp_path / "tables" / "t.parquet")
    (tmp_path / "list.csv").write_text("file\nphotos/0.png\n")
    return tmp_path


def images(source: ImageSource) -> list[bytes]:
    contents = [source.read(number) for number in range(len(source))]
    return [content.read_bytes() if isinstance(content, Path) else content for content in contents]


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("photos", Files, 3),
        ("photos@2", Files, 2),
        ("list.csv", Files, 1),
        ("shards", Shards, 9),
        ("shards/{000..002}.tar", Shards, 9),
        ("shards/{001,002}.tar", Shards, 7),
        ("shards/*.tar", Shards, 9),
        ("shards/00[12].tar", Shards, 7),
        ("shards/001.tar", Shards, 3),
        ("tables?column=b", ParquetImages, 2),
        ("tables/*.parquet?column=b", ParquetImages, 2),
        ("tables/t.parquet?column=a", ParquetImages, 2),
        # Images count before archives of them.
        ("both", Files, 1),
    ],
)
def test__names_lead_to_sources(root: Path, name: str, kind: type, count: int) -> None:
    source = open_images(name)
    assert isinstance(source, kind)
    assert len(source) == count


def test__shards_in_folders_are_found_also_behind_links_but_not_hidden_ones(root: Path) -> None:
    folder = root / "nested"
    for name in ("a/b", ".hidden"):
        shutil.copytree(root / "shards", folder / name)
    (folder / "linked").symlink_to(root / "shards")
    expected = images(open_images("shards"))
    assert images(open_images("nested")) == expected + expected


def test__shards_and_columns_are_the_ones_that_were_named(root: Path) -> None:
    assert images(open_images("shards/{002,000}.tar")) == [plain(number) for number in (5, 6, 7, 8, 0, 1)]
    assert images(open_images("tables?column=b")) == [plain(2), plain(3)]
    assert open_images("shards").fingerprint == open_images(str(root / "shards" / "{000..002}.tar")).fingerprint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "there is no folder nowhere"),
        ("shards/{000..004}.tar", r"2 of 5 shards are missing, the first is shards/003\.tar"),
        ("shards/9*.tar", r"no file matches shards/9\*\.tar: check the pattern"),
        ("shards/{000..002.tar", "has a brace without its partner"),
        ("shards/{0..99999999}.tar", "stands for more than 1000000 files"),
        ("{0..9999}/{0..9999..2}.tar", "stands for more than 1000000 files"),
        ("nothing.tar", r"1 of 1 shards are missing, the first is nothing\.tar"),
        ("photos.tar.gz", r"photos\.tar\.gz is compressed, .* unpack it"),
        ("shards/*", r"files that end in .*: expected one of \.tar, \.zip, \.parquet, \.arrow"),
        ("tables", r"several columns that may be images \(a, b\)"),
        ("tables?column=c", r'no column "c"'),
        ("shards?column=a", "tar or zip files, which have no columns"),
        ("photos?column=a", "names a column, which parquet and arrow files have"),
        ("photos@3", r"photos@3 has a weight, which has a meaning among several sources only"),
        (["photos@3", "shards"], "shards has no weight and others have"),
        (["photos@0", "shards@1"], "has a weight of 0: expected more than 0"),
        ([], "no images are named"),
    ],
)
def test__bad_names_are_reported(root: Path, name: Any, message: str) -> None:
    (root / "shards" / "notes.txt").touch()
    (root / "photos.tar.gz").touch()
    with pytest.raises(CapiError, match=message):
        open_images(name)


def test__a_folder_without_images_is_reported(root: Path) -> None:
    (root / "empty").mkdir()
    with pytest.raises(CapiError, match="empty holds no images"):
        open_images("empty")


def test__without_braceexpand_the_extra_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "braceexpand", None)
    with pytest.raises(CapiError, match=r"pip install 'capi\[shards\]'"):
        open_images("shards/{000..002}.tar")


def test__several_sources_have_weights_or_none(root: Path) -> None:
    mixed = open_images(["photos", root / "shards", "tables?column=a"])
    assert isinstance(mixed, Mixture)
    assert mixed.weights is None
    assert len(mixed) == 3 + 9 + 2
    weighted = open_images(["photos@2@0.5", "photos@1", "shards/{000..001}.tar@3."])
    assert isinstance(weighted, Mixture)
    assert (weighted.weights, [len(part) for part in weighted.parts]) == ([0.5, 1, 3], [2, 3, 5])
    assert weighted_sources(["photos@2@0.5", "shards@.5"]) == [Weighted("photos@2", 0.5), Weighted("shards", 0.5)]


def test__a_run_s_record_leads_back_to_the_same_images(root: Path) -> None:
    for data in ("photos", ["photos", "shards"], ["photos@2@0.25", "shards@3"], root / "photos"):
        source = open_images(data)
        facts = describe_data(data, source)
        assert (facts["images"], facts["fingerprint"]) == (len(source), source.fingerprint)
        assert open_images(described_data(facts)).fingerprint == source.fingerprint
    assert facts["path"] == str(root / "photos")
    assert "sources" not in facts
    facts = describe_data(["photos@2@0.25", "shards@3"], open_images(["photos@2@0.25", "shards@3"]))
    assert facts["path"] == "photos@2@0.25, shards@3.0"
    assert [(each["path"], each["weight"], each["images"]) for each in facts["sources"]] == [
        ("photos@2", 0.25, 2),
        ("shards", 3.0, 9),
    ]


def test__a_scheme_of_one_s_own_opens_a_source(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "hf", SCHEMES["hf"])

    def opener(name: str) -> EncodedImages:
        count = int(name.removeprefix("plain://"))
        return EncodedImages([str(number) for number in range(count)], [plain(number) for number in range(count)])

    capi.register_source("plain", opener)
    assert images(open_images("plain://3")) == [plain(0), plain(1), plain(2)]
    mixed = open_images(["plain://2@0.5", "photos@0.5"])
    assert (len(mixed), mixed.weights) == (5, [0.5, 0.5])
    with pytest.raises(CapiError, match='there are no sources "plan://"; did you mean "plain"'):
        open_images("plan://3")
    with pytest.raises(CapiError, match="source=hf comes with capi: choose another name"):
        capi.register_source("hf", opener)
