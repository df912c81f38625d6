"""Segmentation as the paper tells it, slowly: with scikit-learn, patch by patch and pixel by pixel."""

import io
from collections import Counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from capi.data.crops import normalize
from capi.evals.tasks import MaskedImages, SegmentationData
from capi.types import IMAGENET, VisionEncoder

SIZE, PATCH = (12, 8), 4


def in_patches(values: np.ndarray) -> np.ndarray:
    """A value for each patch, spread over its pixels."""
    return values.repeat(PATCH, 0).repeat(PATCH, 1)


def pixels_of(images: MaskedImages, numbers: Tensor | range) -> Tensor:
    return torch.stack([torch.tensor(_decoded(images, int(number))) for number in numbers]).permute(0, 3, 1, 2)


def _decoded(images: MaskedImages, number: int) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(images.images.contents[number])))  # type: ignore[attr-defined]


class Reference:
    """The protocols as the paper tells them, patch by patch and pixel by pixel."""

    def __init__(self, encoder: VisionEncoder, data: SegmentationData, standardize: bool = True) -> None:
        self.encoder, self.data, self.standardize = encoder, data, standardize

    def features(self, images: MaskedImages, numbers: Any) -> np.ndarray:
        """(images, rows, columns, width)"""
        with torch.no_grad():
            pixels = normalize(pixels_of(images, numbers), *IMAGENET)
            return self.encoder(pixels, pooled=False).feature_map.double().numpy()

    def patches(self, numbers: Any) -> tuple[np.ndarray, list[np.ndarray], list[int]]:
        """Features, pixel labels and label of every patch whose label counts."""
        rows, blocks, labels = [], [], []
        for features, number in zip(self.features(self.data.train, numbers), numbers, strict=True):
            mask = self.data.train.masks.read(int(number))
            for row in range(features.shape[0]):
                for column in range(features.shape[1]):
                    block = mask[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
                    counts = Counter(block.flatten().tolist())
                    label = min(counts, key=lambda each: (-counts[each], each))
                    if label not in self.data.ignored:
                        rows.append(features[row, column])
                        blocks.append(block)
                        labels.append(label)
        return np.array(rows), blocks, labels

    def standard(self, fit: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and std of all patches of these images, also of those whose label is ignored."""
        features = self.features(self.data.train, fit)
        features = features.reshape(-1, features.shape[-1])
        width = features.shape[1]
        return (features.mean(0), features.std(0)) if self.standardize else (np.zeros(width), np.ones(width))

    def knn(
        self, fit: Any, images: MaskedImages, numbers: Any, k: int, distance: str, clean: bool, of: Any = None
    ) -> list[np.ndarray]:
        """Predicted labels of images, with the statistics of the images `of`, or of those to fit on."""
        features, blocks, _ = self.patches(fit)
        mean, deviation = self.standard(fit if of is None else of)
        search = NearestNeighbors(n_neighbors=k, metric={"l2": "euclidean"}.get(distance, distance), algorithm="brute")
        search.fit((features - mean) / deviation)
        result = []
        for feature_map in self.features(images, numbers):
            picture = np.zeros(SIZE, dtype=int)
            for row in range(feature_map.shape[0]):
                for column in range(feature_map.shape[1]):
                    asked = (feature_map[row, column] - mean) / deviation
                    nearest = search.kneighbors(asked[None], return_distance=False)[0]
                    block = self.vote([blocks[number] for number in nearest], clean)
                    picture[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = block
            result.append(picture)
        return result

    def vote(self, blocks: list[np.ndarray], clean: bool) -> np.ndarray:
        result = np.zeros((PATCH, PATCH), dtype=int)
        for y in range(PATCH):
            for x in range(PATCH):
                voters = [int(block[y, x]) for block in blocks]
                voters = [label for label in voters if not (clean and label in self.data.ignored)]
                if voters:
                    most = max(Counter(voters).values())
                    result[y, x] = min(label for label in voters if voters.count(label) == most)
                else:
                    everywhere = Counter(int(label) for block in blocks for label in block.flatten())
                    allowed = [label for label in everywhere if label not in self.data.ignored]
                    result[y, x] = min(allowed, key=lambda label: (-everywhere[label], label))
        return result

    def logistic(
        self, fit: Any, images: MaskedImages, numbers: Any, strength: float, of: Any = None
    ) -> list[np.ndarray]:
        features, _, labels = self.patches(fit)
        mean, deviation = self.standard(fit if of is None else of)
        model = LogisticRegression(C=strength, tol=1e-10, max_iter=10_000).fit((features - mean) / deviation, labels)
        patches = self.features(images, numbers)
        chosen = model.predict(((patches - mean) / deviation).reshape(-1, patches.shape[-1]))
        return [in_patches(each) for each in chosen.reshape(patches.shape[:3])]

    def mean_iou(self, predicted: list[np.ndarray], images: MaskedImages, numbers: Any) -> float:
        true = np.concatenate([images.masks.read(int(number)).flatten() for number in numbers]).astype(int)
        given = np.concatenate([each.flatten() for each in predicted])
        counted = ~np.isin(true, list(self.data.ignored))
        true, given = true[counted], given[counted]
        shares = []
        for label in {*true.tolist(), *given.tolist()}:
            shares.append(((true == label) & (given == label)).sum() / ((true == label) | (given == label)).sum())
        return float(np.mean(shares))
