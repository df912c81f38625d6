import os
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from capi.data.decoding import Box, BrokenImageError, Decoder
from capi.data.reader import ImageReader, read_bytes
from capi.data.sources import EncodedImages, Files
from tests.data.pictures import encoded, noise, photo

PLENTY = 10**9


class Counted(EncodedImages):
    """Remembers which images were read."""

    def __init__(self, contents: list[bytes]) -> None:
        super().__init__([f"{number}.png" for number in range(len(contents))], contents)
        self.asked: list[int] = []

    def read(self, index: int) -> Path | bytes:
        self.asked.append(index)
        return super().read(index)


def assorted() -> list[bytes]:
    """Kinds that are decoded in their own ways; the first is reduced by 4, 2 or 1 as the box asks."""
    turned = Image.Exif()
    turned[0x0112] = 6
    return [
        encoded(photo(240, 320), "JPEG"),
        encoded(photo(240, 320, seed=2), "JPEG", exif=turned),
        encoded(noise(240, 250, dtype=np.uint16), "PNG"),
        encoded(noise(240, 250), "PNG"),
        encoded(noise(240, 250, 4), "PNG"),
    ]


def test__a_crop_is_the_same_from_the_cache_and_from_the_file() -> None:
    source = Counted(assorted())
    cached = ImageReader(source, Decoder(reduced=True), PLENTY)
    boxes = [Box(0, 0, 240, 240), Box(10, 20, 120, 140), Box(30, 7, 80, 60), Box(0.5, 0.25, 239.5, 239.75)]
    requests = [(index, box) for index in range(5) for box in boxes]
    for index, box in requests:
        cached.crop(index, box, (48, 56))
    source.asked.clear()
    from_cache = [cached.crop(index, box, (48, 56)) for index, box in requests]
    assert not source.asked
    for (index, box), crop in zip(requests, from_cache, strict=True):
        fresh = ImageReader(EncodedImages(source.names, source.contents), Decoder(reduced=True))
        again = fresh.crop(index, box, (48, 56))
        assert crop.dtype == again.dtype
        assert np.array_equal(crop, again)
        assert np.array_equal(crop, Decoder(reduced=True).open(source.contents[index]).crop(box, (48, 56)))


def test__sizes_are_those_that_are_seen_with_and_without_the_cache() -> None:
    expected = [(240, 320), (320, 240), (240, 250), (240, 250), (240, 250)]
    for room in (0, PLENTY):
        reader = ImageReader(EncodedImages(list("abcde"), assorted()), Decoder(reduced=True), room)
        for _ in range(2):
            assert [reader.size(index) for index in range(5)] == expected
            for index in range(5):
                reader.crop(index, Box(0, 0, 200, 200), (20, 20))


def test__the_cache_keeps_what_fits_and_never_more() -> None:
    # Decoded sizes of 400, 1600, 400, 400 and 400 bytes: Pillow keeps a pixel in four.
    source = Counted([encoded(noise(side, 10, 3, seed=side), "PNG") for side in (10, 40, 10, 10, 10)])
    reader = ImageReader(source, Decoder(), cache_bytes=1300)
    for _ in range(3):
        for index in range(5):
            reader.crop(index, Box(0, 0, 10, 10), (5, 5))
            assert reader.used <= 1300
    assert reader.used == 1200
    assert source.asked == [0, 1, 2, 3, 4, 1, 4, 1, 4]


def test__without_a_cache_nothing_is_kept() -> None:
    source = Counted([encoded(noise(10, 10), "PNG")])
    reader = ImageReader(source, Decoder())
    for _ in range(3):
        reader.crop(0, Box(0, 0, 10, 10), (5, 5))
    assert (reader.used, source.asked) == (0, [0, 0, 0])


def test__size_and_crop_read_a_file_once() -> None:
    source = Counted([encoded(noise(10, 10, seed=seed), "PNG") for seed in range(3)])
    reader = ImageReader(source, Decoder())
    for index in (2, 0, 1):
        height, width = reader.size(index)
        reader.crop(index, Box(0, 0, width, height), (5, 5))
    assert source.asked == [2, 0, 1]


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test__a_file_is_opened_once_for_its_kind_and_its_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(encoded(noise(10, 10, 3), "TIFF" if name.endswith("tif") else "PNG"))
    opened: list[str] = []
    os_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(str(path)) or os_open(path, *rest))
    reader = ImageReader(Files(tmp_path, [name]), Decoder())
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("opened a second time"))
    reader.size(0)
    # Of a TIFF the beginning is looked at, tifffile reads the tags, and Pillow its pixels.
    assert opened == [str(tmp_path / name)] * (2 if name.endswith("tif") else 1)


def test__bytes_come_from_files_and_from_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"in a file")
    assert read_bytes(Files(tmp_path, ["a"]), 0) == b"in a file"
    assert read_bytes(EncodedImages(["a"], [b"in memory"]), 0) == b"in memory"


def test__many_channels_are_read_in_parts_and_not_kept(tmp_path: Path) -> None:
    image = noise(60, 80, 5)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="minisblack", planarconfig="contig", tile=(16, 16))
    reader = ImageReader(Files(tmp_path, ["a.tif"]), Decoder(channels=5), PLENTY)
    assert reader.size(0) == (60, 80)
    assert np.array_equal(reader.crop(0, Box(3, 4, 43, 54), (50, 40)), image[4:54, 3:43].transpose(2, 0, 1))
    assert reader.used == 0


def test__a_broken_image_is_broken_each_time_and_others_are_not(tmp_path: Path) -> None:
    content = encoded(noise(100, 100, 3), "JPEG")
    (tmp_path / "half.jpg").write_bytes(content[: len(content) // 2])
    (tmp_path / "good.jpg").write_bytes(content)
    reader = ImageReader(Files(tmp_path, ["half.jpg", "gone.jpg", "good.jpg"]), Decoder(), PLENTY)
    for index in (0, 0, 1, 1, 0):
        with pytest.raises(BrokenImageError):
            reader.crop(index, Box(0, 0, 100, 100), (10, 10))
        assert reader.crop(2, Box(0, 0, 100, 100), (10, 10)).shape == (3, 10, 10)


def test__a_source_that_cannot_be_read_is_a_broken_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: EncodedImages, index: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(EncodedImages, "read", fail)
    monkeypatch.setattr("capi.runtime.retry.FILE_PAUSES", (0.0, 0.0))
    with pytest.raises(BrokenImageError, match="Input/output error"):
        ImageReader(EncodedImages(["a"], [b""]), Decoder()).size(0)


def test__a_read_that_fails_for_a_moment_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    errors, read = [OSError(5, "Input/output error"), OSError(116, "Stale file handle")], EncodedImages.read
    monkeypatch.setattr(
        EncodedImages, "read", lambda self, index: _raise(errors.pop()) if errors else read(self, index)
    )
    monkeypatch.setattr("capi.runtime.retry.FILE_PAUSES", (0.0, 0.0))
    assert ImageReader(EncodedImages(["a"], [encoded(noise(9, 8), "PNG")]), Decoder()).size(0) == (9, 8)
    assert not errors


def _raise(error: Exception) -> bytes:
    raise error
