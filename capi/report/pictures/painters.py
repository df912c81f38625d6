"""Feature maps as pictures, one pixel a patch. Another kind of picture is one class here and one line in `PAINTERS`.

A painter is fitted to a summary of all patches where it draws all images alike, and then draws one feature map after
the other. What it draws is small: `sheets` enlarges it without blurring.
"""

import colorsys
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from capi.report.pictures.clusters import KMeans, SparseDictionary
from capi.report.pictures.colormaps import coolwarm, heat
from capi.report.pictures.pca import PatchSummary, as_colors, color_range, fit_components
from capi.types import Float, Integer

# Patches that clusters and dictionaries are fitted to, at most: more changes nothing that one sees.
CLUSTER_ROWS, DICTIONARY_ROWS = 2**15, 2**13
_SHOWN_COMPONENTS, _SHOWN_CODES = 0.99, 0.995


@dataclass(frozen=True)
class Drawn:
    """A picture, what it is, and what is to be said of it."""

    picture: Image.Image
    title: str = ""
    caption: str = ""


@dataclass(frozen=True)
class Legend:
    """A row of colours, and what its ends mean."""

    bar: Image.Image
    low: str
    high: str


@runtime_checkable
class Painter(Protocol):
    """Draws feature maps. `together` says whether it must be fitted to all images before."""

    title: str
    explanation: str
    together: bool

    def fit(self, summary: PatchSummary) -> "Painter": ...

    def draw(self, feature_map: Float[Tensor, "rows columns d"]) -> list[Drawn]: ...

    def legend(self) -> Legend | None: ...


class PcaColors:
    """The first three components as red, green and blue."""

    title = "PCA in colour"

    def __init__(self, joint: bool = False) -> None:
        self.together = joint
        self.explanation = "The first three principal components of the patch features as red, green and blue, " + (
            "fitted to all images together: equal colours mean alike patches, also in different images."
            if joint
            else "fitted to each image on its own: colours cannot be compared between images."
        )

    def fit(self, summary: PatchSummary) -> "PcaColors":
        self.components_ = summary.components(3)
        self.limits_ = color_range(self.components_.project(summary.sample.values))
        return self

    def draw(self, feature_map: Float[Tensor, "rows columns d"]) -> list[Drawn]:
        patches = feature_map.flatten(0, 1)
        components = self.components_ if self.together else fit_components(patches)
        colors = as_colors(components.project(patches), self.limits_ if self.together else None)
        return [Drawn(_as_image(colors, feature_map))]

    def legend(self) -> None:
        return None


class ComponentMaps:
    """The first components one by one, from cold (below the mean) to warm (above it)."""

    title = "Components"

    def __init__(self, joint: bool = False, count: int = 8) -> None:
        self.together, self.count = joint, count
        whose = "all images together" if joint else "each image on its own"
        self.explanation = (
            f"The first {count} principal components one by one, fitted to {whose}: blue below the mean, red above it. "
            "The number is the share of the variance."
        )

    def fit(self, summary: PatchSummary) -> "ComponentMaps":
        self.components_ = summary.components(self.count)
        self.reach_ = _reach(self.components_.project(summary.sample.values))
        return self

    def draw(self, feature_map: Float[Tensor, "rows columns d"]) -> list[Drawn]:
        patches = feature_map.flatten(0, 1)
        components = self.components_ if self.together else fit_components(patches, self.count)
        values = components.project(patches)
        shown = coolwarm(values / (self.reach_ if self.together else _reach(values)))
        shares = components.shares.tolist()
        return [
            Drawn(_as_image(shown[:, number], feature_map), f"PC {number + 1}", f"{100 * shares[number]:.1f} %")
            for number in range(self.count)
        ]

    def legend(self) -> Legend:
        return Legend(_bar(coolwarm(torch.linspace(-1, 1, 256))), "below the mean", "above")


class PositionCheck(ComponentMaps):
    """Components 1 to 6 of several models for the same images: what leaks position shows the same ramp in all."""

    title = "Components 1 to 6, model by model"

    def __init__(self) -> None:
        super().__init__(joint=True, count=6)
        self.explanation = (
            "The first six principal components, fitted to all images together, the models below each other. A model "
            "that suffers from positional collapse shows the same gradient or grid for every image; a healthy one "
            "shows what is in the image. The number is the share of the variance."
        )


class ClusterMaps:
    """Each patch in the colour of its cluster, by k-means over all images."""

    title, together = "Clusters", True

    def __init__(self, clusters: int = 12) -> None:
        self.clusters = clusters
        self.explanation = (
            f"Patches grouped by k-means into {clusters} clusters over all images: equal colours mean alike patches, "
            "also in different images. Between models, and between resolutions, colours have nothing to do with each "
            "other. Clusters are numbered by their size."
        )

    def fit(self, summary: PatchSummary) -> "ClusterMaps":
        self.means_ = KMeans(self.clusters).fit(summary.sample.some(CLUSTER_ROWS))
        return self

    def draw(self, feature_map: Float[Tensor, "rows columns d"]) -> list[Drawn]:
        labels = self.means_.predict(feature_map.flatten(0, 1)).view(feature_map.shape[:2])
        return [Drawn(_as_image(distinct_colors(self.clusters)[labels], feature_map))]

    def legend(self) -> Legend:
        return Legend(_bar(distinct_colors(self.clusters)), "largest cluster", "smallest")


class AtomMaps:
    """How much of each atom of a sparse dictionary is in each patch."""

    title, together = "Dictionary", True

    def __init__(self, atoms: int = 8) -> None:
        self.atoms = atoms
        self.explanation = (
            f"A dictionary of {atoms} atoms, learnt from the patches of all images so that each patch is a sum of few "
            "atoms: how much of each atom is in each patch, from black (nothing) to white (much). The number is the "
            "share of this image's patches that use the atom."
        )

    def fit(self, summary: PatchSummary) -> "AtomMaps":
        patches = summary.sample.some(DICTIONARY_ROWS)
        self.dictionary_ = SparseDictionary(self.atoms).fit(patches)
        self.reach_ = _span(self.dictionary_.transform(patches), _SHOWN_CODES)
        return self

    def draw(self, feature_map: Float[Tensor, "rows columns d"]) -> list[Drawn]:
        codes = self.dictionary_.transform(feature_map.flatten(0, 1))
        shown, used = heat(codes / self.reach_), (codes > 0).float().mean(0).tolist()
        return [
            Drawn(_as_image(shown[:, number], feature_map), f"atom {number + 1}", f"in {100 * used[number]:.0f} %")
            for number in range(self.atoms)
        ]

    def legend(self) -> Legend:
        return Legend(_bar(heat(torch.linspace(0, 1, 256))), "nothing", "much")


class PrototypeMaps:
    """Each patch in the colour of the prototype it belongs to most; alike prototypes have alike colours."""

    title, together = "Prototypes", False
    explanation = (
        "Each patch in the colour of the prototype of the run's own clustering that it is most like (before the "
        "balancing of training). Prototypes that are alike have alike colours."
    )

    def __init__(self, prototypes: Float[Tensor, "k d"], bias: Float[Tensor, " k"] | None = None) -> None:
        self.prototypes, self.bias = prototypes, bias
        self.colors = as_colors(fit_components(prototypes).project(prototypes))

    def fit(self, summary: PatchSummary) -> "PrototypeMaps":  # noqa: ARG002 - the contract's signature
        return self

    def draw(self, feature_map: Float[Tensor, "rows columns d"]) -> list[Drawn]:
        # As the clustering sees them: without their length, which would drown the bias.
        labels = F.linear(F.normalize(feature_map.flatten(0, 1), dim=-1), self.prototypes, self.bias).argmax(1)
        caption = f"{len(labels.unique())} of {len(self.prototypes)}"
        return [Drawn(_as_image(self.colors[labels], feature_map), caption=caption)]

    def legend(self) -> None:
        return None


# What makes the painter of a kind; the flag says whether components are fitted to all images together.
PAINTERS: dict[str, Callable[[bool], Painter]] = {
    "pca": PcaColors,
    "components": ComponentMaps,
    "clusters": lambda _: ClusterMaps(),
    "dictionary": lambda _: AtomMaps(),
    "collapse": lambda _: PositionCheck(),
}


def paint(painter: Painter, feature_maps: list[Tensor]) -> list[list[Drawn]]:
    """Fit a painter to some feature maps in memory, and draw them all."""
    if painter.together:
        summary = PatchSummary()
        for feature_map in feature_maps:
            summary.add(feature_map.flatten(0, 1))
        painter.fit(summary)
    return [painter.draw(feature_map) for feature_map in feature_maps]


def distinct_colors(count: int) -> Integer[Tensor, "{count} 3"]:
    """Hues all around the circle, neighbours on it of different brightness, neighbours in number far apart on it."""
    stride = next(step for step in range(max(round(0.4 * count), 1), count + 2) if math.gcd(step, count) == 1)
    places = [number * stride % count for number in range(count)]
    colors = [colorsys.hsv_to_rgb(place / count, 0.7, (0.95, 0.6)[place % 2]) for place in places]
    return (torch.tensor(colors) * 255).round().to(torch.uint8)


def _reach(values: Float[Tensor, "s m"]) -> Float[Tensor, " m"]:
    """How far from the mean the colours of each component go."""
    return _span(values.abs(), _SHOWN_COMPONENTS)


def _span(values: Float[Tensor, "s m"], share: float) -> Float[Tensor, " m"]:
    """What so large a share of the values stays below; the largest where most are zero, and 1 where all are."""
    inner = torch.quantile(values.double(), share, dim=0)
    span = torch.where(inner > 0, inner, values.double().amax(0))
    return torch.where(span > 0, span, 1.0).to(values.dtype)


def _as_image(colors: Tensor, feature_map: Tensor) -> Image.Image:
    rows, columns = feature_map.shape[:2]
    return Image.fromarray(colors.view(rows, columns, 3).contiguous().numpy())


def _bar(colors: Tensor) -> Image.Image:
    return Image.fromarray(colors[None].numpy())
