"""A stem of convolutions within each patch, for the search: tokens are linear in its features beside the pixels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from capi.models.encoder import PatchEmbedding


class StemEmbedding(PatchEmbedding):
    """Two convolutions of stride 2 that never look beyond their patch, so that nothing hidden is seen."""

    def __init__(self, *, width: int, channels: int, patch_size: int) -> None:
        super().__init__(width=width, channels=channels, patch_size=patch_size)
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1, stride=2),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(64 * (patch_size // 4) ** 2, width),
        )

    def forward(self, images: Tensor, visible_index: Tensor | None) -> Tensor:  # type: ignore[override]
        (rows, columns), size = self.grid(images), self.patch_size
        patches = (
            images.unflatten(3, (columns, size)).unflatten(2, (rows, size)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        )
        if visible_index is not None:
            patches = patches[torch.arange(len(images))[:, None], visible_index]
        features = self.stem(patches.flatten(0, 1)).unflatten(0, patches.shape[:2])
        tokens: Tensor = super().forward(images, visible_index) + features
        return tokens


@contextmanager
def stem() -> Iterator[Any]:
    """Encoders that are built meanwhile have this stem."""
    with patch("capi.models.encoder.PatchEmbedding", StemEmbedding):
        yield
