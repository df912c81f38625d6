"""Features of a fixed encoder as targets, after BEiT (ICLR 2022) and EVA (CVPR 2023), whose teachers are fixed too.

Any `VisionEncoder` may be the teacher: it sees the whole image, normalised as it wants, resized to whole patches of its
own where they do not fit (ours). Its feature map is resampled to the student's grid (ours: bilinear), normalised over
channels, and predicted with Huber's loss (ours; BEiT predicts discrete tokens, EVA maximises the cosine).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.errors import CapiError, counted
from capi.method.feature_targets import FeatureTargets
from capi.method.targets import OF_THE_RUN, RunContext
from capi.method.teacher import Teacher
from capi.types import Float, Statistics, VisionEncoder, statistics_of


class FrozenTargets(FeatureTargets):
    """Normalised features of an encoder that it is *given* and that never changes; its weights are no part of a run."""

    name = "frozen"
    description = "another encoder's features (distillation)"
    reads = ("target.frozen",)
    reads_teacher, wants_encoder = False, True
    measures = OF_THE_RUN

    def __init__(self, *, encoder: VisionEncoder, patch_size: int, statistics: Statistics) -> None:
        """`patch_size` is the student's; `statistics` are what the run's images are normalised with."""
        super().__init__()
        # Wrapped, so that it is not taken for a part of this module.
        self._encoder = (encoder,)
        self.patch_size = patch_size
        self.given, self.wanted = statistics, statistics_of(encoder)
        if len(self.given.mean) != len(self.wanted.mean):
            raise CapiError(
                f"the encoder of target.frozen.encoder takes images with {counted(len(self.wanted.mean), 'channel')}, "
                f"but model.channels is {len(self.given.mean)}: choose another encoder"
            )

    @classmethod
    def outputs(cls, run: RunContext, *, encoder: str | None, width: int | None) -> int:  # noqa: ARG003 - the contract
        """`width` is that of the features of the encoder which is named."""
        if width is None:
            raise CapiError(
                "target.frozen.width is not known before a run has opened the encoder: give it in the config"
            )
        return width

    @classmethod
    def build(
        cls,
        run: RunContext,
        teacher: Teacher,  # noqa: ARG003 - the contract
        *,
        encoder: str | None,
        width: int | None,  # noqa: ARG003 - the contract
    ) -> "FrozenTargets":
        if run.encoder is None:
            raise CapiError(f"the targets need the encoder {encoder} opened: give it to build_learner")
        if run.statistics is None:
            raise CapiError("data.mean and data.std are `auto`, which only a run with images can replace by numbers")
        return cls(encoder=run.encoder, patch_size=run.patch_size, statistics=run.statistics)

    @torch.no_grad()
    def tokens(self, teacher: Teacher, images: Float[Tensor, "b c height width"]) -> Float[Tensor, "b n e"]:  # noqa: ARG002 - the contract
        (encoder,) = self._encoder
        rows, columns = (side // self.patch_size for side in images.shape[2:])
        images = to_whole_patches(renormalized(images, self.given, self.wanted), encoder.patch_size)
        return resampled(encoder(images, pooled=False).feature_map, rows, columns).flatten(1, 2)


def renormalized(
    images: Float[Tensor, "b c height width"], given: Statistics, wanted: Statistics
) -> Float[Tensor, "b c height width"]:
    """Images normalised with some statistics as others would have them."""
    if given == wanted:
        return images
    moved = torch.tensor([*given, *wanted]).to(images, non_blocking=True)
    mean, std, new_mean, new_std = moved[..., None, None]
    return (images * std + mean - new_mean) / new_std


def to_whole_patches(images: Float[Tensor, "b c height width"], patch_size: int) -> Float[Tensor, "b c _ _"]:
    """The images, resized to the nearest multiples of a patch where they are none."""
    height, width = images.shape[2:]
    size = [max(round(side / patch_size), 1) * patch_size for side in (height, width)]
    if size == [height, width]:
        return images
    return F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=True)


def resampled(feature_map: Float[Tensor, "b _ _ e"], rows: int, columns: int) -> Float[Tensor, "b {rows} {columns} e"]:
    """A feature map on another grid."""
    if feature_map.shape[1:3] == (rows, columns):
        return feature_map
    channels_first = feature_map.permute(0, 3, 1, 2).float()
    resized = F.interpolate(channels_first, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True)
    return resized.permute(0, 2, 3, 1)
