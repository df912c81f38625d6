"""PCA pictures of patch features: three components as red, green and blue, or each by itself from cold to warm.

The sign of a component is arbitrary; here each is turned so that its values lean to the right (positive skew), which
keeps pictures from flipping between runs. Components of any number of patches come from their mean and scatter, which
are summed up part by part in float64.

All patches of any number of images, summed up in bounded memory: their moments, and a random sample of them.

The moments are exact. The sample decides about signs and colour ranges, and clusters and dictionaries are fitted to
it; as long as all patches fit into it, it is all of them. Which patches it holds depends on their order alone, not on
how they are batched.
"""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from capi.errors import CapiError
from capi.runtime.randomness import sample_keys
from capi.types import Float, VisionEncoder

# What of each component's range is shown; a few extreme patches would otherwise darken the rest.
_SHOWN = (0.01, 0.99)
# Less variation than this share is rounding of float32, which a picture would stretch to full colour.
_ROUNDING = 1e-6
# Below this a distribution counts as even, and its skew as rounding.
_EVEN = 1e-4
# Percentiles of a photo that become black and white, where they lie within this share of the whole range.
_CONTRAST, _SMALL_RANGE = (1, 99), 0.25


@dataclass(frozen=True)
class Components:
    """A mean and the directions of largest variance, each with its sign fixed and its share of the variance."""

    mean: Float[Tensor, " d"]
    directions: Float[Tensor, "m d"]
    shares: Float[Tensor, " m"]

    def project(self, features: Float[Tensor, "s d"]) -> Float[Tensor, "s m"]:
        return (features - self.mean) @ self.directions.T


@dataclass(frozen=True)
class Moments:
    """How many patches there were, their mean, and the sum of the outer products of their deviations from it."""

    count: int
    mean: Float[Tensor, " d"]
    scatter: Float[Tensor, "d d"]

    def merged(self, other: "Moments") -> "Moments":
        """Of both together; deviations are never taken from a far origin, so that no digits cancel out."""
        count = self.count + other.count
        shift = other.mean - self.mean
        between = torch.outer(shift, shift) * (self.count * other.count / count)
        return Moments(count, self.mean + shift * (other.count / count), self.scatter + other.scatter + between)


def moments_of(features: Float[Tensor, "s d"]) -> Moments:
    """The moments of some patches, in float64."""
    values = features.double()
    mean = values.mean(0)
    centerd = values - mean
    return Moments(len(values), mean, centerd.T @ centerd)


def components_of(moments: Moments, sample: Float[Tensor, "s d"], count: int) -> Components:
    """Principal components of all patches that the moments sum up; the sample of them decides about the signs."""
    squares, vectors = torch.linalg.eigh(moments.scatter)
    whole = moments.count * moments.mean.square().sum() + squares.sum()
    return _components(moments.mean, whole, squares.flip(0).clamp_min(0), vectors.T.flip(0), sample, count)


def fit_components(features: Float[Tensor, "s d"], count: int = 3) -> Components:
    """Principal components of patches; where there are fewer than asked for, the rest are zero."""
    if len(features) > features.shape[1]:
        return components_of(moments_of(features), features, count)
    # Of few patches with wide features the scatter would be much larger than the patches themselves.
    values = features.double()
    mean = values.mean(0)
    _, sizes, directions = torch.linalg.svd(values - mean, full_matrices=False)
    return _components(mean, values.square().sum(), sizes**2, directions, features, count)


def _components(
    mean: Tensor, whole: Tensor, squares: Tensor, directions: Tensor, sample: Tensor, count: int
) -> Components:
    """The first directions that are more than rounding of the whole; `squares` are the sums of squares along each."""
    usable = (squares > _ROUNDING**2 * whole).nonzero()[:count, 0]
    chosen, shares = mean.new_zeros(count, len(mean)), mean.new_zeros(count)
    chosen[: len(usable)] = directions[usable]
    shares[: len(usable)] = squares[usable] / squares.sum()
    chosen *= _signs((sample.double() - mean) @ chosen.T, chosen)[:, None]
    return Components(mean.to(sample.dtype), chosen.to(sample.dtype), shares.to(sample.dtype))


def _signs(values: Float[Tensor, "s m"], directions: Float[Tensor, "m d"]) -> Float[Tensor, " m"]:
    """What makes each component lean to the right; an even one is turned by its largest entry instead."""
    skew = (values**3).mean(0)
    even = skew.abs() < _EVEN * values.square().mean(0) ** 1.5
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))[:, 0]
    return torch.where(torch.where(even, largest, skew) < 0, -1.0, 1.0).double()


def color_range(values: Float[Tensor, "s m"]) -> Float[Tensor, "2 m"]:
    """Where the colours of each component begin and end: all but the extremes, or all where most are alike."""
    exact = values.double()
    inner = torch.quantile(exact, torch.tensor(_SHOWN, dtype=torch.float64), dim=0)
    outer = torch.stack([exact.amin(0), exact.amax(0)])
    return torch.where(inner[1] > inner[0], inner, outer)


def as_colors(values: Float[Tensor, "*grid 3"], limits: Float[Tensor, "2 3"] | None = None) -> Tensor:
    """Each component stretched over 0 to 255, as bytes; one that does not vary is grey."""
    low, high = color_range(values.flatten(0, -2)) if limits is None else limits
    stretched = (values.double() - low) / torch.where(high > low, high - low, 1.0)
    return (torch.where(high > low, stretched, 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


@torch.inference_mode()
def pca_pictures(
    encoder: VisionEncoder, images: Float[Tensor, "b c height width"], *, joint: bool = False
) -> list[Image.Image]:
    """A picture for each image, one pixel a patch; `joint` fits the components to all images together."""
    maps = encoder(images, pooled=False).feature_map.float().cpu()
    groups = [maps] if joint else list(maps.split(1))
    pictures = []
    for group in groups:
        values = fit_components(group.flatten(0, 2)).project(group.flatten(0, 2)).view(*group.shape[:3], 3)
        pictures += [Image.fromarray(picture.numpy()) for picture in as_colors(values)]
    return pictures


def large_map_picture(feature_map: Float[Tensor, "rows columns d"]) -> Image.Image:
    """A map of any size, one pixel a patch; it may lie on the disk, and is read a band at a time."""
    rows, columns, width = feature_map.shape
    bands = feature_map.split(max(SAMPLE_BYTES // (4 * columns * width), 1))
    summary = PatchSummary()
    for band in bands:
        summary.add(band.flatten(0, 1))
    components = summary.components(3)
    limits = color_range(components.project(summary.sample.values))
    colors = [as_colors(components.project(band.flatten(0, 1).float()), limits) for band in bands]
    return Image.fromarray(torch.cat(colors).view(rows, columns, 3).numpy())


def photos_of(pixels: Tensor) -> list[Image.Image]:
    """Images (b c h w) from 0 to 255 as pictures: their first three channels, or the first one in grey.

    Bytes are shown as they are. Of finer values (16 bits, floats) that fill less than a quarter of the range, the
    contrast is stretched: a 12-bit image in 16 bits would be black.
    """
    shown = pixels[:, :3] if pixels.shape[1] >= 3 else pixels[:, :1]
    colors = [_stretched(image).clamp(0, 255).round().to(torch.uint8).expand(3, -1, -1) for image in shown]
    return [Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0))) for image in colors]


def _stretched(pixels: Tensor) -> Tensor:
    """Stretch percentiles 1 to 99 over 0 to 255, all channels alike, where the image needs it."""
    if not pixels.is_floating_point() or bool((pixels == pixels.round()).all()):
        return pixels
    low, high = np.percentile(pixels.numpy(), _CONTRAST)
    if high <= low:
        low, high = pixels.min().item(), pixels.max().item()
    return (pixels - low) * (255 / (high - low)) if 0 < high - low < 255 * _SMALL_RANGE else pixels


SAMPLE_ROWS, SAMPLE_BYTES = 2**17, 2**27


class PatchSample:
    """A sample of at most `rows` patches, each as likely as any other: those with the smallest random keys."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.rows, self.seed, self.seen = rows, seed, 0
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._used, self._largest = 0, torch.iinfo(torch.int64).max

    def add(self, features: Float[Tensor, "s d"]) -> None:
        keys = sample_keys(self.seed, 0, torch.arange(self.seen, self.seen + len(features)))
        self.seen += len(features)
        # A slice would hold on to the whole batch, so a copy is kept.
        chosen = keys <= self._largest
        self._parts.append((keys[chosen], features[chosen]))
        self._used += int(chosen.sum())
        if self._used > 2 * self.rows:
            self._shrink()

    @property
    def values(self) -> Float[Tensor, "_ _"]:
        """The sample, in the order of the stream."""
        if self._used > self.rows or len(self._parts) > 1:
            self._shrink()
        return self._parts[0][1]

    def some(self, rows: int) -> Float[Tensor, "_ _"]:
        """A smaller sample, in the order of the stream."""
        values, keys = self.values, self._parts[0][0]
        return values[keys.argsort()[:rows].sort().values]

    def _shrink(self) -> None:
        keys, values = (torch.cat(part) for part in zip(*self._parts, strict=True))
        if len(keys) > self.rows:
            chosen = keys.argsort()[: self.rows].sort().values
            keys, values = keys[chosen], values[chosen]
            self._largest = int(keys.max())
        self._parts, self._used = [(keys, values)], len(keys)


class PatchSummary:
    """Patches are added; then principal components and a sample of them can be asked for."""

    def __init__(self, *, sample_rows: int | None = None, seed: int = 0) -> None:
        self.sample_rows, self.seed = sample_rows, seed
        self._sample: PatchSample | None = None
        self._moments: Moments | None = None
        self._waiting: list[Tensor] = []

    def add(self, features: Float[Tensor, "s d"]) -> None:
        values, width = features.float().cpu(), features.shape[1]
        if self._sample is None:
            rows = self.sample_rows or max(min(SAMPLE_ROWS, SAMPLE_BYTES // (4 * width)), 1)
            self._sample = PatchSample(rows, self.seed)
        self._sample.add(values)
        self._waiting.append(values)
        # Fewer patches than channels need no scatter at all, which of very wide features is large.
        if sum(len(part) for part in self._waiting) > width:
            self._sum_up()

    @property
    def seen(self) -> int:
        """How many patches there were."""
        return 0 if self._sample is None else self._sample.seen

    @property
    def sample(self) -> PatchSample:
        if self._sample is None:
            raise CapiError("there are no patches to sum up: give at least one image that can be read")
        return self._sample

    def components(self, count: int) -> Components:
        """Principal components of all patches together."""
        sample = self.sample.values
        if self._moments is None:
            return fit_components(torch.cat(self._waiting), count)
        if self._waiting:
            self._sum_up()
        return components_of(self._moments, sample, count)

    def _sum_up(self) -> None:
        moments = moments_of(torch.cat(self._waiting))
        self._moments = moments if self._moments is None else self._moments.merged(moments)
        self._waiting = []
