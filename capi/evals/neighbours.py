"""k-nearest-neighbour classification."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.errors import CapiError
from capi.types import Float, Int

Distance = Literal["cosine", "l2"]
_ROWS_AT_A_TIME = 1024


class NearestNeighbours:
    """Majority vote of the k nearest training vectors, in the manner of scikit-learn.

    Ties go to the class whose nearest member among the neighbours is closest; equally distant neighbours count in the
    order of the training set.
    """

    def __init__(self, neighbours: int = 10, distance: Distance = "cosine") -> None:
        self.neighbours, self.distance = neighbours, distance

    def fit(self, features: Float[Tensor, "s d"], labels: Int[Tensor, " s"]) -> "NearestNeighbours":
        if len(features) < self.neighbours:
            raise CapiError(f"{len(features)} labelled images are fewer than the {self.neighbours} neighbours to ask")
        self.features_, self.labels_ = self._prepared(features), labels
        self.classes_ = int(labels.max()) + 1
        return self

    def kneighbors(self, features: Float[Tensor, "s d"]) -> Int[Tensor, "s n"]:
        """Numbers of the nearest training vectors, nearest first."""
        parts = self._prepared(features).split(_ROWS_AT_A_TIME)
        return torch.cat([self._nearest(part) for part in parts])

    def predict(self, features: Float[Tensor, "s d"]) -> Int[Tensor, " s"]:
        return self.vote(self.kneighbors(features))

    def score(self, features: Float[Tensor, "s d"], labels: Int[Tensor, " s"]) -> float:
        """Share of right answers."""
        return (self.predict(features) == labels).double().mean().item()

    def vote(self, nearest: Int[Tensor, "s n"]) -> Int[Tensor, " s"]:
        """The majority among given neighbours."""
        labels = self.labels_[nearest]
        votes = torch.zeros(len(labels), self.classes_, dtype=torch.float64)
        votes.scatter_add_(1, labels, torch.ones_like(labels, dtype=torch.float64))
        # Less than a vote for each class, more the earlier it appears.
        earliness = 1 - torch.arange(labels.shape[1], dtype=torch.float64) / (labels.shape[1] + 1)
        first = torch.zeros_like(votes).scatter_reduce_(1, labels, earliness.expand(labels.shape), "amax")
        return (votes + first / 2).argmax(1)

    def _prepared(self, features: Tensor) -> Tensor:
        if not torch.isfinite(features).all():
            raise CapiError("the features hold values that are no finite numbers")
        # Differences of squares lose digits far from the origin, so l2 counts in float64.
        return F.normalize(features.float(), dim=1) if self.distance == "cosine" else features.double()

    def _nearest(self, part: Tensor) -> Tensor:
        closeness = part @ self.features_.T
        if self.distance == "l2":
            closeness = closeness - self.features_.square().sum(1) / 2
        return closeness.sort(dim=1, descending=True, stable=True).indices[:, : self.neighbours]
