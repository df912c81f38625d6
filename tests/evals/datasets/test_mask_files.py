import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capi.errors import CapiError
from capi.evals.datasets.mask_files import ColorMasks, MaskFiles, labels_in, read_label_image
from tests.evals.datasets.layouts import mask_bytes

LABELS = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4 + 3


def png(width: int, height: int, bits: int, rows: list[bytes]) -> bytes:
    """A grey PNG of any bit depth, which Pillow cannot write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("palette", [True, False])
def test__the_numbers_of_a_file_are_the_labels_whatever_its_palette(tmp_path: Path, palette: bool) -> None:
    path = tmp_path / "mask.png"
    path.write_bytes(mask_bytes(LABELS, palette=palette))
    with Image.open(path) as image:
        assert image.mode == ("P" if palette else "L")
        assert np.array_equal(np.asarray(image.convert("L")), LABELS) != palette
    assert np.array_equal(read_label_image(path), LABELS)


@pytest.mark.parametrize(
    ("bits", "row", "expected"),
    [(1, 0b01000000, [0, 1]), (2, 0b01110000, [1, 3]), (4, 0b00011111, [1, 15]), (8, 7, [7])],
)
def test__small_bit_depths_are_not_stretched(tmp_path: Path, bits: int, row: int, expected: list[int]) -> None:
    path = tmp_path / "mask.png"
    path.write_bytes(png(len(expected), 1, bits, [bytes([row])]))
    assert read_label_image(path).tolist() == [expected]


def test__labels_beyond_a_byte_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    Image.fromarray(np.array([[5, 1000]], dtype=np.uint16)).save(path)
    assert read_label_image(path).tolist() == [[5, 1000]]
    masks = MaskFiles(tmp_path, ["mask.png"], {5: 0, 1000: 700})
    assert masks.read(0).tolist() == [[0, 700]]


def test__colors_photos_and_broken_files_are_no_masks(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "colour.png")
    Image.new("L", (8, 8)).save(tmp_path / "photo.png", "JPEG")
    (tmp_path / "broken.png").write_bytes(mask_bytes(LABELS, palette=False)[:50])
    for name, message in [
        ("colour", "is a colour image"),
        ("photo", "is a JPEG"),
        ("broken", "cannot be read"),
    ]:
        with pytest.raises(CapiError, match=rf"{name}\.png {message}"):
            read_label_image(tmp_path / f"{name}.png")
    with pytest.raises(CapiError, match=rf"there is no mask {tmp_path}/absent\.png"):
        read_label_image(tmp_path / "absent.png")


def test__a_table_renumbers_and_refuses_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(mask_bytes(np.array([[7, 33], [0, 7]], np.uint8), palette=True))
    assert MaskFiles(tmp_path, ["a.png"], {7: 0, 33: 18, 0: 255}).read(0).tolist() == [[0, 18], [255, 0]]
    for table in ({7: 0, 0: 1}, {7: 0, 33: 1}, {7: 0, 0: 1, 40: 2}):
        with pytest.raises(CapiError, match=r"a\.png holds the label (0|33), which is neither"):
            MaskFiles(tmp_path, ["a.png"], table).read(0)


def test__colors_are_matched_exactly(tmp_path: Path) -> None:
    pixels = np.zeros((1, 3, 3), np.uint8)
    pixels[0, 1], pixels[0, 2] = (64, 128, 64), (192, 0, 128)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    table = {0: 2, 64 * 65536 + 128 * 256 + 64: 0, 192 * 65536 + 128: 1}
    assert ColorMasks(tmp_path, ["a.png"], table).read(0).tolist() == [[2, 0, 1]]
    pixels[0, 2, 0] = 193
    Image.fromarray(pixels).save(tmp_path / "a.png")
    with pytest.raises(CapiError, match="holds the colour 193 0 128"):
        ColorMasks(tmp_path, ["a.png"], table).read(0)
    Image.new("L", (3, 1)).save(tmp_path / "a.png")
    with pytest.raises(CapiError, match=r"is no colour image \(mode L\): its labels should be colours"):
        ColorMasks(tmp_path, ["a.png"], table).read(0)


def test__labels_are_found_with_the_first_mask_that_has_them(tmp_path: Path) -> None:
    for name, values in [("a", [1, 2]), ("b", [2, 9]), ("c", [1, 9])]:
        (tmp_path / f"{name}.png").write_bytes(mask_bytes(np.array([values], np.uint8), palette=False))
    masks = MaskFiles(tmp_path, ["a.png", "b.png", "c.png"])
    assert labels_in(masks) == {1, 2, 9}


def test__a_source_of_masks_travels_to_other_processes_and_its_fingerprint_knows_the_table(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(mask_bytes(LABELS, palette=False))
    masks = MaskFiles(tmp_path, ["a.png"], {int(label): 0 for label in LABELS.flat})
    copy = pickle.loads(pickle.dumps(masks))  # noqa: S301
    assert np.array_equal(copy.read(0), masks.read(0))
    assert copy.fingerprint == masks.fingerprint
    assert MaskFiles(tmp_path, ["a.png"], {3: 1}).fingerprint != masks.fingerprint
    assert MaskFiles(tmp_path / "moved", ["a.png"], masks.table).fingerprint == masks.fingerprint
