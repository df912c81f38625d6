import gc
import io
import math
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, ImageFile

from capi.data import decoding
from capi.data.crops import center_box
from capi.data.decoding import JPEG_FACTORS, Box, BrokenImageError, Decoded, Decoder, ImageShape, PillowPicture
from tests.data.pictures import Pixels, encoded, noise, photo

COLOR = noise(21, 34, 3)
LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True}, "TIFF": {}, "BMP": {}, "PPM": {}}
ORIENTATIONS: dict[int, Callable[[Pixels], Pixels]] = {
    1: lambda image: image,
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.transpose(1, 0, 2),
    6: lambda image: np.rot90(image, -1),
    7: lambda image: image[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90,
}


def whole(image: Pixels) -> Box:
    return Box(0, 0, image.shape[1], image.shape[0])


def distance(left: Pixels, right: Pixels) -> float:
    return float(np.abs(left.astype(np.float64) - right.astype(np.float64)).mean())


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("kind", LOSSLESS)
def test__lossless_formats_give_the_stored_pixels_from_a_path_and_from_memory(kind: str, tmp_path: Path) -> None:
    content = encoded(COLOR, kind, **LOSSLESS[kind])
    (tmp_path / "image").write_bytes(content)
    for source in (content, tmp_path / "image"):
        picture = Decoder().open(source)
        assert (picture.shape.height, picture.shape.width) == (21, 34)
        assert np.array_equal(picture.decode(), COLOR)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test__lossy_formats_are_close_to_what_was_stored(kind: str) -> None:
    image = photo(90, 120)
    decoded = Decoder().open(encoded(image, kind, quality=95)).decode()
    assert decoded.dtype == np.uint8
    assert distance(decoded, image) < 4 < distance(decoded, image[:, ::-1])


def test__gray_fills_all_channels_and_color_becomes_gray_for_one() -> None:
    gray = Decoder().open(encoded(COLOR[:, :, 0], "PNG"))
    assert np.array_equal(gray.crop(whole(COLOR), (21, 34)), np.stack([COLOR[:, :, 0]] * 3))
    single_channel = Decoder(channels=1).open(encoded(COLOR, "PNG")).crop(whole(COLOR), (21, 34))
    assert single_channel.shape == (1, 21, 34)
    # The weights of ITU-R 601.
    assert np.abs(single_channel[0] - COLOR @ np.array([0.299, 0.587, 0.114])).max() < 1


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test__what_is_transparent_is_laid_on_white(mode: str) -> None:
    image = noise(16, 16, len(mode))
    color, alpha = image[:, :, :-1].astype(np.float64), image[:, :, -1:] / 255
    decoded = Decoder().open(encoded(Image.fromarray(image, mode), "PNG")).decode()
    assert np.abs(decoded - (color * alpha + 255 * (1 - alpha))).max() <= 1


def test__a_transparent_color_of_gray_and_color_images_is_white() -> None:
    for image, transparent in ((COLOR[:, :, 0], 95), (COLOR, tuple(COLOR[3, 4].tolist()))):
        decoded = Decoder().open(encoded(image, "PNG", transparency=transparent)).decode()
        full = np.broadcast_to(image.reshape(21, 34, -1), COLOR.shape)
        hidden = (full == transparent).all(2)
        assert hidden.any()
        assert (decoded[hidden] == 255).all()
        assert np.array_equal(decoded[~hidden], full[~hidden])


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
@pytest.mark.parametrize("transparent", [None, 3])
def test__palettes_are_looked_up_and_their_transparent_entry_is_white(kind: str, transparent: int | None) -> None:
    entries, numbers = noise(16, 3), noise(12, 12, seed=1) % 16
    image = Image.fromarray(numbers)
    image.putpalette(entries.tobytes())
    options = {} if transparent is None else {"transparency": transparent}
    if transparent is not None:
        entries[transparent] = 255
    assert np.array_equal(Decoder().open(encoded(image, kind, **options)).decode(), entries[numbers])


@pytest.mark.parametrize(("kind", "within"), [("TIFF", 1), ("JPEG", 3)])
def test__cmyk_becomes_the_color_that_is_seen(kind: str, within: int) -> None:
    ink = np.empty((16, 16, 4), dtype=np.uint8)
    ink[:] = (200, 30, 90, 60)
    decoded = Decoder().open(encoded(Image.fromarray(ink, "CMYK"), kind)).decode()
    light = (255.0 - ink[:, :, :3]) * (255.0 - ink[:, :, 3:]) / 255
    assert np.abs(decoded - light).max() <= within


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test__16_bits_keep_their_depth(kind: str) -> None:
    values = noise(40, 50, dtype=np.uint16)
    cropped = Decoder().open(encoded(values, kind)).crop(whole(values), (40, 50))
    assert cropped.dtype == np.float32
    np.testing.assert_allclose(cropped, np.stack([values / 65535 * 255] * 3), rtol=1e-6)
    assert len(np.unique(cropped)) == len(np.unique(values)) > 256


def test__1_bit_is_black_and_white() -> None:
    bits = noise(20, 20) > 127
    assert np.array_equal(Decoder().open(encoded(bits, "PNG")).decode(), bits * np.uint8(255))


def test__floats_are_fractions_of_full_scale_and_integers_without_one_are_refused() -> None:
    values = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    np.testing.assert_allclose(Decoder().open(encoded(values, "TIFF")).decode(), values * 255)
    beyond = Decoder().open(encoded(np.full((8, 8), 70_000, dtype=np.int32), "TIFF"))
    with pytest.raises(BrokenImageError, match="full scale"):
        beyond.decode()


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test__images_are_turned_as_their_tag_says(kind: str, orientation: int) -> None:
    expected = ORIENTATIONS[orientation](COLOR)
    picture = Decoder().open(encoded(COLOR, kind, exif=oriented(orientation), **LOSSLESS[kind]))
    assert (picture.shape.height, picture.shape.width) == expected.shape[:2]
    assert np.array_equal(picture.decode(), expected)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test__a_reduced_jpeg_is_turned_too(orientation: int) -> None:
    image = photo(160, 320)
    expected = ORIENTATIONS[orientation](image)
    picture = Decoder(reduced=True).open(encoded(image, "JPEG", quality=95, exif=oriented(orientation)))
    assert (picture.shape.height, picture.shape.width) == expected.shape[:2]
    size = (expected.shape[0] // 4, expected.shape[1] // 4)
    blocks = expected.reshape(size[0], 4, size[1], 4, 3).mean((1, 3)).transpose(2, 0, 1)
    assert distance(picture.crop(whole(expected), size), blocks) < 4


@pytest.mark.parametrize(("side", "target"), [(447, 224), (448, 224), (895, 224), (896, 224), (1792, 224), (100, 224)])
def test__the_factor_is_the_largest_that_leaves_the_crop_as_large_as_the_target(side: int, target: int) -> None:
    expected = max(factor for factor in (1, *JPEG_FACTORS) if factor == 1 or side / factor >= target)
    for box in (Box(3, 5, 3 + side, 5 + 2000), Box(5, 3, 5 + 2000, 3 + side)):
        assert ImageShape(3000, 3000, reducible=True).factor(box, (target, target)) == expected
        assert ImageShape(3000, 3000, reducible=False).factor(box, (target, target)) == 1


def test__jpegs_alone_are_reduced_and_for_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, ...]] = []
    load = PillowPicture.load

    def noted(self: PillowPicture, factor: int = 1) -> Decoded:
        loaded = load(self, factor)
        decoded.append(np.asarray(loaded).shape)
        return loaded

    monkeypatch.setattr(PillowPicture, "load", noted)
    image = photo(201, 301)
    for kind, reduced in (("JPEG", True), ("JPEG", False), ("PNG", True)):
        picture = Decoder(reduced=reduced).open(encoded(image, kind))
        assert picture.crop(Box(10, 10, 210, 190), (40, 45)).shape == (3, 40, 45)
    # 180 / 40 and 200 / 45 leave room for a factor of 4; the decoder rounds up.
    assert decoded == [(math.ceil(201 / 4), math.ceil(301 / 4), 3), (201, 301, 3), (201, 301, 3)]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("size", [(16, 12), (60, 90), (7, 200)])
def test__a_crop_that_is_cut_first_is_pillows_crop_and_resize(kind: str, size: tuple[int, int]) -> None:
    image = noise(90, 120, 3)
    for box in (Box(11, 7, 97, 71), Box(0, 0, 64, 64), Box(60, 30, 120, 90)):
        cut = Image.fromarray(image).crop(tuple(map(int, box)))
        expected = np.asarray(cut.resize((size[1], size[0]), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
        crop = Decoder(crop_first=True).open(encoded(image, kind)).crop(box, size)
        assert np.array_equal(crop, expected)
        assert not np.array_equal(Decoder().open(encoded(image, kind)).crop(box, size), expected)


@pytest.mark.parametrize("factor", [1, *JPEG_FACTORS])
def test__what_lies_outside_of_a_crop_that_is_cut_first_leaves_no_trace(factor: int) -> None:
    # Whole blocks of 8 x 8 pixels, so that the JPEG itself mixes nothing over the edge.
    image = np.zeros((320, 400, 3), dtype=np.uint8)
    image[64:256, 80:272] = 200
    content, box = encoded(image, "JPEG", quality=95, subsampling=0), Box(80, 64, 272, 256)
    size = (192 // factor - 3, 192 // factor - 2)
    picture = Decoder(crop_first=True, reduced=factor > 1).open(content)
    assert picture.shape.factor(box, size) == factor
    assert np.abs(picture.crop(box, size).astype(int) - 200).max() <= 1
    assert np.abs(Decoder(reduced=factor > 1).open(content).crop(box, size).astype(int) - 200).max() > 1


@pytest.mark.parametrize("factor", JPEG_FACTORS)
def test__a_reduced_jpeg_is_close_to_the_full_one(factor: int) -> None:
    image = photo(401, 603)
    content, box = encoded(image, "JPEG", quality=90), Box(20, 30, 20 + 360, 30 + 360)
    size = (360 // factor, 360 // factor - 1)
    reduced, full = (Decoder(reduced=reduced).open(content).crop(box, size) for reduced in (True, False))
    assert 0 < distance(reduced, full) < 1.5
    # A quarter of a pixel aside is farther.
    moved = Decoder().open(content).crop(Box(*(side + factor / 4 for side in box)), size)
    assert distance(moved, full) > distance(reduced, full)


@pytest.mark.parametrize("size", [(60, 90), (97, 141), (300, 400), (15, 20)])
def test__resizing_is_the_antialiased_bicubic_of_torch(size: tuple[int, int]) -> None:
    image = photo(150, 200)
    planes = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    expected = torch.nn.functional.interpolate(planes, size, mode="bicubic", antialias=True)[0].clamp(0, 255).numpy()
    resized = Decoder().open(encoded(image, "PNG")).crop(whole(image), size)
    assert resized.dtype == np.uint8
    assert distance(resized, expected) < 0.5
    as_floats = decoding.resize(image.astype(np.float32), whole(image), size, 3)
    assert distance(as_floats.clip(0, 255), expected) < 0.5


def test__a_crop_of_whole_pixels_at_its_own_size_is_a_slice() -> None:
    cropped = Decoder().open(encoded(COLOR, "PNG")).crop(Box(5, 2, 25, 20), (18, 20))
    assert np.array_equal(cropped, COLOR[2:20, 5:25].transpose(2, 0, 1))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF"])
def test__half_a_file_is_broken_each_time_it_is_asked(kind: str) -> None:
    content = encoded(noise(80, 100, 3), kind)
    half, opened = content[: len(content) // 2], []

    def decode() -> Pixels:
        """Some formats notice when they are opened, some when they are decoded."""
        opened[:] = opened or [Decoder().open(half)]
        return opened[0].decode()

    for _ in range(2):
        with pytest.raises(BrokenImageError):
            decode()


@pytest.mark.parametrize("content", [b"", b"no image at all", b"II*\x00 no TIFF", b"\xff\xd8\xff no JPEG"])
def test__what_is_no_image_is_broken(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.jpg").write_bytes(content)
    for source in (content, tmp_path / "file.jpg"):
        with pytest.raises(BrokenImageError, match=r"^[^\n]+$"):
            Decoder().open(source)


def test__a_missing_file_is_broken(tmp_path: Path) -> None:
    with pytest.raises(BrokenImageError, match="No such file"):
        Decoder().open(tmp_path / "none.jpg")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "BMP"])
@pytest.mark.parametrize("max_pixels", [5999, 100])
def test__too_many_pixels_are_refused_without_decoding(
    kind: str, max_pixels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, before, loaded = encoded(noise(60, 100, 3), kind), Image.MAX_IMAGE_PIXELS, []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: loaded.append(kind) or load(self))
    with pytest.raises(BrokenImageError, match="pixels"):
        Decoder(max_pixels=max_pixels).open(content)
    assert not loaded
    assert before == Image.MAX_IMAGE_PIXELS
    Decoder(max_pixels=6000).open(content).decode()
    assert loaded


def test__a_larger_limit_than_pillows_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert np.array_equal(Decoder().open(encoded(COLOR, "PNG")).decode(), COLOR)


def test__an_image_smaller_than_a_patch_is_refused() -> None:
    for shape in ((15, 40, 3), (40, 15, 3)):
        with pytest.raises(BrokenImageError, match="patch of 16"):
            Decoder(smallest_side=16).open(encoded(noise(*shape), "PNG"))
    assert Decoder(smallest_side=15).open(encoded(noise(15, 40, 3), "PNG")).decode().shape == (15, 40, 3)


@pytest.mark.parametrize("kind", ["EPS", "ICO", "PCX"])
def test__formats_that_are_not_about_photographs_are_refused(kind: str) -> None:
    with pytest.raises(BrokenImageError, match="no image that can be read"):
        Decoder().open(encoded(COLOR, kind))


def test__an_image_whose_size_alone_is_asked_leaves_no_file_open(tmp_path: Path) -> None:
    for kind in ("JPEG", "TIFF", "ICO"):
        (tmp_path / kind).write_bytes(encoded(COLOR, kind))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for kind in ("JPEG", "TIFF"):
            Decoder().open(tmp_path / kind)
        with pytest.raises(BrokenImageError):
            Decoder().open(tmp_path / "ICO")
        gc.collect()
    assert not seen


def multichannel(image: Pixels, **options: object) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, image, photometric="minisblack", planarconfig="contig", metadata=None, **options)
    return buffer.getvalue()


def test__a_crop_of_many_channels_is_each_channels_own() -> None:
    image = np.concatenate([photo(120, 150), photo(120, 150, seed=5)[:, :, :2]], axis=2)
    picture = Decoder(channels=5).open(multichannel(image))
    assert picture.shape.in_parts
    assert np.array_equal(picture.decode(), image)
    cropped = picture.crop(whole(image), (60, 70))
    assert cropped.shape == (5, 60, 70)
    for channel in range(5):
        alone = Decoder(channels=1).open(encoded(image[:, :, channel], "PNG")).crop(whole(image), (60, 70))
        assert np.abs(cropped[channel].clip(0, 255) - alone[0]).max() <= 1


def test__channels_of_16_bits_keep_their_depth() -> None:
    image = noise(30, 40, 4, dtype=np.uint16)
    cropped = Decoder(channels=4).open(multichannel(image)).crop(Box(3, 4, 33, 24), (20, 30))
    np.testing.assert_allclose(cropped, image[4:24, 3:33].transpose(2, 0, 1) / 257, rtol=1e-6)


def deep_png(image: Pixels) -> bytes:
    """A PNG with colors of 16 bits, which Pillow does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = image.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in image)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test__colors_of_16_bits_keep_their_depth_in_a_png(tmp_path: Path) -> None:
    """12 bits in 16 would else be 16 levels."""
    image = noise(30, 40, 3, dtype=np.uint16) >> 4
    (tmp_path / "deep.png").write_bytes(deep_png(image))
    for source in (tmp_path / "deep.png", deep_png(image)):
        np.testing.assert_allclose(Decoder().open(source).decode(), image / 257, rtol=1e-6)
        cropped = Decoder().open(source).crop(Box(3, 4, 33, 24), (20, 30))
        np.testing.assert_allclose(cropped, image[4:24, 3:33].transpose(2, 0, 1) / 257, rtol=1e-6)


def test__a_box_beyond_the_image_by_a_hair_gets_no_dark_edge() -> None:
    box = center_box((239, 239), (224, 224), share=1.0)
    assert box.left < 0
    for channels in (3, 5):
        image = np.full((239, 239, channels), 200, dtype=np.uint8)
        content = multichannel(image) if channels == 5 else encoded(image, "PNG")
        assert (Decoder(channels=channels).open(content).crop(box, (224, 224)) == 200).all()


def test__another_number_of_channels_is_refused() -> None:
    content = multichannel(noise(20, 20, 5))
    with pytest.raises(BrokenImageError, match=r"^5 channels in place of 4: use model\.channels=5 .*--channels 5"):
        Decoder(channels=4).open(content).crop(Box(0, 0, 20, 20), (10, 10))
    with pytest.raises(BrokenImageError, match="pixels"):
        Decoder(channels=5, max_pixels=399).open(content)


def test__a_large_tiff_is_read_in_parts_with_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    content, box = encoded(photo(90, 120), "TIFF"), Box(20, 10, 100, 80)
    at_once = Decoder().open(content)
    monkeypatch.setattr(decoding, "READ_IN_PARTS", 90 * 120 - 1)
    in_parts = Decoder().open(content)
    assert not at_once.shape.in_parts
    assert in_parts.shape.in_parts
    assert np.array_equal(in_parts.decode(), at_once.decode())
    assert np.array_equal(in_parts.crop(box, (70, 80)), at_once.crop(box, (70, 80)))
    # A turned one goes to Pillow, which turns it.
    turned = Decoder().open(encoded(photo(90, 120), "TIFF", exif=oriented(6)))
    assert (turned.shape.height, turned.shape.width) == (120, 90)
