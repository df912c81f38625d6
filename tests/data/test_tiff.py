import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from capi.data import decoding
from capi.data.decoding import Box, BrokenImageError, Decoder
from capi.data.tiff import TiffFile, has_tiff_reader, is_tiff, open_tiff
from capi.errors import CapiError
from tests.data.pictures import Pixels, encoded, noise, photo

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


def paged(pages: Pixels, **options: Any) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pages, **{"photometric": "minisblack"} | options)
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


PAGES: dict[str, dict[str, Any]] = {
    "axes by tifffile": {"metadata": {"axes": "CYX"}},
    "no axis named": {},
    "no metadata": {"metadata": None},
    "ImageJ": {"imagej": True, "metadata": {"axes": "CYX"}},
    "OME": {"ome": True, "metadata": {"axes": "CYX"}},
    "OME tiles": {"ome": True, "metadata": {"axes": "CYX"}, "tile": (16, 32), "compression": "lzw"},
    "strips": {"metadata": {"axes": "CYX"}, "rowsperstrip": 7, "compression": "deflate"},
    "big endian": {"metadata": {"axes": "CYX"}, "tile": (16, 16), "byteorder": ">", "bigtiff": True},
}


@pytest.mark.parametrize("layout", PAGES)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test__any_rectangle_of_pages_is_that_of_the_channels(layout: str, dtype: type) -> None:
    pages = noise(5, HEIGHT, WIDTH, dtype=dtype)
    content = paged(pages, **PAGES[layout])
    file = TiffFile(content)
    assert (file.height, file.width, file.channels) == (HEIGHT, WIDTH, 5)
    assert file.unnamed == layout.startswith("no ")
    for top, bottom, left, right in rectangles(8):
        part = file.read(top, bottom, left, right)
        assert part.dtype == dtype
        assert np.array_equal(part, np.moveaxis(pages[:, top:bottom, left:right], 0, 2))


def test__samples_of_pages_are_channels_page_by_page() -> None:
    pages = noise(2, HEIGHT, WIDTH, 3)
    content = paged(pages, photometric="rgb", imagej=True, metadata={"axes": "CYXS"})
    expected = np.concatenate(list(pages), axis=2)
    for top, bottom, left, right in rectangles(4):
        assert np.array_equal(TiffFile(content).read(top, bottom, left, right), expected[top:bottom, left:right])


def test__pages_that_were_written_one_by_one_are_the_same_image() -> None:
    pages = noise(4, HEIGHT, WIDTH)
    buffer = io.BytesIO()
    with tifffile.TiffWriter(buffer) as writer:
        for page in pages:
            writer.write(page)
    file = TiffFile(buffer.getvalue())
    assert (file.channels, file.unnamed) == (4, True)
    assert np.array_equal(file.read(3, 20, 5, 40), np.moveaxis(pages[:, 3:20, 5:40], 0, 2))


def test__previews_beside_an_image_are_left_out() -> None:
    image, buffer = noise(64, 64, 3), io.BytesIO()
    with tifffile.TiffWriter(buffer) as writer:
        writer.write(image)
        writer.write(image[::2, ::2], subfiletype=1)
    assert np.array_equal(Decoder().open(buffer.getvalue()).decode(), image)


STACKS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "a stack with axes ZYX": ((5, 20, 30), {"imagej": True, "metadata": {"axes": "ZYX"}}),
    "a stack with axes TYX": ((5, 20, 30), {"metadata": {"axes": "TYX"}}),
    "a stack with axes ZCYX": ((4, 5, 20, 30), {"ome": True, "metadata": {"axes": "ZCYX"}}),
    "a stack with axes CZYX": ((5, 4, 20, 30), {"ome": True, "metadata": {"axes": "CZYX"}}),
    "a stack with axes QQYX": ((4, 5, 20, 30), {}),
    "a page with a depth of 5": ((5, 32, 32), {"volumetric": True, "tile": (5, 16, 16)}),
    "axes YXC, but pages": ((20, 30, 5), {"metadata": {"axes": "YXC"}}),
    "but 1 page of shape": ((5, 20, 30), {"truncate": True}),
}


@pytest.mark.parametrize("words", STACKS)
def test__a_stack_is_refused_with_what_to_do(words: str) -> None:
    shape, options = STACKS[words]
    for channels in (1, 3, 5):
        with pytest.raises(BrokenImageError, match=f"{words}.*(axes C?YX|a page for each plane)"):
            Decoder(channels=channels).open(paged(noise(*shape), **options))


def test__an_axis_of_length_one_is_no_stack() -> None:
    pages = noise(1, 5, 1, 20, 30)
    content = paged(pages, ome=True, metadata={"axes": "TCZYX"})
    assert np.array_equal(Decoder(channels=5).open(content).decode(), np.moveaxis(pages[0, :, 0], 0, 2))


def test__pages_without_a_name_are_channels_where_the_model_has_as_many() -> None:
    pages = noise(3, 20, 30)
    content = paged(pages, metadata=None)
    assert np.array_equal(Decoder(channels=3).open(content).decode(), np.moveaxis(pages, 0, 2))
    for channels in (1, 2, 5):
        with pytest.raises(BrokenImageError, match=r"3 pages .* no name: .* model\.channels=3 .*--channels 3"):
            Decoder(channels=channels).open(content)


@pytest.mark.parametrize("planar", [False, True])
def test__colors_of_16_bits_keep_their_depth(planar: bool) -> None:
    """Pillow reads the high byte alone, or nothing."""
    image = noise(20, 30, 3, dtype=np.uint16) >> 4
    stored = np.moveaxis(image, 2, 0) if planar else image
    content = paged(stored, photometric="rgb", planarconfig="separate" if planar else "contig")
    np.testing.assert_allclose(Decoder().open(content).decode(), image / 257, rtol=1e-6)


def test__other_files_that_an_ome_tiff_names_are_not_opened(tmp_path: Path) -> None:
    """A plane of the image lies in a file elsewhere, or so the file says."""
    (tmp_path / "images").mkdir()
    secret = noise(20, 30)
    tifffile.imwrite(tmp_path / "secret.ome.tif", secret, ome=True)
    planes = "".join(
        f'<TiffData IFD="0" FirstC="{number}" PlaneCount="1"><UUID FileName="{name}">urn:uuid:{number}</UUID>'
        "</TiffData>"
        for number, name in enumerate(["own.ome.tif", "../secret.ome.tif"])
    )
    xml = (
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:0"><Image '
        'ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" SizeX="30" SizeY="20" SizeC="2" '
        f'SizeZ="1" SizeT="1">{planes}</Pixels></Image></OME>'
    )
    path = tmp_path / "images" / "own.ome.tif"
    tifffile.imwrite(path, noise(20, 30, seed=1), description=xml, metadata=None)
    assert np.array_equal(tifffile.imread(path)[1], secret)
    picture = Decoder(channels=2).open(path)
    assert np.array_equal(picture.decode(), noise(20, 30, seed=1))


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


@pytest.mark.usefixtures("_without_the_extra")
def test__without_the_extra_pages_are_not_left_out_silently() -> None:
    for channels in (1, 3):
        with pytest.raises(CapiError, match=r"several pages need the extra: pip install 'capi\[tiff\]'"):
            Decoder(channels=channels).open(paged(noise(3, 20, 30), metadata={"axes": "CYX"}))
    image, buffer = noise(64, 64, 3), io.BytesIO()
    with tifffile.TiffWriter(buffer) as writer:
        writer.write(image)
        writer.write(image[::2, ::2], subfiletype=1)
    assert np.array_equal(Decoder().open(buffer.getvalue()).decode(), image)
    with pytest.raises(BrokenImageError, match=r"capi\[tiff\]"):
        Decoder().open(written(noise(8, 8, 5), planarconfig="contig"))


@pytest.mark.parametrize("subsampling", [(1, 1), (2, 2)])
def test__jpeg_tiles_in_ycbcr_are_read_in_parts_as_pillow_reads_them_whole(
    subsampling: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    options = {"photometric": "ycbcr", "compression": "jpeg", "subsampling": subsampling, "tile": (16, 32)}
    tifffile.imwrite(buffer, photo(HEIGHT, WIDTH), **options)
    whole = Decoder().open(buffer.getvalue()).decode()
    assert whole.shape == (HEIGHT, WIDTH, 3)
    monkeypatch.setattr(decoding, "READ_IN_PARTS", 0)
    in_parts = Decoder().open(buffer.getvalue())
    assert in_parts.shape.in_parts
    for top, bottom, left, right in rectangles(5):
        part = in_parts.crop(Box(left, top, right, bottom), (bottom - top, right - left))
        assert np.array_equal(part.transpose(1, 2, 0), whole[top:bottom, left:right])
