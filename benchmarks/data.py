"""Reading training crops from JPEG files against plain Pillow, which decodes, converts, cuts and resizes.

python benchmarks/data.py
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from measure import interleaved_best
from PIL import Image

from capi.data.crops import crop_draws, random_box
from capi.data.decoding import Box, Decoder, Pixels
from capi.data.reader import Reader
from capi.data.sources import Files, image_folder
from capi.randomness import sample_keys

SIZE = (224, 224)
SCALE, ASPECT = (0.6, 1.0), (3 / 4, 4 / 3)
# Decoded pixels of a round, whatever the size of the images.
PIXELS = 12_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--sides", type=int, nargs="+", default=[500, 2000], help="longer side of the photos, in pixels"
    )
    parser.add_argument("--images", type=int, help="photos of each size (default: 12 megapixels of them)")
    arguments = parser.parse_args()
    print(f"{'':8} {'Pillow':>10} {'ours':>10} {'cached':>10}   images/s, crops of 0.6 to 1 of the area to 224 px")
    for side in arguments.sides:
        with tempfile.TemporaryDirectory() as folder:
            count = arguments.images or max(PIXELS * 4 // (3 * side**2), 1)
            compare(write_photos(Path(folder), count, side), side, arguments.rounds)


def compare(source: Files, side: int, rounds: int) -> None:
    reader, cached = (Reader(source, Decoder(reduced=True), room) for room in (0, 2**40))
    draws = crop_draws(sample_keys(0, 0, torch.arange(len(source))))
    boxes = [random_box(reader.size(index), row, SCALE, ASPECT) for index, row in enumerate(draws)]

    def crops(reader: Reader) -> list[Pixels]:
        return [
            reader.crop(index, random_box(reader.size(index), row, SCALE, ASPECT), SIZE)
            for index, row in enumerate(draws)
        ]

    def plain() -> list[Pixels]:
        return [plain_crop(source.root / source.name(index), box) for index, box in enumerate(boxes)]

    difference = np.mean([np.abs(a.astype(float) - b) for a, b in zip(crops(reader), plain(), strict=True)])
    seconds = interleaved_best({"plain": plain, "ours": lambda: crops(reader), "cached": lambda: crops(cached)}, rounds)
    speed = {name: len(source) / value for name, value in seconds.items()}
    print(f"{side:5} px {speed['plain']:10.1f} {speed['ours']:10.1f} {speed['cached']:10.1f}")
    ours, cached_ratio = speed["ours"] / speed["plain"], speed["cached"] / speed["plain"]
    print(f"{'':8} ours {ours:.2f} x Pillow, cached {cached_ratio:.2f} x; pixels differ by {difference:.2f} of 255")


def plain_crop(path: Path, box: Box) -> Pixels:
    with Image.open(path) as image:
        cut = image.convert("RGB").crop((int(box.left), int(box.top), int(box.right), int(box.bottom)))
    return np.asarray(cut.resize((SIZE[1], SIZE[0]), Image.Resampling.BICUBIC)).transpose(2, 0, 1)


def write_photos(folder: Path, count: int, side: int) -> Files:
    """JPEGs of 4 : 3 with detail at every scale, as photographs have, weaker the finer it is."""
    generator, width, height = np.random.default_rng(0), side, side * 3 // 4
    for number in range(count):
        pixels = np.full((height, width, 3), 128.0, dtype=np.float32)
        for octave in range(2, max(side, 8).bit_length()):
            coarse = generator.integers(0, 256, (2**octave * 3 // 4, 2**octave, 3), dtype=np.uint8)
            soft = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            pixels += (np.asarray(soft, dtype=np.float32) - 127.5) * 0.6 ** (octave - 2)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:04}.jpg", quality=90)
    return image_folder(folder)


if __name__ == "__main__":
    main()
