import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pillow_heif
import pytest
from PIL import ExifTags, Image, UnidentifiedImageError

from capi.data.decoding import BrokenImageError, Decoder
from capi.data.sources import ENDINGS, EncodedImages, Files, ImageSource, csv_images, find_images, image_folder
from capi.errors import CapiError
from capi.runtime import image_files
from capi.runtime.image_files import open_image
from tests.data.pictures import noise

NAMES = ["a/b/c/deep.png", "a/z.jpg", "b.JPEG", "b/1.tif", "b/10.webp", "b/2.bmp", "ä ö.gif"]


def fill(root: Path, names: list[str]) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def listed(source: ImageSource) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def test__all_images_are_found_in_the_order_of_their_names(tmp_path: Path) -> None:
    source = image_folder(fill(tmp_path, [*reversed(NAMES), "notes.txt", "a/list.csv", "jpg"]))
    assert listed(source) == NAMES
    for index, name in enumerate(NAMES):
        path = source.read(index)
        assert isinstance(path, Path)
        assert path.read_bytes() == name.encode()


def test__every_ending_counts_in_any_case(tmp_path: Path) -> None:
    names = sorted(f"image{ending}" for ending in ENDINGS) + sorted(f"large{ending.upper()}" for ending in ENDINGS)
    assert listed(image_folder(fill(tmp_path, names))) == names


def test__the_order_is_not_that_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, NAMES)
    walk = os.walk

    def backwards(root: Path, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, subfolders, files in walk(root, **options):
            subfolders.sort(reverse=True)
            yield folder, subfolders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert listed(image_folder(tmp_path)) == NAMES


def test__hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    fill(tmp_path, ["seen.png", ".hidden.png", ".trash/old.png", "a/.thumbnails/small.png", "a/._seen.png"])
    assert listed(image_folder(tmp_path)) == ["seen.png"]


def test__links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    root = fill(tmp_path / "root", ["a/one.png"])
    (root / "linked").symlink_to(fill(tmp_path / "elsewhere", ["two.png"]))
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "here").symlink_to(root / "a")
    assert listed(image_folder(root)) == ["a/one.png", "linked/two.png"]


def test__what_is_no_folder_of_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match=r"there is no folder .*nowhere"):
        image_folder(tmp_path / "nowhere")
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(CapiError, match=r"photo\.jpg is a file"):
        image_folder(tmp_path / "photo.jpg")
    with pytest.raises(CapiError, match=r"holds no images \(looked for \.jpg"):
        image_folder(fill(tmp_path / "empty", ["notes.txt", ".hidden/a.jpg"]))


def test__a_name_with_a_line_break_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="line break"):
        image_folder(fill(tmp_path, ["two\nlines.png"]))


def test__a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, ["a.png", "locked/b.png"])
    scandir = os.scandir

    def guarded(path: Any) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(CapiError, match=r"locked cannot be read \(Permission denied\)"):
        image_folder(tmp_path)


def test__the_fingerprint_follows_the_names_and_not_the_place(tmp_path: Path) -> None:
    base = image_folder(fill(tmp_path / "one", NAMES)).fingerprint
    assert image_folder(fill(tmp_path / "two", NAMES)).fingerprint == base
    others = [NAMES[:-1], [*NAMES, "more.png"], ["a/b/c/deeper.png", *NAMES[1:]], ["ab/c/deep.png", *NAMES[1:]]]
    prints = {image_folder(fill(tmp_path / f"other{number}", names)).fingerprint for number, names in enumerate(others)}
    assert len(prints | {base}) == 5


def test__the_fingerprint_of_images_in_memory_follows_their_bytes() -> None:
    base = EncodedImages(["a", "b"], [b"one", b"two"])
    assert (len(base), listed(base), base.read(1)) == (2, ["a", "b"], b"two")
    assert EncodedImages(["c", "d"], [b"one", b"two"]).fingerprint == base.fingerprint
    others = {EncodedImages(["a", "b"], contents).fingerprint for contents in ([b"two", b"one"], [b"onet", b"wo"])}
    assert len(others | {base.fingerprint}) == 3


def test__no_names_are_no_images(tmp_path: Path) -> None:
    assert len(Files(tmp_path, [])) == 0
    assert listed(Files(tmp_path, ["", "x"])) == ["", "x"]


def test__a_csv_names_the_images_of_its_training_split(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("file,split\nb.png,train\na.png,train\nc.png,test\n")
    images = csv_images(tmp_path / "labels.csv")
    assert [images.name(number) for number in range(len(images))] == ["a.png", "b.png"]
    assert images.read(0) == tmp_path / "a.png"
    (tmp_path / "all.csv").write_text("file\nc.png\na.png\n")
    assert len(csv_images(tmp_path / "all.csv")) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("name,split\na,train\n", 'has no column "file"'),
        ("file,split\na.png,test\n", 'lists no images of the split "train"'),
        ("", "has no column"),
    ],
)
def test__a_csv_without_images_is_reported(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "labels.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CapiError, match=message):
        csv_images(path)


def test__files_and_folders_have_names_of_their_own(tmp_path: Path) -> None:
    fill(tmp_path, ["one/a.png", "two/a.png", "two/deep é/b c.png", "c.PNG"])

    def named(*places: str) -> list[tuple[str, Path]]:
        files = find_images([tmp_path / place for place in places])
        return [(files.name(number), Path(files.read(number))) for number in range(len(files))]

    assert [name for name, _ in named("two")] == ["a.png", "deep é/b c.png"]
    assert [name for name, _ in named("one", "two", "c.PNG")] == [
        "one/a.png",
        "two/a.png",
        "two/deep é/b c.png",
        "c.PNG",
    ]
    assert [name for name, _ in named("c.PNG", "one/a.png")] == ["c.PNG", "a.png"]
    for name, path in named("one", "two", "c.PNG"):
        assert path.is_file()
        assert path.name == name.split("/")[-1]


@pytest.mark.parametrize("ending", ["avif", "jp2", "heic"])
def test__avif_jpeg_2000_and_heic_are_images_like_others(tmp_path: Path, ending: str) -> None:
    pillow_heif.register_heif_opener()
    Image.new("RGB", (32, 24), (200, 40, 40)).save(tmp_path / f"photo.{ending}")
    source = image_folder(tmp_path)
    assert [source.name(number) for number in range(len(source))] == [f"photo.{ending}"]
    with open_image(tmp_path / f"photo.{ending}") as image:
        assert image.size == (32, 24)
        red, green, _ = image.convert("RGB").getpixel((5, 5))
    assert red > 180
    assert green < 60


def test__a_heic_photo_is_turned_as_its_camera_was(tmp_path: Path) -> None:
    pillow_heif.register_heif_opener()
    stored = Image.new("RGB", (64, 32), "white")
    stored.paste("black", (0, 0, 32, 32))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    stored.save(tmp_path / "photo.heic", exif=exif.tobytes())
    picture = Decoder().open(tmp_path / "photo.heic")
    assert (picture.shape.width, picture.shape.height) == (32, 64)
    pixels = picture.decode()
    # Turned clockwise by a quarter, the left side is on top.
    assert pixels[8, 16].max() < 40
    assert pixels[56, 16].min() > 215


@pytest.mark.parametrize(
    ("ending", "kind", "advice"), [("heic", "HEIF", "capi[heic]"), ("jp2", "JPEG2000", "OpenJPEG")]
)
def test__what_reads_a_format_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, kind: str, advice: str
) -> None:
    pillow_heif.register_heif_opener()
    Image.new("RGB", (32, 24)).save(tmp_path / f"photo.{ending}")
    monkeypatch.delitem(Image.OPEN, "HEIF")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    formats = [name for name in image_files.IMAGE_FORMATS if name not in {kind, "HEIF"}]
    monkeypatch.setattr(image_files, "IMAGE_FORMATS", formats)
    with pytest.raises(OSError, match=re.escape(advice)):
        open_image(tmp_path / f"photo.{ending}", ["JPEG", "HEIF"])
    whole = (tmp_path / f"photo.{ending}").read_bytes()
    with pytest.raises(UnidentifiedImageError):
        open_image(b"nothing" + whole)


def test__a_heic_photo_that_was_cut_off_is_broken(tmp_path: Path) -> None:
    pillow_heif.register_heif_opener()
    Image.fromarray(noise(64, 64, 3)).save(tmp_path / "photo.heic")
    content = (tmp_path / "photo.heic").read_bytes()
    for length in (16, 100, len(content) // 2):
        with pytest.raises(BrokenImageError):
            Decoder().open(content[:length]).decode()
