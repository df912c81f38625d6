"""Frozen encoders that classify and segment: a trained model, and raw patches, which any of them should beat."""

import torch
from torch import Tensor, nn

from capi.errors import CapiError
from capi.models.encoder import Encoder
from capi.models.plain_vit import PlainEncoder
from capi.models.predictor import Predictor
from capi.types import IMAGENET, Features, Float, Statistics


class CapiEncoder(nn.Module):
    """A `VisionEncoder`: calling it on normalised images gives `Features(pooled, registers, feature_map)`.

    `pooled` is the predictor's (capi/models/predictor.py): mask tokens at all positions through its first block,
    averaged; of a fused model, which has no predictor, the mean of the patches. It costs a little extra;
    `encoder(images, pooled=False)` leaves it out and puts None in its place. Of another method's encoder that was
    adapted, features are what that method takes. `statistics` are the mean and std
    that images are normalised with before they come here, `image_size` the height and width that they get by default:
    those of training, None where they are not known.
    """

    def __init__(
        self,
        *,
        encoder: Encoder | PlainEncoder,
        predictor: Predictor,
        head: nn.Module | None = None,
        statistics: Statistics = IMAGENET,
        image_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.statistics = statistics
        self.image_size = image_size
        self.encoder = encoder
        self.predictor = predictor
        self.head = head

    @property
    def width(self) -> int:
        return self.encoder.width

    @property
    def patch_size(self) -> int:
        return self.encoder.patch_embedding.patch_size

    def forward(self, images: Float[Tensor, "b c height width"], *, pooled: bool = True) -> Features:
        if isinstance(self.encoder, PlainEncoder):
            return self.encoder.features(images, pooled=pooled)
        rows, columns = self.encoder.patch_embedding.grid(images)
        encoded = self.encoder(images)
        return Features(
            pooled=self.predictor.pool(self.encoder, encoded) if pooled else None,
            registers=encoded.tokens[:, : self.encoder.num_registers],
            feature_map=self.encoder.patches(encoded).unflatten(1, (rows, columns)),
        )


class PixelEncoder(nn.Module):
    """A `VisionEncoder` without weights, without registers and without a pooled vector."""

    def __init__(self, patch_size: int = 16, statistics: Statistics = IMAGENET) -> None:
        super().__init__()
        if patch_size < 1:
            raise CapiError(f"patches of {patch_size} pixels cannot be: give at least 1")
        self.patch_size, self.statistics = patch_size, statistics

    @property
    def width(self) -> int:
        return len(self.statistics.mean) * self.patch_size**2

    def forward(self, images: Float[Tensor, "b c height width"], *, pooled: bool = True) -> Features:  # noqa: ARG002 - the contract's signature
        size, (height, width) = self.patch_size, images.shape[2:]
        if height % size or width % size:
            raise CapiError(f"patches of {size} pixels do not fill images of {height} x {width} pixels: resize them")
        return Features(None, torch.empty(len(images), 0, self.width, device=images.device), patch_pixels(images, size))


def patch_pixels(images: Float[Tensor, "b c height width"], size: int) -> Float[Tensor, "b rows columns pixels"]:
    """The pixels of each patch: channel by channel, in each row by row."""
    blocks = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3)
