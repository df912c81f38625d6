from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from capi.data.sources import EncodedImages, image_folder
from capi.errors import CapiError
from capi.evals.extraction import extract_features
from capi.evals.feature_files import Framing, read_features
from capi.evals.features import Encoding
from capi.evals.retrieval import Match, find_similar
from capi.models.features import PixelEncoder
from capi.report.pictures.matches import match_tile, query_tile, similarity_sheet
from capi.runtime.atomic import Output
from tests.data.pictures import encoded

FRAMING = Framing((16, 16), (4, 4))
RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("image_size", [(180, 280), (400, 120), (160, 160)])
def test__the_colored_patch_is_found_and_framed_where_it_is(
    tmp_path: Path, image_size: tuple[int, int], whole: bool
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    framing = replace(FRAMING, size=(16, 24), grid=(4, 6), whole=whole)
    places = {"a.png": (0, 0), "b.png": (3, 1), "c.png": (2, 5)}
    for name, place in places.items():
        picture = Image.new("RGB", image_size[::-1], BLUE)
        left, top, right, bottom = framing.patch_box(image_size, *place)
        ImageDraw.Draw(picture).rectangle((round(left), round(top), round(right) - 1, round(bottom) - 1), fill=RED)
        picture.save(folder / name)
    encoding, out = Encoding(size=(16, 24), batch_size=4), tmp_path / "x.safetensors"
    extract_features(
        PixelEncoder(4), image_folder(folder), Output(out), encoding=encoding, kinds=["patch"], whole=whole
    )
    file = read_features(out)
    assert file.facts.framing == framing
    left, top, right, bottom = framing.patch_box(image_size, *places["b.png"])
    at = ((left + right) / 2, (top + bottom) / 2)
    matches = find_similar(file, PixelEncoder(4), folder / "b.png", count=3, at=at, encoding=encoding)
    assert {match.name: match.patch for match in matches} == places
    assert matches[0].name == "b.png"
    for tile in (match_tile(matches[0], 300, framing, folder), query_tile(folder / "b.png", 300, framing, at)):
        pixels = np.asarray(tile)
        inside = _bounds((pixels[..., 1] < 30) & (pixels[..., 0] > pixels[..., 2]))
        frame = _bounds((pixels == (0xE5, 0x48, 0x4D)).all(2))
        # A line of two pixels around what is red; rectangles were drawn in whole pixels, and scaled.
        np.testing.assert_allclose(np.subtract(frame, inside), (-2, -2, 2, 2), atol=2)


def _bounds(mask: np.ndarray[Any, Any]) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero(mask)
    return columns.min(), rows.min(), columns.max(), rows.max()


def test__pictures_keep_their_aspect(tmp_path: Path) -> None:
    Image.new("RGB", (100, 50), RED).save(tmp_path / "wide.png")
    Image.new("L", (5, 20), 0).save(tmp_path / "tall.png")
    wide = np.asarray(match_tile(Match("wide.png", 0, 1.0), 80, FRAMING, tmp_path))
    assert _bounds((wide == RED).all(2)) == (0, 20, 79, 59)
    tall = np.asarray(match_tile(Match("tall.png", 0, 1.0), 80, FRAMING, tmp_path))
    assert _bounds((tall == 0).all(2)) == (30, 0, 49, 79)


def test__pictures_stand_as_their_exif_tag_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (100, 50), RED).save(tmp_path / "turned.png", exif=exif)
    tile = np.asarray(match_tile(Match("turned.png", 0, 1.0), 80, FRAMING, tmp_path))
    assert _bounds((tile == RED).all(2)) == (20, 0, 59, 79)


def test__pictures_come_from_a_source_by_number(tmp_path: Path) -> None:
    contents = [encoded(Image.new("RGB", (9, 9), color), "PNG") for color in (RED, BLUE)]
    images = EncodedImages(["r", "b"], contents)
    assert match_tile(Match("b", 1, 1.0), 20, FRAMING, images).getpixel((10, 10)) == BLUE
    gray = _gray(match_tile(Match("absent.png", 0, 1.0), 120, FRAMING, tmp_path))
    for match in (Match("other", 1, 1.0), Match("b", 2, 1.0)):
        assert _gray(match_tile(match, 120, FRAMING, images)) == gray
    assert _gray(match_tile(Match("b", 1, 1.0), 120, FRAMING, None)) == gray


def test__an_image_that_is_gone_or_broken_is_a_gray_tile_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_text("no image")
    gone = _gray(match_tile(Match("gone.png", 0, 1.0), 150, FRAMING, tmp_path))
    broken = _gray(match_tile(Match("broken.png", 0, 1.0), 150, FRAMING, tmp_path))
    assert gone != broken
    assert _gray(match_tile(Match("folder/gone.png", 0, 1.0), 150, FRAMING, tmp_path)) == gone


def _gray(tile: Image.Image) -> bytes:
    pixels = np.asarray(tile)
    assert (pixels[0, 0] == pixels[-1, -1]).all()
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 3
    assert np.ptp(pixels.astype(int), axis=2).max() < 30
    return tile.tobytes()


@pytest.mark.parametrize("count", [0, 1, 3, 5, 6, 12])
@pytest.mark.parametrize("label", [None, "a label " * 20])
def test__tiles_and_texts_do_not_overlap(tmp_path: Path, count: int, label: str | None) -> None:
    name = f"{'a long folder ' * 9}/red.png"
    (tmp_path / name).parent.mkdir()
    Image.new("RGB", (60, 60), RED).save(tmp_path / name)
    Image.new("RGB", (60, 60), BLUE).save(tmp_path / "query.png")
    matches = [Match(name, 0, 0.5, label) for _ in range(count)]
    sheet = np.asarray(similarity_sheet(tmp_path / "query.png", matches, tmp_path, framing=FRAMING))
    # Every tile is whole: no caption or other tile covers a pixel of it.
    assert (sheet == RED).all(2).sum() == count * 184 * 184
    assert (sheet == BLUE).all(2).sum() == 184 * 184
    border = np.concatenate([sheet[0], sheet[-1], sheet[:, 0], sheet[:, -1]])
    assert (border == 255).all()


def test__a_point_in_an_image_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match=r"absent.png cannot be read"):
        query_tile(tmp_path / "absent.png", 20, FRAMING, (20.0, 20.0))
