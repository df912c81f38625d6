"""Small encoders, images and masks that the tests of this folder share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.data.sources import EncodedImages
from capi.evals.results import Outcome
from capi.evals.tasks import AnsweredImages, ClassificationData, LabeledImages
from capi.types import Features
from tests.data.pictures import encoded

COLORS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


class PatchColors:
    """An encoder whose patches are their mean colour, and whose pooled vector is the colour of the first one."""

    width, patch_size = 3, 4

    def __init__(self, gives_pooled: bool = True) -> None:
        self.gives_pooled = gives_pooled

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
        feature_map = F.avg_pool2d(images, self.patch_size).permute(0, 2, 3, 1)
        first = feature_map[:, 0, 0] if pooled and self.gives_pooled else None
        return Features(first, torch.zeros(len(images), 0, self.width), feature_map)


class RandomPatches(nn.Module):
    """A module with weights: a random linear map of each patch, and a pooled vector that is another one's mean."""

    def __init__(self, width: int = 8, patch_size: int = 4, seed: int = 0) -> None:
        super().__init__()
        self.width, self.patch_size = width, patch_size
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(2 * width, 3, patch_size, patch_size, generator=generator) / patch_size)

    def forward(self, images: Tensor, *, pooled: bool = True) -> Features:
        patches = F.conv2d(images, self.weight, stride=self.patch_size).permute(0, 2, 3, 1)
        first = patches[..., self.width :].mean((1, 2)) if pooled else None
        return Features(first, images.new_zeros(len(images), 0, self.width), patches[..., : self.width])


class Masks:
    """Masks in memory."""

    def __init__(self, masks: Sequence[npt.NDArray[Any]]) -> None:
        self.masks = list(masks)

    def __len__(self) -> int:
        return len(self.masks)

    def name(self, index: int) -> str:
        return f"mask {index}"

    def read(self, index: int) -> npt.NDArray[Any]:
        return self.masks[index]

    @property
    def fingerprint(self) -> str:
        return "masks"


def source_of(images: Sequence[npt.NDArray[Any]]) -> EncodedImages:
    """Arrays (height, width, 3) as PNG files in memory."""
    return EncodedImages(
        [f"image {number}" for number in range(len(images))], [encoded(image, "PNG") for image in images]
    )


def shades(
    labels: Sequence[int], *, spread: float = 25, seed: int = 0, size: tuple[int, int] = (24, 20)
) -> EncodedImages:
    """An image for each label, of the colour of that label, with noise."""
    generator = np.random.default_rng(seed)
    colors = list(COLORS.values())
    noisy = [generator.normal(0, spread, (*size, 3)) + colors[label] for label in labels]
    return source_of([image.clip(0, 255).astype(np.uint8) for image in noisy])


def labeled(labels: Sequence[int], **options: Any) -> LabeledImages:
    return LabeledImages(shades(labels, **options), torch.tensor(labels))


def answered(labels: Sequence[int], **options: Any) -> AnsweredImages:
    """A test with one answer to each image."""
    return AnsweredImages(shades(labels, **options), torch.tensor(labels)[:, None])


def colored_data(train: int = 8, test: int = 4, **options: Any) -> ClassificationData:
    """Data with so many images of each of three colours."""
    numbers = list(range(3))
    return ClassificationData(
        tuple(COLORS),
        labeled(numbers * train, **options),
        {"test": answered(numbers * test, **{**options, "seed": 1})},
    )


def beside_choice(outcome: Outcome) -> list[str]:
    """The warnings but for that of a choice by few images, which toys always have."""
    return [warning for warning in outcome.warnings if "held-out image" not in warning]
