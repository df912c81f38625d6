"""Small images that the tests of this folder make for themselves."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[Any]


def noise(*shape: int, dtype: type = np.uint8, seed: int = 0) -> Pixels:
    """Every value of the type, at random."""
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max + 1, shape, dtype=dtype)


# What arrays of images come as, and what is full scale for each.
DTYPES = {
    **{"uint8": 255, "bool": 1, "float16": 1, "float32": 1, "float64": 1},
    **dict.fromkeys(("uint16", "int16", "int32", "uint32", "int64"), 65535),
}


def of_dtype(dtype: str, *shape: int) -> Pixels:
    """Values that fill the range of a dtype, as far as it reaches."""
    values = np.random.default_rng(0).random(shape)
    largest = np.iinfo(np.int16).max if dtype == "int16" else DTYPES[dtype]
    return values > 0.5 if dtype == "bool" else (values * largest).astype(dtype)


def photo(height: int, width: int, seed: int = 0) -> Pixels:
    """Soft shapes with some grain, as in a photograph: (height, width, 3) bytes."""
    coarse = Image.fromarray(noise(max(height // 32, 2), max(width // 32, 2), 3, seed=seed))
    soft = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    grain = noise(height, width, 1, seed=seed + 1).astype(np.int16) // 32 - 4
    return np.clip(soft + grain, 0, 255).astype(np.uint8)


def encoded(image: Pixels | Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of a file of this format."""
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()
