"""Images as the library prepares them, against our own evaluation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

import capi
from capi.data.crops import Frame, normalize
from capi.data.sources import Files
from capi.errors import CapiError
from capi.evals.images import StillBatches, read_in_order
from capi.huggingface import CapiImageProcessor
from capi.models.features import PixelEncoder
from capi.types import IMAGENET
from tests.data.pictures import DTYPES, of_dtype


def pixels_of(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, channels), dtype=np.uint8)


def as_evaluated(root: Path, frame: Frame) -> Tensor:
    """All images of a folder, as the protocols read them."""
    source = Files(root, sorted(path.name for path in root.iterdir()))
    batches = StillBatches(source, frame, torch.arange(len(source)), batch_size=1)
    read = read_in_order(batches, range(len(source)))
    return torch.cat([normalize(batch.images, *IMAGENET) for batch in read])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """What photos come as: of several shapes, turned, grey, with a palette, transparent, of 16 bits."""
    root = tmp_path / "photos"
    root.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels_of(50, 70)).save(root / "a.png")
    Image.fromarray(pixels_of(301, 99)).save(root / "b.jpg", exif=exif)
    Image.fromarray(pixels_of(5, 9)).save(root / "c.png")
    Image.fromarray(pixels_of(64, 48)[..., 0]).save(root / "d.png")
    Image.fromarray(pixels_of(64, 48)).quantize(7).save(root / "e.png")
    Image.fromarray(pixels_of(40, 40, 4)).save(root / "f.png")
    Image.fromarray(pixels_of(60, 40)[..., 0].astype(np.uint16) * 257).save(root / "g.png")
    return root


@pytest.mark.parametrize("whole", [False, True])
def test__pixels_are_those_of_our_evaluation_bit_by_bit(photos: Path, whole: bool) -> None:
    processor = CapiImageProcessor(size={"height": 24, "width": 40}, do_center_crop=not whole)
    images = [Image.open(path) for path in sorted(photos.iterdir())]
    given = processor(images, return_tensors="pt")["pixel_values"]
    for image in images:
        image.close()
    frame = Frame((24, 40), None) if whole else Frame((24, 40))
    assert given.dtype is torch.float32
    assert torch.equal(given, as_evaluated(photos, frame))


def test__the_middle_is_cut_out_resized_and_normalized() -> None:
    """Against Pillow and plain arithmetic: of 100 x 80 pixels, the middle square of 7/8 of the short side."""
    image = Image.fromarray(pixels_of(100, 80))
    expected = image.resize((32, 32), Image.Resampling.BICUBIC, box=(5, 15, 75, 85))
    values = (np.asarray(expected, dtype=np.float64) / 255 - IMAGENET.mean) / IMAGENET.std
    given = CapiImageProcessor(size={"height": 32, "width": 32})(image, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(given[0], values.transpose(2, 0, 1), atol=1e-6)


def test__arrays_and_tensors_are_read_like_images() -> None:
    processor, pixels = CapiImageProcessor(size={"height": 16, "width": 16}), pixels_of(40, 30)
    expected = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    first = torch.from_numpy(pixels).permute(2, 0, 1)
    for images in (pixels, first, [first], pixels[None]):
        assert torch.equal(processor(images, return_tensors="pt")["pixel_values"], expected)
    # Pillow rounds bytes once more than floats.
    floats = processor(first.float() / 255, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(floats, expected, rtol=0, atol=2.5 / 255 / 0.22)
    assert not torch.equal(floats, expected)


MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I;16", "I", "F")


def of_mode(mode: str) -> Image.Image:
    gray = of_dtype("uint16", 40, 52)
    if mode in {"I;16", "I", "F"}:
        values = {"I;16": gray, "I": gray.astype(np.int32), "F": (gray / 65535).astype(np.float32)}
        return Image.fromarray(values[mode])
    return Image.fromarray(of_dtype("uint8", 40, 52, 4)).convert(mode)


def both(images: object, **options: object) -> tuple[Tensor, Tensor]:
    """What the processor and `capi.transform` make of images."""
    processor = CapiImageProcessor(size={"height": 24, "width": 40})
    given = processor(images, return_tensors="pt", **options)["pixel_values"]
    return given, capi.transform(PixelEncoder(8), (24, 40))(images)


@pytest.mark.parametrize("dtype", DTYPES)
def test__any_dtype_is_what_our_own_transform_makes_of_it(dtype: str) -> None:
    for shape in ((40, 52), (40, 52, 1), (40, 52, 3)):
        values = of_dtype(dtype, *shape)
        tensor = torch.from_numpy(values if len(shape) == 2 else np.moveaxis(values, 2, 0).copy())
        for images in (values, tensor, [values, values], [tensor], *([values[None]] if len(shape) == 3 else [])):
            given, expected = both(images)
            assert torch.equal(given, expected)
        # Full scale is 1 before the mean and the std.
        assert given.abs().max() < 4


@pytest.mark.parametrize("mode", MODES)
def test__any_mode_of_pillow_is_what_our_own_transform_makes_of_it(mode: str) -> None:
    image = of_mode(mode)
    assert image.mode == mode
    for images in (image, [image, image]):
        given, expected = both(images)
        assert torch.equal(given, expected)
    assert given.abs().max() < 4


def test__values_that_are_scaled_already_stay_as_they_are() -> None:
    plain = {"do_resize": False, "do_rescale": False, "return_tensors": "pt"}
    values = torch.rand(3, 8, 12)
    given = CapiImageProcessor()(values, **plain)["pixel_values"][0]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
    torch.testing.assert_close(given, (values - mean) / std)
    deep = of_dtype("uint16", 8, 12, 3)
    given = CapiImageProcessor()(deep, do_normalize=False, **plain)["pixel_values"][0]
    np.testing.assert_array_equal(given.numpy().transpose(1, 2, 0), deep)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.full((8, 8, 3), 255.0), "floats must lie between 0 and 1"),
        (np.full((8, 8, 3), -1, np.int32), "integers outside of 0 to 65535"),
        (np.zeros((8, 8, 3), np.int8), "int8 has no known full scale"),
    ],
    ids=["range", "negative", "dtype"],
)
def test__values_without_a_scale_are_refused(values: np.ndarray, words: str) -> None:
    with pytest.raises(CapiError, match=words):
        CapiImageProcessor()(values)


def test__steps_can_be_left_out() -> None:
    processor, pixels = CapiImageProcessor(size={"height": 16, "width": 16}), pixels_of(8, 12)
    plain = {"do_resize": False, "do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    first = pixels.transpose(2, 0, 1)[None]
    np.testing.assert_array_equal(processor(pixels, **plain)["pixel_values"], first)
    scaled = processor(pixels, **plain | {"do_rescale": True})["pixel_values"]
    np.testing.assert_allclose(scaled, first / 255, atol=1e-7)
    normed = processor(
        pixels, **plain | {"do_normalize": True, "image_mean": [0.0, 1.0, 2.0], "image_std": [1.0, 2.0, 4.0]}
    )
    np.testing.assert_allclose(normed["pixel_values"][0, 2], (first[0, 2] - 2.0) / 4, atol=1e-5)


def test__settings_survive_a_folder(folder: Path, tmp_path: Path) -> None:
    opened = AutoImageProcessor.from_pretrained(folder)
    assert isinstance(opened, CapiImageProcessor)
    assert (opened.size.height, opened.size.width, opened.patch_size) == (32, 32, 4)
    assert (opened.image_mean, opened.image_std) == ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    opened.save_pretrained(tmp_path / "saved")
    assert AutoImageProcessor.from_pretrained(tmp_path / "saved").to_dict() == opened.to_dict()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": {"height": 30, "width": 32}}, "30 x 32 is no multiple of the model's patch size 4"),
        ({"size": {"shortest_edge": 32}}, 'expected {"height": ..., "width": ...}'),
        ({"resample": Image.Resampling.BILINEAR}, "resizes bicubically"),
        ({"do_pad": True}, "does not pad"),
        ({"kept_share": 1.5}, "kept_share is 1.5"),
        ({"image_mean": 0.5}, "image_mean 0.5"),
        ({"image_std": [0.5, 0.5]}, "image_std (0.5, 0.5), expected a number above 0 for each of 3 channels"),
    ],
    ids=str,
)
def test__what_cannot_be_done_is_refused(folder: Path, changes: dict, words: str) -> None:
    opened = AutoImageProcessor.from_pretrained(folder)
    with pytest.raises(CapiError) as error:
        opened(pixels_of(40, 40), **changes)
    assert words in str(error.value)


def test__images_of_other_channels_are_refused(folder: Path) -> None:
    opened = AutoImageProcessor.from_pretrained(folder)
    with pytest.raises(CapiError, match=r"shape \(40, 40, 2\).* 1 or 3 channels"):
        opened(pixels_of(40, 40, 2), input_data_format="channels_last")
