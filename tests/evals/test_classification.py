from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from capi.errors import CapiError
from capi.evals.classification import KnnClassification
from capi.evals.labelled import labelled_split
from capi.types import Features

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
COLORS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


class PatchColors:
    """An encoder whose patches are their mean color, and whose pooled vector says nothing."""

    width, patch_size = 3, 4

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
        feature_map = torch.nn.functional.avg_pool2d(images, 4).permute(0, 2, 3, 1)
        nothing = torch.ones(len(images), 3)
        return Features(nothing if pooled else None, torch.zeros(len(images), 0, 3), feature_map)


@pytest.fixture
def colored(tmp_path: Path) -> str:
    """Noisy images in the color of their class; blue is not in `val`."""
    generator = np.random.default_rng(0)
    for split, count, names in (("train", 6, COLORS), ("val", 3, ["red", "green"])):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                noise = generator.normal(0, 25, (24, 20, 3)) + COLORS[name]
                pixels = noise.clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    return str(tmp_path)


def protocol(data: str, **options: object) -> KnnClassification:
    train, val = (labelled_split(data, split) for split in ("train", "val"))
    return KnnClassification.of(train, val, size=(12, 8), **{"mean": MEAN, "std": STD, "neighbours": 5, **options})


def test__classes_that_can_be_seen_are_all_recognised(colored: str) -> None:
    assert protocol(colored).run(PatchColors()) == 1.0


def test__the_feature_asked_for_is_used(colored: str) -> None:
    # All are equally near, so the first training images win, and those are blue.
    assert protocol(colored, feature="pooled").run(PatchColors()) == 0.0


def test__raw_pixels_list_every_size_and_distance_as_scikit_learn_scores_them() -> None:
    generator = torch.Generator().manual_seed(1)
    shades = torch.rand(90, 3, 1, 1, generator=generator) * 120
    pixels = (shades + torch.rand(90, 3, 32, 32, generator=generator) * 120).to(torch.uint8)
    labels = shades.flatten(1).argmax(1)
    knn = KnnClassification(pixels[:50], labels[:50], pixels[50:], labels[50:], MEAN, STD, neighbours=1)
    expected = {}
    for side in (4, 8, 16, 32):
        blocks = pixels.double().unflatten(3, (side, -1)).unflatten(2, (side, -1)).mean((3, 5)).flatten(1)
        train, test = ((part - blocks[:50].mean(0)).numpy() for part in (blocks[:50], blocks[50:]))
        for distance, metric in (("cosine", "cosine"), ("l2", "euclidean")):
            theirs = KNeighborsClassifier(1, metric=metric).fit(train, labels[:50].numpy())
            expected[f"{side} px, {distance}"] = theirs.score(test, labels[50:].numpy())
    assert len(set(expected.values())) > 1
    assert knn.raw_pixels() == pytest.approx(expected)


def test__fewer_labelled_images_than_neighbours_are_an_error(colored: str) -> None:
    with pytest.raises(CapiError, match="18 labelled images are fewer than the 19"):
        protocol(colored, neighbours=19).run(PatchColors())
