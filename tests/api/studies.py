"""A small study for tests: photos with classes and masks, and settings that make a run take a second."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

SMALL = (
    "data.image_size=16",
    "data.workers=0",
    "model.width=16",
    "model.depth=2",
    "model.patch_size=4",
    "clustering.prototypes=8",
    "masking.predict=2",
    "optimization.batch_size=4",
    "optimization.steps=4",
    "run.log_steps=2",
)
QUICK = ("workers=0", "iterations=4", "validation_share=0.25")


def labeled_photos(folder: Path, images: int = 24) -> Path:
    """Two classes that differ in colour, and a square in each photo that its mask names."""
    generator = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    rows = []
    for number in range(images):
        kind = number % 2
        photo = generator.integers(0, 100, (20, 20, 3), dtype=np.uint8)
        mask = np.zeros((20, 20), np.uint8)
        photo[5:15, 5:15, kind] += 150
        mask[5:15, 5:15] = 1 + kind
        Image.fromarray(photo).save(folder / "images" / f"{number}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
        split = "test" if number % 3 == 2 else "train"
        rows.append((f"images/{number}.png", f"masks/{number}.png", split, "red" if kind == 0 else "green"))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "mask", "split", "label"), *rows])
    return folder
