"""Photos of noise, to train on in moments."""

from pathlib import Path

import numpy as np
from PIL import Image


def noise_photos(
    folder: Path,
    count: int = 6,
    size: tuple[int, int] = (36, 30),
    *,
    seed: int = 0,
    ending: str = "png",
    digits: int = 1,
) -> Path:
    """The folder with so many photos, named by their numbers, of so many digits at least."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for number in range(count):
        pixels = generator.integers(0, 255, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:0{digits}d}.{ending}")
    return folder
