"""Reading training crops from JPEG files against plain Pillow, which decodes, converts, cuts and resizes.

    python benchmarks/data.py
    python benchmarks/data.py --shards 2000

With --shards: tar shards against loose files, each in the order that a run reads it in, from memory and from the disk.
For the latter the contents are dropped from the memory of the system before each round (Linux). Names and inodes of
loose files stay there, so this favours loose files against a disk that was never read.
"""

import argparse
import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measure import Work, interleaved_best
from PIL import Image

from capi.data.crops import crop_draws, random_box
from capi.data.decoding import Box, Decoder, Pixels
from capi.data.locations import open_images
from capi.data.order import order_of
from capi.data.reader import ImageReader, read_bytes
from capi.data.shard_writer import PackingSettings, pack
from capi.data.sources import Files, ImageSource, image_folder
from capi.runtime.randomness import sample_keys

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
    parser.add_argument("--shards", type=int, help="also compare so many photos in tar shards with loose files")
    parser.add_argument("--folder", type=Path, help="where --shards writes, on the disk to be measured")
    arguments = parser.parse_args()
    print(f"{'':8} {'Pillow':>10} {'ours':>10} {'cached':>10}   images/s, crops of 0.6 to 1 of the area to 224 px")
    for side in arguments.sides:
        with tempfile.TemporaryDirectory() as folder:
            count = arguments.images or max(PIXELS * 4 // (3 * side**2), 1)
            compare(write_photos(Path(folder), count, side), side, arguments.rounds)
    if arguments.shards:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            compare_shards(Path(folder), arguments.shards, arguments.sides[0], arguments.rounds)


def compare(source: Files, side: int, rounds: int) -> None:
    decoder = Decoder(reduced=True, crop_first=True)
    reader, cached = (ImageReader(source, decoder, room) for room in (0, 2**40))
    boxed, boxed_cached = (ImageReader(source, replace(decoder, crop_first=False), room) for room in (0, 2**40))
    draws = crop_draws(sample_keys(0, 0, torch.arange(len(source))))
    boxes = [random_box(reader.size(index), row, SCALE, ASPECT) for index, row in enumerate(draws)]

    def crops(reader: ImageReader) -> list[Pixels]:
        return [
            reader.crop(index, random_box(reader.size(index), row, SCALE, ASPECT), SIZE)
            for index, row in enumerate(draws)
        ]

    def plain() -> list[Pixels]:
        return [plain_crop(source.root / source.name(index), box) for index, box in enumerate(boxes)]

    difference = np.mean([np.abs(a.astype(float) - b) for a, b in zip(crops(reader), plain(), strict=True)])
    readers = {"ours": reader, "cached": cached, "boxed": boxed, "boxed, cached": boxed_cached}
    works: dict[str, Work] = {"plain": plain}
    works |= {name: partial(crops, each) for name, each in readers.items()}
    seconds = interleaved_best(works, rounds)
    speed = {name: len(source) / value for name, value in seconds.items()}
    print(f"{side:5} px {speed['plain']:10.1f} {speed['ours']:10.1f} {speed['cached']:10.1f}")
    ours, cached_ratio = speed["ours"] / speed["plain"], speed["cached"] / speed["plain"]
    print(f"{'':8} ours {ours:.2f} x Pillow, cached {cached_ratio:.2f} x; pixels differ by {difference:.2f} of 255")
    first, first_cached = speed["ours"] / speed["boxed"], speed["cached"] / speed["boxed, cached"]
    print(f"{'':8} cut, then resized: {first:.3f} x as fast as resized with a box, cached {first_cached:.3f} x")


def compare_shards(folder: Path, count: int, side: int, rounds: int) -> None:
    """Bytes alone, and crops of them; every round reads all images of both kinds, one after the other."""
    (folder / "loose").mkdir()
    loose = write_photos(folder / "loose", count, side)
    packed = pack(loose, folder / "shards", PackingSettings(per_shard=max(count // 8, 1)))
    sources: dict[str, ImageSource] = {"loose files": loose, "shards": open_images(packed.path)}
    print(f"{count} JPEGs of {side} px, {packed.bytes / count / 1e3:.0f} kB each, {packed.shards} shards: images/s")
    for what, from_disk in (("bytes, warm", False), ("bytes, from disk", True), ("crops, warm", False)):
        best = dict.fromkeys(sources, float("inf"))
        for number in range(rounds + 1):
            for name, source in sources.items():
                if from_disk:
                    forget(folder)
                best[name] = min(best[name], seconds_of(source, number, crops=what.startswith("crops")))
        speed = {name: count / seconds for name, seconds in best.items()}
        speeds = ", ".join(f"{name} {value:.0f}" for name, value in speed.items())
        print(f"{what:17} {speeds}: shards {speed['shards'] / speed['loose files']:.2f} x")


def seconds_of(source: ImageSource, number: int, *, crops: bool) -> float:
    """The time of one pass over a source, in the order of a run."""
    size, reader = len(source), ImageReader(source, Decoder(reduced=True, crop_first=True))
    order = order_of(source, 0).images(torch.arange(number * size, (number + 1) * size)).tolist()
    draws = crop_draws(sample_keys(0, number, torch.arange(size)))
    start = time.perf_counter()
    for index, row in zip(order, draws, strict=True):
        if crops:
            reader.crop(index, random_box(reader.size(index), row, SCALE, ASPECT), SIZE)
        else:
            read_bytes(source, index)
    return time.perf_counter() - start


def forget(folder: Path) -> None:
    """Have the system drop what it keeps of these files."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


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
