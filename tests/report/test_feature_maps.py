import struct
import zlib

import numpy as np
import pytest
import torch
from torch import Tensor

from capi.data.sources import EncodedImages
from capi.evals.features import Encoding
from capi.models.features import PixelEncoder
from capi.report.pictures.feature_maps import LONGEST_ASPECT, FeatureMaps, PictureFrame, photos
from capi.types import Features, Statistics
from tests.data.pictures import encoded, noise, photo
from tests.evals.toys import PatchColors, source_of


def claimed(width: int, height: int) -> bytes:
    """The beginning of a PNG that says it has so many pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 10) + b"IDAT" + bytes(14)


class Counting(PatchColors):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
        self.shapes.append(tuple(images.shape))
        return super().__call__(images, pooled=pooled)


def maps_of(source: EncodedImages, frame: PictureFrame, **options: int) -> dict[int, Tensor]:
    return {each.number: each.feature_map for each in FeatureMaps(PatchColors(), source, frame, Encoding(), **options)}


@pytest.mark.parametrize(("size", "side"), [(224, 224), (448, 448), (560, 560), (896, 896), (225, 224), (219, 224)])
def test__sizes_are_the_nearest_that_patches_fill(size: int, side: int) -> None:
    assert PictureFrame(size, 14).size((500, 300)) == (side, side)
    assert PictureFrame(3, 14).side == 14


@pytest.mark.parametrize(("image", "size"), [((300, 200), (96, 64)), ((200, 310), (64, 96)), ((77, 77), (64, 64))])
def test__a_whole_image_keeps_its_aspect_to_the_nearest_patch(image: tuple[int, int], size: tuple[int, int]) -> None:
    frame = PictureFrame(64, 8, whole=True)
    assert frame.size(image) == size
    box = frame.box(image)
    # Nothing is squeezed: what is cut out has exactly the aspect of the grid, and lies within the image.
    down, across = box.bottom - box.top, box.right - box.left
    assert down / across == pytest.approx(size[0] / size[1])
    assert min(box) >= -1e-9
    assert box.right <= image[1] + 1e-9
    assert box.bottom <= image[0] + 1e-9
    assert down * across > 0.93 * image[0] * image[1]


def test__a_square_is_cut_from_the_middle() -> None:
    assert PictureFrame(64, 8).box((100, 300)) == pytest.approx((100, 0, 200, 100))


def test__very_long_images_are_shown_by_their_middle() -> None:
    frame = PictureFrame(32, 8, whole=True)
    assert frame.size((1, 5000)) == (32, 32 * LONGEST_ASPECT)
    assert frame.box((10, 5000)) == pytest.approx((2480, 0, 2520, 10))


def test__photos_show_what_the_encoder_sees_but_finer() -> None:
    source = source_of([photo(60, 90)])
    failed: dict[str, str] = {}
    frame = PictureFrame(16, 4, whole=True)
    pictures = dict(photos(source, frame, PatchColors(), side=64, workers=0, failed=failed))
    assert pictures[0].shape == (3, 64, 96)
    seen = maps_of(source, frame)[0]
    assert seen.shape == (4, 6, 3)
    means = pictures[0].float().view(3, 4, 16, 6, 16).mean((2, 4)).permute(1, 2, 0)
    std, mean = torch.tensor([0.229, 0.224, 0.225]), torch.tensor([0.485, 0.456, 0.406])
    torch.testing.assert_close((seen * std + mean) * 255, means, atol=4, rtol=0)


def test__maps_are_the_same_alone_and_in_batches_and_from_memory() -> None:
    source = source_of([photo(40, 60, seed=number) for number in range(3)] + [photo(50, 50)] * 2)
    frame = PictureFrame(16, 4, whole=True)
    encoder = Counting()
    maps = FeatureMaps(encoder, source, frame, Encoding(batch_size=2))
    first, second = list(maps), list(maps)
    # Neighbors of one size share a batch, and the second time nothing is computed.
    assert encoder.shapes == [(2, 3, 16, 24), (1, 3, 16, 24), (2, 3, 16, 16)]
    assert [each.number for each in first] == [each.number for each in second] == [0, 1, 2, 3, 4]
    for value, other in zip(first, second, strict=True):
        assert torch.equal(value.feature_map, other.feature_map)
        alone = maps_of(EncodedImages(["x"], [source.contents[value.number]]), frame)[0]
        torch.testing.assert_close(value.feature_map, alone)


def test__what_has_no_room_is_computed_again() -> None:
    source = source_of([photo(40, 40, seed=number) for number in range(5)])
    encoder = Counting()
    # A map has 4 x 4 patches of 3 floats.
    maps = FeatureMaps(encoder, source, PictureFrame(16, 4), Encoding(batch_size=1), kept_bytes=2 * 192)
    first, second = list(maps), list(maps)
    assert len(encoder.shapes) == 5 + 3
    assert [each.number for each in second] == [0, 1, 2, 3, 4]
    assert all(torch.equal(value.feature_map, two.feature_map) for value, two in zip(first, second, strict=True))


def test__batches_of_large_images_are_smaller() -> None:
    encoder = Counting()
    source = source_of([noise(8, 8, 3)] * 5)
    list(FeatureMaps(encoder, source, PictureFrame(448, 4), Encoding(batch_size=8)))
    assert [shape[0] for shape in encoder.shapes] == [2, 2, 1]


def test__images_that_cannot_be_read_are_reported_and_the_others_continue() -> None:
    good = encoded(photo(40, 40), "PNG")
    source = EncodedImages(["a", "huge", "b", "broken"], [good, claimed(20000, 20000), good, good[:200]])
    maps = FeatureMaps(PatchColors(), source, PictureFrame(16, 4), Encoding())
    assert [each.number for each in maps] == [0, 2]
    assert set(maps.failed) == {"huge", "broken"}
    assert "pixels than data.max_megapixels" in maps.failed["huge"]


@pytest.mark.parametrize("pixels", [noise(1, 1, 3), noise(5, 3), np.full((30, 30, 3), 7, np.uint8)])
def test__single_pixels_gray_and_even_images_have_maps(pixels: np.ndarray) -> None:
    maps = maps_of(source_of([pixels]), PictureFrame(16, 4))
    assert maps[0].shape == (4, 4, 3)
    assert torch.isfinite(maps[0]).all()


def test__photos_of_an_encoder_that_sees_gray_have_colors() -> None:
    source = source_of([photo(30, 30)])
    gray = PixelEncoder(4, Statistics((0.5,), (0.2,)))
    pictures = dict(photos(source, PictureFrame(16, 4), gray, side=32, workers=0, failed={}))
    assert pictures[0].shape == (3, 32, 32)
    assert not torch.equal(pictures[0][0], pictures[0][1])


def test__workers_read_the_same() -> None:
    source = source_of([photo(40, 40, seed=number) for number in range(3)])
    frame = PictureFrame(16, 4)
    read = {
        feature_map.number: feature_map.feature_map
        for feature_map in FeatureMaps(PatchColors(), source, frame, Encoding(workers=1))
    }
    assert all(torch.equal(read[number], feature_map) for number, feature_map in maps_of(source, frame).items())
