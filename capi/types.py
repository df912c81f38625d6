"""What the rooms hand to each other, and the letters used for tensor axes everywhere.

    b images of a batch      n patches of an image    v visible patches     p predicted patches
    r registers              d width of a token       k prototypes          h attention heads
    c image channels         t tokens of a sequence   w width of one attention head
    g groups of samples that are balanced alone       e width of what targets are made from
    m hidden patches, micro-batch, or components      q tokens that ask, or images of a queue
    f rotary frequencies     i, j, l sides of a plain matrix product

Evaluations read features of many images at once, and have in addition:

    s vectors (of images, patches, pixels)            k neighbors of one      m test answers, or candidates
    c classes                g settings (penalties, or rate and decay) that are fitted together
    a those of the g that are still fitted            e features and the intercept

`orthogonal` of Muon has m matrices of r rows and c columns, the order of images r replacements for each of b images.

Shapes stand in the annotations (`Float[Tensor, "b n d"]`). Only the test run enforces them, so jaxtyping is not
needed to use the package: without it the annotations fall back to `Tensor`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Integer
else:
    try:
        from jaxtyping import Bool, Float, Int, Integer
    except ImportError:

        class Float:
            """Stands in for a jaxtyping annotation where jaxtyping is not installed."""

            def __class_getitem__(cls, _: object) -> type[Tensor]:
                return Tensor

        Bool = Int = Integer = Float

__all__ = [
    "IMAGENET",
    "Bool",
    "Features",
    "Float",
    "Int",
    "Integer",
    "MaskedBatch",
    "Names",
    "OneProcess",
    "Reduction",
    "Statistics",
    "VisionEncoder",
    "listed",
    "statistics_of",
]

Names = str | Path | Sequence[str | Path]


def listed(names: Names) -> Sequence[str | Path]:
    """A single name is a list of one, not of its letters."""
    return [names] if isinstance(names, str | Path) else names


class MaskedBatch(NamedTuple):
    """What the loader yields: images, and for each image which patches the student sees and which it predicts."""

    images: Float[Tensor, "b c height width"]
    visible_index: Int[Tensor, "b v"]
    predict_index: Int[Tensor, "b p"]
    # The same images in other colors, for the student; None where it sees those of the teacher.
    recolored: Float[Tensor, "b c height width"] | None = None

    @property
    def student_images(self) -> Float[Tensor, "b c height width"]:
        return self.images if self.recolored is None else self.recolored


class Features(NamedTuple):
    """What every encoder gives for a batch of images. `pooled` is None when it was not asked for."""

    pooled: Float[Tensor, "b d"] | None
    registers: Float[Tensor, "b r d"]
    feature_map: Float[Tensor, "b rows columns d"]


class Statistics(NamedTuple):
    """Mean and std of each channel of the images that an encoder wants, full scale being 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET = Statistics((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@runtime_checkable
class VisionEncoder(Protocol):
    """The contract of an encoder: normalised images in, features out.

    An encoder may also have `statistics`, which its images are normalised with; without it they are ImageNet's. And it
    may have `image_size`, (height, width) or a side, which its images get by default; without it that is the paper's.
    """

    @property
    def width(self) -> int: ...

    @property
    def patch_size(self) -> int: ...

    def __call__(self, images: Float[Tensor, "b c height width"], *, pooled: bool = True) -> Features: ...


def statistics_of(encoder: VisionEncoder) -> Statistics:
    """What images are normalised with before this encoder sees them."""
    statistics: Statistics | None = getattr(encoder, "statistics", None)
    return IMAGENET if statistics is None else statistics


@runtime_checkable
class Reduction(Protocol):
    """How a statistic of this process becomes that of the global batch."""

    def sum(self, value: Tensor) -> Tensor: ...

    def max(self, value: Tensor) -> Tensor: ...


class OneProcess:
    """The reduction of a run with a single process: its batch is the global batch."""

    def sum(self, value: Tensor) -> Tensor:
        return value

    def max(self, value: Tensor) -> Tensor:
        return value
