"""Training patches of segmentation: features, pixel labels, and the statistics that features are standardised with.

A patch's label is the most frequent of its pixels. Patches whose label is ignored are not learnt from, but they count
in the mean and deviation of the channels. Both are those of the images that settings are fitted on, without those held
out, and stay so in the last fit on all training images: that is how the published numbers came about, and a setting's
score is the same whether it was chosen or given. Features lie in one array that may be mapped to a file, those of
images to fit on first, those held out behind them: both parts are slices of it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.evals.blocks import is_counted, patch_labels
from capi.evals.features import Encoding, Rows
from capi.types import Bool, Float, Integer


class Standard(NamedTuple):
    """Mean and deviation of every channel; 0 and 1 where features are taken as they are."""

    mean: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]


@dataclass
class Moments:
    """Mean and squared deviations of rows that come in parts, in float64."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, rows: Float[Tensor, "s d"]) -> "Moments":
        """Merged part by part, which keeps the digits that a sum of squares would lose."""
        if len(rows):
            values = rows.double().cpu()
            mean, total = values.mean(0), self.count + len(rows)
            shift = mean - self.mean
            self.squares = self.squares + (values - mean).square().sum(0)
            self.squares = self.squares + shift.square() * (self.count * len(rows) / total)
            self.mean = self.mean + shift * (len(rows) / total)
            self.count = total
        return self

    def standard(self, wanted: bool = True) -> Standard:
        """A channel that never changes says nothing; its deviation counts as 1."""
        if not wanted:
            return Standard(torch.zeros(self.mean.shape), torch.ones(self.mean.shape))
        variance = self.squares / max(self.count, 1)
        return Standard(self.mean.float(), torch.where(variance > 0, variance.sqrt(), 1.0).float())


@dataclass(frozen=True)
class Patches:
    """Patches with a label that counts."""

    features: Float[Tensor, "s d"]
    blocks: Integer[Tensor, "s block_height block_width"]
    labels: Integer[Tensor, " s"]
    standard: Standard


class TrainingPatches(NamedTuple):
    """Patches of the images to fit on while settings are tried, and of every training image."""

    fit: Patches
    every: Patches
    left_out: int


class PatchCollector:
    """Takes batches of training images in order, those to fit on before those held out."""

    def __init__(self, encoding: Encoding, ignored: Collection[int], standardize: bool) -> None:
        self.encoding, self.ignored, self.standardize = encoding, ignored, standardize
        self.fit_moments = Moments()
        self.rows: dict[str, Rows] = {}
        self.fit_count = self.left_out = 0

    def add(self, features: Float[Tensor, "s d"], blocks: Tensor, to_fit: Bool[Tensor, " s"], capacity: int) -> None:
        """The patches of a batch; there are no more than `capacity` in all."""
        features = features.cpu()
        self.fit_moments.add(features[to_fit])
        if not self.rows:
            self.rows = {name: Rows(capacity, self.encoding, name) for name in ("features", "blocks", "labels")}
        labels = patch_labels(blocks)
        counts = is_counted(labels, self.ignored)
        for name, values in (("features", features), ("blocks", blocks), ("labels", labels)):
            self.rows[name].append(values[counts])
        self.left_out += int((~counts).sum())
        self.fit_count += int((counts & to_fit).sum())

    def finish(self) -> TrainingPatches:
        if not self.fit_count:
            raise CapiError(f"no training patch has a label that counts: all are ignored ({sorted(self.ignored)})")
        filled = {name: rows.filled for name, rows in self.rows.items()}
        fit = {name: values[: self.fit_count] for name, values in filled.items()}
        standard = self.fit_moments.standard(self.standardize)
        return TrainingPatches(Patches(**fit, standard=standard), Patches(**filled, standard=standard), self.left_out)
