import importlib.util
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tifffile

from capi.data.decoding import Decoder
from capi.data.tiff import TiffFile, has_tiff_reader, is_tiff, open_tiff
from capi.errors import CapiError
from tests.data.pictures import Pixels, encoded, noise

HEIGHT, WIDTH = 50, 70
LAYOUTS: dict[str, dict[str, Any]] = {
    "one strip": {"rowsperstrip": HEIGHT},
    "strips": {"rowsperstrip": 7},
    "tiles": {"tile": (16, 32)},
    "compressed strips": {"rowsperstrip": 7, "compression": "deflate"},
    "compressed tiles": {"tile": (32, 16), "compression": "lzw", "predictor": True},
    "zstd tiles": {"tile": (16, 16), "compression": "zstd"},
    "big endian": {"tile": (16, 16), "byteorder": ">"},
    "big TIFF": {"rowsperstrip": 9, "bigtiff": True},
}


def written(image: Pixels | Iterator[Pixels | None], **options: Any) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, image, photometric="minisblack", metadata=None, **options)
    return buffer.getvalue()


def rectangles(count: int) -> Iterator[tuple[int, int, int, int]]:
    """The whole, corners of one pixel, and others at random."""
    yield from [(0, HEIGHT, 0, WIDTH), (0, 1, 0, 1), (HEIGHT - 1, HEIGHT, WIDTH - 1, WIDTH)]
    generator = np.random.default_rng(0)
    for _ in range(count):
        top, bottom = sorted(generator.choice(HEIGHT + 1, 2, replace=False).tolist())
        left, right = sorted(generator.choice(WIDTH + 1, 2, replace=False).tolist())
        yield top, bottom, left, right


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("channels", "planar"), [(1, False), (2, False), (5, False), (5, True)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test__any_rectangle_is_that_of_the_whole_image(layout: str, channels: int, planar: bool, dtype: type) -> None:
    image = noise(HEIGHT, WIDTH, channels, dtype=dtype)
    stored = np.moveaxis(image, 2, 0) if planar else image
    stored = image[:, :, 0] if channels == 1 else stored
    content = written(stored, planarconfig="separate" if planar else "contig", **LAYOUTS[layout])
    expected = tifffile.imread(io.BytesIO(content))
    expected = np.moveaxis(expected, 0, 2) if planar else expected
    file = TiffFile(content)
    assert (file.height, file.width, file.channels, file.planar) == (HEIGHT, WIDTH, channels, planar)
    for top, bottom, left, right in rectangles(12):
        part = file.read(top, bottom, left, right)
        assert part.dtype == dtype
        assert np.array_equal(part, expected[top:bottom, left:right])


def test__only_the_tiles_under_the_rectangle_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    make = tifffile.TiffPage.decode.func

    def noted(page: tifffile.TiffPage) -> Any:
        def decode(data: bytes, number: int, **options: Any) -> Any:
            decoded.append(number)
            return make(page)(data, number, **options)

        return decode

    monkeypatch.setattr(tifffile.TiffPage, "decode", property(noted))
    # 4 rows of 5 tiles.
    file = TiffFile(written(noise(64, 80, 4), planarconfig="contig", tile=(16, 16)))
    for rectangle, tiles in [
        ((16, 32, 16, 32), [6]),
        ((15, 33, 16, 32), [1, 6, 11]),
        ((0, 1, 0, 80), [0, 1, 2, 3, 4]),
        ((63, 64, 79, 80), [19]),
        ((0, 64, 0, 80), list(range(20))),
    ]:
        decoded.clear()
        file.read(*rectangle)
        assert decoded == tiles


def test__tiles_that_were_never_written_are_empty() -> None:
    tiles = (np.full((16, 16, 5), number, dtype=np.uint8) if number % 3 != 1 else None for number in range(9))
    content = written(tiles, shape=(48, 48, 5), dtype=np.uint8, tile=(16, 16), planarconfig="contig")
    part = TiffFile(content).read(0, 48, 0, 48)
    assert np.array_equal(part, np.kron([[0, 0, 2], [3, 0, 5], [6, 0, 8]], np.ones((16, 16)))[:, :, None].repeat(5, 2))


def test__the_first_page_is_read() -> None:
    pages = noise(3, 20, 30, 4)
    content = written(pages, planarconfig="contig")
    assert np.array_equal(TiffFile(content).read(0, 20, 0, 30), pages[0])


def test__tiffs_are_known_by_their_beginning() -> None:
    assert is_tiff(written(noise(8, 8)))
    assert is_tiff(written(noise(8, 8), byteorder=">", bigtiff=True))
    assert not is_tiff(encoded(noise(8, 8), "PNG"))
    assert not is_tiff(b"")


@pytest.fixture
def _without_the_extra(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tifffile" else find(name))
    has_tiff_reader.cache_clear()
    yield
    has_tiff_reader.cache_clear()


@pytest.mark.usefixtures("_without_the_extra")
def test__without_the_extra_it_is_named_and_plain_tiffs_still_open() -> None:
    with pytest.raises(CapiError, match=r"pip install 'capi\[tiff\]'"):
        open_tiff(written(noise(8, 8, 5), planarconfig="contig"))
    with pytest.raises(CapiError, match=r"pip install 'capi\[tiff\]'"):
        Decoder(channels=5).open(written(noise(8, 8, 5), planarconfig="contig"))
    image = noise(8, 8, 3)
    assert np.array_equal(Decoder().open(encoded(image, "TIFF")).decode(), image)
