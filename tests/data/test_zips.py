import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from capi.data.decoding import BrokenImageError
from capi.data.locations import labeled_images, list_images, open_images
from capi.data.sources import ImageSource, image_folder
from capi.data.survey import check_data, count_copies
from capi.data.zips import ZipImages
from capi.errors import CapiError
from tests.data.pictures import encoded, photo

NAMES = ["b/2.png", "b/10.jpg", "a/z.png", "a/ä ö.jpg"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for number, name in enumerate(NAMES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        kind = "PNG" if name.endswith("png") else "JPEG"
        (root / name).write_bytes(encoded(photo(40, 60, seed=number), kind))
    return root


def packed(path: Path, contents: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


def all_of(source: ImageSource) -> list[tuple[str, bytes]]:
    contents = [source.read(number) for number in range(len(source))]
    texts = [content.read_bytes() if isinstance(content, Path) else content for content in contents]
    return [(source.name(number), text) for number, text in enumerate(texts)]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("prefix", ["", "photos/"])
def test__a_zip_is_the_folder_that_was_packed(folder: Path, tmp_path: Path, method: int, prefix: str) -> None:
    files = {f"{prefix}{name}": (folder / name).read_bytes() for name in NAMES}
    beside = {"__MACOSX/._2.png": b"x", f"{prefix}b/.hidden.png": b"x", f"{prefix}notes.txt": b"x"}
    archive = packed(tmp_path / "photos.zip", files | beside, method)
    with zipfile.ZipFile(archive, "a") as more:
        link = zipfile.ZipInfo(f"{prefix}link.png")
        link.external_attr = 0o120777 << 16
        more.writestr(link, "../../etc/passwd")
    source, plain = open_images(str(archive)), image_folder(folder)
    assert isinstance(source, ZipImages)
    assert all_of(source) == all_of(plain)
    assert source.fingerprint == plain.fingerprint
    assert labeled_images(str(archive)).labels == labeled_images(str(folder)).labels == ["a", "a", "b", "b"]
    # Nothing was written anywhere.
    assert sorted(os.listdir(tmp_path)) == ["photos", "photos.zip"]


def test__several_processes_read_a_zip_as_they_read_the_folder(folder: Path, tmp_path: Path) -> None:
    archive = packed(tmp_path / "photos.zip", {name: (folder / name).read_bytes() for name in NAMES})
    archived, other = check_data(str(archive), workers=2), check_data(str(folder), workers=0)
    assert (archived.readable, archived.mean, archived.std, archived.fingerprint) == (
        4,
        other.mean,
        other.std,
        other.fingerprint,
    )
    source = open_images(str(archive))
    assert count_copies(source) == count_copies(image_folder(folder)) == 0
    twice = {f"{name}{number}.png": (folder / NAMES[0]).read_bytes() for name in "ab" for number in range(2)}
    assert count_copies(open_images(str(packed(tmp_path / "twice.zip", twice)))) == 3
    source.read(0)
    assert all_of(pickle.loads(pickle.dumps(source))) == all_of(source)  # noqa: S301 - our own


def test__of_members_with_one_name_the_last_counts_as_unzip_has_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x.png", b"old")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("x.png", b"new")
    assert all_of(open_images(str(tmp_path / "a.zip"))) == [("x.png", b"new")]


def test__several_zips_are_one_source_named_by_their_files(tmp_path: Path) -> None:
    for name in ("b", "a"):
        packed(tmp_path / f"{name}.zip", {"1.png": name.encode(), "2.png": b""})
    source = open_images(str(tmp_path / "*.zip"))
    assert [name for name, _ in all_of(source)] == ["a.zip/1.png", "a.zip/2.png", "b.zip/1.png", "b.zip/2.png"]
    assert source.read(2) == b"b"
    assert open_images(str(tmp_path)).fingerprint == source.fingerprint


@pytest.mark.parametrize("name", ["../x.png", "/x.png", "a/../../x.png", "a//x.png", "a\\..\\x.png", "a\nb.png"])
def test__names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    archive = packed(tmp_path / "a.zip", {name: b"x", "fine.png": b"x"})
    with pytest.raises(CapiError, match="no name below one folder"):
        open_images(str(archive))


def directory_entry(content: bytes) -> int:
    return content.rindex(b"PK\1\2")


def with_size(content: bytes, size: int) -> bytes:
    """The directory says another size of the only member than it has."""
    place = directory_entry(content) + 24
    return content[:place] + struct.pack("<I", size) + content[place + 4 :]


@pytest.mark.parametrize(
    "change",
    [
        lambda content: with_size(content, 99_999),
        lambda content: with_size(content, 3),
        lambda content: content.replace(b"PK\3\4", b"PK\5\4", 1),
        # Another byte of what is packed.
        lambda content: content[:40] + bytes([content[40] ^ 255]) + content[41:],
    ],
)
def test__a_member_that_is_not_what_the_directory_says_is_a_broken_image(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    content = packed(tmp_path / "a.zip", {"x.png": b"some bytes" * 99}).read_bytes()
    (tmp_path / "a.zip").write_bytes(change(content))
    with pytest.raises(BrokenImageError):
        open_images(str(tmp_path / "a.zip")).read(0)


def test__more_is_never_unpacked_than_the_directory_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = packed(tmp_path / "a.zip", {"x.png": bytes(2**24)}).read_bytes()
    (tmp_path / "a.zip").write_bytes(with_size(content, 1000))
    longest = 0
    real = zlib.decompressobj

    class Watched:
        def __init__(self, bits: int) -> None:
            self.inner = real(bits)

        def decompress(self, data: bytes, most: int) -> bytes:
            nonlocal longest
            text = self.inner.decompress(data, most)
            longest = max(longest, len(text))
            return text

    monkeypatch.setattr(zlib, "decompressobj", Watched)
    with pytest.raises(BrokenImageError, match="size or checksum"):
        open_images(str(tmp_path / "a.zip")).read(0)
    assert longest == 1000


def test__what_cannot_be_read_at_random_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="pack it with zip -0"):
        open_images(str(packed(tmp_path / "b.zip", {"x.png": b"x"}, zipfile.ZIP_BZIP2)))
    content = bytearray(packed(tmp_path / "c.zip", {"x.png": b"x"}).read_bytes())
    content[directory_entry(bytes(content)) + 8] |= 1
    (tmp_path / "c.zip").write_bytes(content)
    with pytest.raises(CapiError, match="is encrypted"):
        open_images(str(tmp_path / "c.zip"))
    whole = packed(tmp_path / "d.zip", {"x.png": b"x" * 500}).read_bytes()
    (tmp_path / "d.zip").write_bytes(whole[:-60])
    with pytest.raises(CapiError, match="no zip that can be read"):
        open_images(str(tmp_path / "d.zip"))
    with pytest.raises(CapiError, match="hold no images"):
        open_images(str(packed(tmp_path / "e.zip", {"x.txt": b"x"})))
    with pytest.raises(CapiError, match=r"missing\.zip"):
        open_images(str(tmp_path / "missing.zip"))
    with pytest.raises(CapiError, match="has no splits, as a folder"):
        list_images(str(tmp_path / "e.zip"), "train")
    with pytest.raises(CapiError, match="no columns"):
        open_images(f"{tmp_path / 'e.zip'}?column=image")
