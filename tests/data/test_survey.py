from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capi.data.decoding import Decoder
from capi.data.reader import ImageReader
from capi.data.sources import EncodedImages, Files, ImageSource, image_folder, masks_warning
from capi.data.survey import _joined, check_data, summarize, survey
from capi.errors import CapiError
from tests.data.pictures import encoded, noise, photo


def memory(contents: list[bytes]) -> EncodedImages:
    return EncodedImages([f"{number:02d}.png" for number in range(len(contents))], contents)


@pytest.fixture(scope="module")
def mixed() -> EncodedImages:
    """Photos of several sizes and formats, copies, one that was scaled and saved again, and broken ones."""
    photos = [photo(96 + 2 * number, 128, seed=7 * number) for number in range(12)]
    contents = [encoded(pixels, "PNG" if number < 4 else "JPEG") for number, pixels in enumerate(photos)]
    smaller = Image.fromarray(photos[2]).resize((96, 75), Image.Resampling.LANCZOS)
    contents += [contents[0], contents[5], contents[0], encoded(smaller, "WEBP", quality=95)]
    return memory([*contents, b"no image", contents[4][:200]])


def test__everything_is_counted(mixed: EncodedImages) -> None:
    data = survey(mixed, Decoder(reduced=True))
    assert (data.total, data.looked_at, data.readable) == (18, 18, 16)
    assert data.formats == {"JPEG": 9, "PNG": 6, "WEBP": 1}
    assert data.broken["16.png"] == "no image that can be read"
    assert set(data.broken) == {"16.png", "17.png"}
    assert data.bytes == sum(len(content) for content in mixed.contents[:16])
    heights = [96 + 2 * number for number in (*range(12), 0, 5, 0)] + [75]
    for share in (0, 5, 50, 95, 100):
        assert data.heights[str(share)] == np.percentile(heights, share)
    assert data.widths["100"] == 128
    assert data.images_per_second > 0
    assert data.as_record()["images_per_second"] == data.images_per_second


def test__copies_and_images_that_look_alike_are_named(mixed: EncodedImages) -> None:
    data = survey(mixed, Decoder(reduced=True))
    assert data.copies == 3
    assert data.copied == [["00.png", "12.png", "14.png"], ["05.png", "13.png"]]
    assert data.alike == 1
    assert data.looking_alike == [["02.png", "15.png"]]


def test__close_bits_are_joined_as_by_comparing_all() -> None:
    generator = np.random.default_rng(0)
    looks = generator.integers(-(2**63), 2**63 - 1, 40, dtype=np.int64)
    # Some differ from an earlier one in up to seven bits, and some from those.
    for number in range(10, 40):
        looks[number] = looks[number - 10]
        for bit in generator.choice(64, number % 8, replace=False).tolist():
            looks[number] ^= np.int64(1) << np.int64(bit)
    groups, expected = _joined(looks), list(range(40))
    apart = [[bin(int(image ^ other) & (2**64 - 1)).count("1") for other in looks] for image in looks]
    for _ in range(40):
        expected = [min(expected[other] for other in range(40) if apart[image][other] <= 4) for image in range(40)]
    assert groups.tolist() == expected
    assert 10 < len(set(expected)) < 40


def test__the_statistics_are_those_that_auto_takes(mixed: EncodedImages) -> None:
    data, auto = survey(mixed, Decoder(reduced=True)), summarize(ImageReader(mixed, Decoder(reduced=True)))
    assert data.mean == pytest.approx(auto.mean, abs=1e-12)
    assert data.std == pytest.approx(auto.std, abs=1e-12)


# A machine may have fewer cores than workers.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test__workers_change_nothing(mixed: EncodedImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capi.data.survey._CHUNK", 4)
    ways = [survey(mixed, Decoder(reduced=True), workers=workers).as_record() for workers in (0, 2)]
    for record in ways:
        for key in ("seconds", "images_per_second", "workers"):
            del record[key]
    assert ways[0] == ways[1]


def test__a_limit_spreads_evenly() -> None:
    contents = [encoded(np.full((8, 8, 3), number, dtype=np.uint8), "PNG") for number in range(100)]
    data = survey(memory(contents), Decoder(), limit=5)
    assert (data.total, data.looked_at, data.readable) == (100, 5, 5)
    assert data.mean == pytest.approx([(0 + 24 + 49 + 74 + 99) / 5 / 255] * 3)


def test__when_nothing_can_be_read_it_says_so() -> None:
    data = survey(memory([b"no image", b"nor this"]), Decoder())
    assert (data.readable, len(data.broken), data.mean, data.copies) == (0, 2, [], 0)


def test__gray_and_many_channels(tmp_path: Path) -> None:
    data = survey(memory([encoded(noise(20, 20), "PNG")]), Decoder(channels=1))
    assert len(data.mean) == 1


def test__an_error_of_reading_is_a_broken_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capi.runtime.retry.FILE_PAUSES", ())

    class Failing(EncodedImages):
        def read(self, index: int) -> Path | bytes:
            raise OSError(5, "Input/output error")

    assert survey(Failing(["a"], [b""]), Decoder()).broken == {"a": "Input/output error"}


def test__what_is_missing_to_read_any_image_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(noise(8, 8)).save(tmp_path / "a.tif")
    monkeypatch.setattr("capi.data.tiff.has_tiff_reader", lambda: False)
    source: ImageSource = image_folder(tmp_path)
    with pytest.raises(CapiError, match=r"capi\[tiff\]"):
        survey(source, Decoder(channels=5))


def test__the_range_is_that_of_the_pixels_and_not_of_thumbnails(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    # One bright pixel in the dark, which a thumbnail averages away, and which makes its filter swing below 0.
    values = np.zeros((256, 256, 5), dtype=np.uint16)
    values[128, 128] = [100, 200, 300, 400, 3000]
    tifffile.imwrite(tmp_path / "a.tif", values, planarconfig="contig", metadata={"axes": "YXS"})
    data = survey(image_folder(tmp_path), Decoder(channels=5))
    assert data.lowest == [0.0] * 5
    assert data.highest == pytest.approx([value / 65535 for value in (100, 200, 300, 400, 3000)])
    shown_range = data.summary()[1]["range"]
    assert "data.mean=auto data.std=auto" in shown_range
    assert "0.0458" in shown_range


def test__one_odd_image_does_not_outvote_the_others_and_is_named(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    for number in range(5):
        values = np.random.default_rng(number).integers(0, 4096, (64, 64, 5), dtype=np.uint16)
        tifffile.imwrite(tmp_path / f"{number}.tif", values, planarconfig="contig", metadata={"axes": "YXS"})
    Image.fromarray(photo(40, 40, 0)).save(tmp_path / "a.jpg")
    data = check_data(tmp_path, workers=1)
    assert (data.readable, len(data.mean), data.broken) == (5, 5, {"a.jpg": "3 channels in place of 5"})
    assert data.summary()[1]["others"] == (
        "1 of 6 images that were looked at has other than 5 channels (a.jpg: 3): move it elsewhere, since a run with "
        "model.channels=5 cannot read it"
    )
    wrong = check_data(tmp_path, workers=1, channels=3)
    assert wrong.other_channels == {5: [f"{number}.tif" for number in range(5)]}
    assert wrong.summary()[1]["others"].endswith("(0.tif: 5): use model.channels=5 (capi data check: --channels 5)")


@pytest.mark.parametrize("mode", ["L", "P", "RGB", "I;16"])
def test__masks_alone_are_distinguished_from_photos(tmp_path: Path, mode: str) -> None:
    for number in range(6):
        labels = np.zeros((90, 120), dtype=np.uint16 if mode == "I;16" else np.uint8)
        labels[number : 40 + number, 10:70] = 3 + number
        labels[50:80, 30 : 90 + number] = 9
        mask = Image.fromarray(labels if mode != "RGB" else np.repeat(labels[..., None], 3, 2) * np.uint8(20))
        if mode == "P":
            mask = mask.convert("P")
            mask.putpalette([part for value in range(256) for part in (value, 255 - value, value * 7 % 256)])
        mask.save(tmp_path / f"{number}.png")
    data = survey(image_folder(tmp_path), Decoder(reduced=True))
    assert data.masks is not None
    assert data.masks.startswith("6 of 6 images look like masks, areas of few values")
    for number in range(6):
        Image.fromarray(photo(90, 120, number)).save(tmp_path / f"photo{number}.png")
    assert survey(image_folder(tmp_path), Decoder(reduced=True)).masks is None


def test__dark_images_with_a_black_background_are_no_masks() -> None:
    values = np.zeros((100, 100), dtype=np.uint8)
    values[30:60, 30:60] = np.random.default_rng(0).integers(0, 256, (30, 30))
    assert survey(memory([encoded(values, "PNG")] * 3), Decoder()).masks is None


MASKED = (
    (["images/a.jpg", "images/b.jpg", "masks/a.png", "masks/b.png"], 2, "images"),
    (["x/leftImg8bit/ulm/a_img.png", "x/gtFine/ulm/a_ids.png"], 1, "x/leftImg8bit"),
    (["images/a.jpg", "annotations/trimaps/a.png", "annotations/trimaps/b.png"], 2, "images"),
    (["scenes/a.jpg", "scenes/b.jpg", "truth/a.png", "truth/b.png"], 2, "scenes"),
)


@pytest.mark.parametrize(("names", "masks", "photos"), MASKED)
def test__masks_beside_photos_are_named(tmp_path: Path, names: list[str], masks: int, photos: str) -> None:
    warning = masks_warning(Files(tmp_path, names))
    assert warning == f"{masks} of {len(names)} files look like masks: give --data {tmp_path / photos}"


@pytest.mark.parametrize(
    "names",
    [
        ["cats/1.jpg", "cats/2.jpg", "dogs/1.jpg", "dogs/2.jpg"],
        # A class of people who wear masks.
        ["gloves/x.jpg", "mask/y.jpg", "helmet/z.jpg"],
        ["masks/a.png", "masks/b.png"],
        ["a.jpg", "b.jpg"],
    ],
)
def test__class_folders_are_no_masks(tmp_path: Path, names: list[str]) -> None:
    assert masks_warning(Files(tmp_path, names)) is None
