"""Features of images by a frozen encoder, at evaluation's own preprocessing: full decoding, the middle of the image."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from capi.data.crops import KEPT_SHARE, centre_box, normalize
from capi.data.decoding import BrokenImageError, Decoder
from capi.data.reader import Reader
from capi.data.sources import ImageSource
from capi.errors import CapiError
from capi.types import Float, VisionEncoder

FeatureKind = Literal["mean_patch", "pooled"]


def evaluation_images(
    source: ImageSource, numbers: Sequence[int], size: tuple[int, int], channels: int = 3, kept: float = KEPT_SHARE
) -> Tensor:
    """Pixels from 0 to 255 of the middle of each image. A broken image is an error: scores must cover all of them."""
    reader = Reader(source, Decoder(channels=channels))
    crops = []
    for number in numbers:
        try:
            crops.append(reader.crop(number, centre_box(reader.size(number), size, kept), size))
        except BrokenImageError as error:
            raise CapiError(f"{source.name(number)} cannot be read ({error}): repair it or take it out") from error
    return torch.from_numpy(np.stack(crops))


@torch.inference_mode()
def image_features(
    encoder: VisionEncoder,
    images: Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    kind: FeatureKind = "mean_patch",
    device: torch.device | str = "cpu",
    batch_size: int = 64,
) -> Float[Tensor, "s d"]:
    """One vector for each image, on the CPU."""
    vectors = []
    for part in images.split(batch_size):
        features = encoder(normalize(part, mean, std, device), pooled=kind == "pooled")
        vector = features.pooled if kind == "pooled" else features.feature_map.flatten(1, 2).mean(1)
        assert vector is not None
        vectors.append(vector.float().cpu())
    return torch.cat(vectors)
