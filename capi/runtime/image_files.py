"""Image files, opened with limits: regular files of bounded size, in the formats of photographs alone."""

import io
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image, UnidentifiedImageError, features

from capi.errors import CapiError
from capi.runtime.documents import read_regular, regular_size

_CODECS = {*features.get_supported_modules(), *features.get_supported_codecs()}
# Others stay outside: EPS runs another program, for one, and few of the others are about photographs. Pillow opens
# MPO, a JPEG with several pictures, as JPEG.
IMAGE_FORMATS = (
    *("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM"),
    # What older releases of Pillow, or builds without the codec, do not read.
    *(kind for kind, codec in (("AVIF", "avif"), ("JPEG2000", "jpg_2000")) if codec in _CODECS),
    # Read by pillow-heif (extra `heic`).
    "HEIF",
)
# What a file begins with, and what reads it, where it is not there.
_HEIF_BRANDS = frozenset(b"heic heix heim heis hevc hevx hevm hevs mif1 msf1".split())
_JPEG2000 = (b"\x00\x00\x00\x0cjP  ", b"\xff\x4f\xff\x51")
# Bytes of one image file that is read whole: 178 megapixels of 16-bit RGB are 1.07 GB without compression.
MAX_IMAGE_BYTES = 2**31


def read_image(path: Path) -> bytes:
    """The bytes of an image file; a pipe, a device or a file beyond all images is an `OSError`, and nothing waits."""
    return read_regular(path, limit=MAX_IMAGE_BYTES)


def open_image(source: Path | bytes, formats: Sequence[str] = IMAGE_FORMATS) -> Image.Image:
    """An image of one of these formats; from memory, since Pillow leaves the file open where it does not decode."""
    content = source if isinstance(source, bytes) else read_image(source)
    if "HEIF" in formats and content[4:8] == b"ftyp" and content[8:12] in _HEIF_BRANDS:
        _register_heif()
    try:
        return Image.open(
            io.BytesIO(content), formats=[kind for kind in formats if kind != "HEIF" or kind in Image.OPEN]
        )
    except UnidentifiedImageError as error:
        missing = _missing_reader(content)
        if missing is None:
            raise
        raise OSError(missing) from error


def _register_heif() -> None:
    """Let Pillow read HEIC where the extra is installed."""
    if "HEIF" not in Image.OPEN:
        with suppress(ImportError):
            from pillow_heif import register_heif_opener

            # Workers decode beside each other already.
            register_heif_opener(decode_threads=1)


def _missing_reader(content: bytes) -> str | None:
    """What would have to be installed to read an image of which Pillow does not know the format."""
    kind = content[8:12] if content[4:8] == b"ftyp" else b""
    if kind in _HEIF_BRANDS and "HEIF" not in Image.OPEN:
        return "a HEIC photo needs an extra: pip install 'capi[heic]'"
    if kind in {b"avif", b"avis"} and "AVIF" not in IMAGE_FORMATS:
        return "an AVIF image needs Pillow 11.3 or later, with its AVIF codec: pip install --upgrade pillow"
    if content.startswith(_JPEG2000) and "JPEG2000" not in IMAGE_FORMATS:
        return "a JPEG 2000 image needs a Pillow that was built with OpenJPEG: pip install --upgrade pillow"
    return None


def refuse_special(path: Path) -> None:
    """An `OSError` for what is missing or is not a regular file, before something opens it that would wait."""
    regular_size(os.stat(path), 2**63)


def is_below(path: Path | str, roots: Iterable[Path | str]) -> bool:
    """Whether a path lies in one of these folders, with all links followed."""
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(root)) for root in roots)


def refuse_outside(root: Path, names: Sequence[str], source: str) -> None:
    """Every name that a list gives must be a file below its folder: no absolute path elsewhere, no `..`, no link.

    A look at each folder, not at each file: the system says there which entries are links, pipes or devices.
    """
    by_folder: dict[str, set[str]] = {}
    for name in names:
        if not name or "\0" in name or "\n" in name:
            raise CapiError(f"{source} names the file {name[:60]!r}: expected the name of an image")
        folder, _, base = name.rpartition("/")
        by_folder.setdefault(folder or ("/" if name.startswith("/") else ""), set()).add(base)
    for folder, bases in by_folder.items():
        place = root / folder
        if not is_below(place, [root]):
            raise _outside(source, place / min(bases), root)
        for path in _unusual(place, bases):
            if not is_below(path, [root]):
                raise _outside(source, path, root)
            if path.exists() and not path.is_file():
                raise CapiError(f"{source} names {path}, which is a folder, pipe or device: expected an image file")


def _unusual(folder: Path, names: set[str]) -> list[Path]:
    """Those of the names that are not plainly a file there; missing ones raise where they are read."""
    unusual = [folder / name for name in names & {".", "..", ""}]
    try:
        with os.scandir(folder) as entries:
            unusual += [
                Path(entry.path)
                for entry in entries
                if entry.name in names and not entry.is_file(follow_symlinks=False)
            ]
    except OSError:
        pass
    return unusual


def _outside(source: str, path: Path, root: Path) -> CapiError:
    return CapiError(
        f"{source} names {path}, which does not lie below {root}: move the images there, or say which folder they are "
        "in, as FILE.csv?images=FOLDER"
    )
