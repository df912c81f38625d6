"""Images to batches, as the evaluations have them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from capi.data.crops import Frame, normalize, transform
from capi.data.sources import Files
from capi.errors import CapiError
from capi.evals.images import StillBatches
from capi.models.features import CapiEncoder, PixelEncoder
from capi.types import IMAGENET, Statistics
from tests.data.pictures import DTYPES, noise, of_dtype, photo


def turned(path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(photo(60, 90)).save(path, exif=exif)


WRITERS: dict[str, Any] = {
    "plain.png": lambda path: Image.fromarray(photo(50, 80)).save(path),
    "photo.jpg": lambda path: Image.fromarray(photo(300, 200)).save(path),
    "turned.jpg": turned,
    "turned.png": turned,
    "turned.tif": turned,
    "grey.png": lambda path: Image.fromarray(noise(40, 40)).save(path),
    "clear.png": lambda path: Image.fromarray(noise(40, 50, 4)).save(path),
    "palette.gif": lambda path: Image.fromarray(photo(40, 50)).quantize(16).save(path),
    "deep.png": lambda path: Image.fromarray(noise(30, 40, dtype=np.uint16)).save(path),
    "tiny.png": lambda path: Image.fromarray(noise(3, 5, 3)).save(path),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("size", [(224, 224), (32, 48)])
def test__a_batch_is_what_the_evaluations_read(
    tmp_path: Path, model: CapiEncoder, name: str, size: tuple[int, int]
) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    model.statistics = Statistics((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    pixels = StillBatches(Files(tmp_path, [name]), Frame(size), torch.tensor([0]), 1)[0].images
    expected = normalize(pixels, *model.statistics)
    with Image.open(path) as opened, Image.open(path) as again:
        for image in (path, str(path), [path], opened, (again,)):
            given = transform(model, size)(image)
            assert given.dtype == torch.float32
            assert torch.equal(given, expected)


def test__several_images_are_a_batch_in_their_order(tmp_path: Path, model: CapiEncoder) -> None:
    names = ["plain.png", "grey.png", "deep.png"]
    for name in names:
        WRITERS[name](tmp_path / name)
    single = [transform(model)(tmp_path / name) for name in names]
    together = transform(model)(tmp_path / name for name in names)
    assert together.shape == (3, 3, 224, 224)
    torch.testing.assert_close(together, torch.cat(single))


def test__the_encoder_takes_what_it_gives(tmp_path: Path, model: CapiEncoder) -> None:
    WRITERS["photo.jpg"](tmp_path / "photo.jpg")
    features = model(transform(model)(tmp_path / "photo.jpg"))
    assert features.feature_map.shape == (1, 56, 56, 32)
    half = model.bfloat16()
    assert half(transform(half, 16)(tmp_path / "photo.jpg")).feature_map.dtype == torch.bfloat16


def test__an_encoder_without_weights_or_statistics_gets_the_usual_ones(tmp_path: Path) -> None:
    encoder = PixelEncoder(4)
    image = Image.fromarray(np.full((8, 8, 3), 128, dtype=np.uint8))
    expected = (128 / 255 - torch.tensor(IMAGENET.mean)) / torch.tensor(IMAGENET.std)
    torch.testing.assert_close(transform(encoder, 8)(image)[0, :, 3, 4], expected)


def test__other_numbers_of_channels_are_asked_of_the_files(model: CapiEncoder) -> None:
    model.statistics = Statistics((0.5,), (0.5,))
    assert transform(model, 8)(Image.fromarray(noise(8, 8, 3))).shape == (1, 1, 8, 8)


def test__the_image_of_the_caller_stays_as_it_is(model: CapiEncoder) -> None:
    image = Image.fromarray(noise(20, 30, 4))
    before = image.tobytes()
    transform(model, 8)(image)
    assert (image.mode, image.size, image.tobytes()) == ("RGBA", (30, 20), before)


@pytest.mark.parametrize(
    ("size", "fitting"),
    [
        (225, "224 x 224"),
        (1, "4 x 4"),
        (0, "4 x 4"),
        (-8, "4 x 4"),
        ((8, 9), "8 x 8"),
        ((8, 8, 8), "8 x 8"),
        ((8,), "8 x 8"),
    ],
)
def test__a_size_that_the_encoder_cannot_take_is_reported(model: CapiEncoder, size: Any, fitting: str) -> None:
    with pytest.raises(CapiError, match=f"multiples of the patch size 4, such as {fitting}$"):
        transform(model, size)


def test__what_is_no_image_is_reported(tmp_path: Path, model: CapiEncoder) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    for images, message in (
        (tmp_path / "nowhere.jpg", r"there is no file .*nowhere\.jpg"),
        (tmp_path / "text.jpg", r"text\.jpg cannot be read \(no image"),
        (tmp_path, "is no file: give an image file"),
        ([], "there is no image"),
        ([3], "an image must be a file, a Pillow image, an array or a tensor, not a int"),
        ([[3, 4], [5, 6]], "not a list"),
        (np.zeros((0, 3, 8, 8)), "there is no image"),
        (np.zeros(5), r"shape \(5,\): expected an array \(height, width\)"),
        (np.zeros((3, 20, 30)), r"shape \(3, 20, 30\): expected an array .* of 1 or 3 channels"),
        (torch.zeros(20, 30, 3), r"shape \(30, 3, 20\): expected .* a tensor .*\(channels, height, width\)"),
        (np.zeros((20, 30, 4), np.uint8), "of 1 or 3 channels"),
        (np.zeros((0, 30)), r"shape \(0, 30\)"),
        (torch.zeros(1, 1, 3, 8, 8), r"shape \(1, 1, 3, 8, 8\)"),
        (
            np.full((8, 8), 255.0),
            "float64 values from 255 to 255: .* between 0 and 1; give bytes as uint8",
        ),
        (torch.full((3, 8, 8), -2.0), "float32 values from -2 to -2: floats must lie between 0 and 1"),
        (np.full((8, 8), np.nan), "no finite numbers"),
        (np.zeros((8, 8), np.int8), "int8 has no known full scale: give uint8, uint16, bool, or floats"),
        (np.zeros((8, 8), np.complex64), "complex64 has no known full scale"),
        (np.full((8, 8), None), "object has no known full scale"),
        (np.full((8, 8), -1, np.int16), "integers outside of 0 to 65535"),
        (torch.full((8, 8), 65536), "integers outside of 0 to 65535"),
    ):
        with pytest.raises(CapiError, match=message):
            transform(model, 8)(images)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 1), (20, 30, 3)], ids=str)
def test__arrays_and_tensors_are_scaled_by_their_dtype(model: CapiEncoder, dtype: str, shape: tuple[int, ...]) -> None:
    """Against plain arithmetic: constant images show the scale, others the layout."""
    make = transform(model, (20, 32))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in model.statistics)
    values = of_dtype(dtype, *shape)
    flat = np.full_like(values, values.max())
    expected = ((float(values.max()) / DTYPES[dtype] - mean) / std).expand(3, 20, 32)
    torch.testing.assert_close(make(flat)[0], expected, rtol=0, atol=1e-4)
    first = torch.from_numpy(values if values.ndim == 2 else np.moveaxis(values, 2, 0).copy())
    given = make(values)
    assert given.shape == (1, 3, 20, 32)
    assert given.std() > 0.1
    assert torch.equal(make(first), given)
    assert torch.equal(make([values, first]), torch.cat([given, given]))
    if values.ndim == 3:
        assert torch.equal(make(np.stack([values, values])), torch.cat([given, given]))
        assert torch.equal(make(first[None]), given)


def test__bytes_in_an_array_are_the_image_of_pillow(model: CapiEncoder) -> None:
    for values in (photo(40, 50), photo(40, 50)[:, :, 0]):
        assert torch.equal(transform(model, 16)(values), transform(model, 16)(Image.fromarray(values)))
    deep = noise(40, 50, dtype=np.uint16)
    assert torch.equal(transform(model, 16)(deep), transform(model, 16)(Image.fromarray(deep)))
    half = torch.rand(3, 8, 8).bfloat16()
    assert torch.equal(transform(model, 8)(half), transform(model, 8)(half.float()))
    needs_gradient = torch.rand(3, 8, 8, requires_grad=True)
    assert not transform(model, 8)(needs_gradient).requires_grad
