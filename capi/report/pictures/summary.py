"""All patches of any number of images, summed up in bounded memory: their moments, and a random sample of them.

The moments are exact. The sample decides about signs and colour ranges, and clusters and dictionaries are fitted to
it; as long as all patches fit into it, it is all of them. Which patches it holds depends on their order alone, not on
how they are batched.
"""

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.report.pictures.pca import Components, Moments, components_of, fit_components, moments_of
from capi.runtime.randomness import sample_keys
from capi.types import Float

SAMPLE_ROWS, SAMPLE_BYTES = 2**17, 2**27


class PatchSample:
    """At most `rows` patches, each patch of the stream as likely as any other: those with the smallest random keys."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.rows, self.seed, self.seen = rows, seed, 0
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._used, self._largest = 0, torch.iinfo(torch.int64).max

    def add(self, features: Float[Tensor, "s d"]) -> None:
        keys = sample_keys(self.seed, 0, torch.arange(self.seen, self.seen + len(features)))
        self.seen += len(features)
        # A slice would hold on to the whole batch, so a copy is kept.
        kept = keys <= self._largest
        self._parts.append((keys[kept], features[kept]))
        self._used += int(kept.sum())
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
        found = moments_of(torch.cat(self._waiting))
        self._moments = found if self._moments is None else self._moments.merged(found)
        self._waiting = []
