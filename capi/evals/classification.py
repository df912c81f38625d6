"""k-NN classification of labelled images by a frozen encoder: a protocol with one `run`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.evals.features import FeatureKind, evaluation_images, image_features
from capi.evals.labelled import LabelledImages
from capi.evals.neighbours import Distance, NearestNeighbours
from capi.types import VisionEncoder

# What raw pixels are tried at: the baseline takes whichever is best for it.
PIXEL_SIDES = (4, 8, 16, 32)
PIXEL_DISTANCES: tuple[Distance, ...] = ("cosine", "l2")


@dataclass(frozen=True)
class KnnClassification:
    """Classify the images of `test` by their neighbours in `train`. Pixels are decoded once and kept."""

    train_pixels: Tensor
    train_labels: Tensor
    test_pixels: Tensor
    test_labels: Tensor
    mean: Sequence[float]
    std: Sequence[float]
    neighbours: int = 10
    feature: FeatureKind = "mean_patch"
    device: torch.device | str = "cpu"

    @classmethod
    def of(
        cls, train: LabelledImages, test: LabelledImages, *, size: tuple[int, int], channels: int = 3, **options: object
    ) -> "KnnClassification":
        train_pixels, test_pixels = (
            evaluation_images(part.images, range(len(part.images)), size, channels) for part in (train, test)
        )
        return cls(train_pixels, train.labels, test_pixels, test.labels, **options)  # type: ignore[arg-type]

    def run(self, encoder: VisionEncoder) -> float:
        """Accuracy."""
        features = [self._features(encoder, pixels) for pixels in (self.train_pixels, self.test_pixels)]
        classifier = NearestNeighbours(self.neighbours).fit(features[0], self.train_labels)
        return classifier.score(features[1], self.test_labels)

    def _features(self, encoder: VisionEncoder, pixels: Tensor) -> Tensor:
        return image_features(encoder, pixels, mean=self.mean, std=self.std, kind=self.feature, device=self.device)

    def raw_pixels(self) -> dict[str, float]:
        """Accuracy of the pixels themselves, for several sizes and distances."""
        return dict(self._pixel_scores())

    def _pixel_scores(self) -> Iterator[tuple[str, float]]:
        for side in PIXEL_SIDES:
            train, test = (
                F.interpolate(pixels.float(), size=(side, side), mode="area").flatten(1)
                for pixels in (self.train_pixels, self.test_pixels)
            )
            centre = train.mean(0)
            for distance in PIXEL_DISTANCES:
                classifier = NearestNeighbours(self.neighbours, distance).fit(train - centre, self.train_labels)
                yield f"{side} px, {distance}", classifier.score(test - centre, self.test_labels)
