"""Several sources as one, each with a weight or by its size."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from capi.data.sources import ImageSource


class Mixture:
    """Sources numbered one after the other. In which proportion they come is a matter of the order."""

    def __init__(self, names: Sequence[str], parts: Sequence[ImageSource], weights: Sequence[float] | None) -> None:
        self.names, self.parts = list(names), list(parts)
        self.weights = None if weights is None else list(weights)
        self.ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def name(self, index: int) -> str:
        number, own = self._find(index)
        return f"{self.names[number]}: {self.parts[number].name(own)}"

    def read(self, index: int) -> Path | bytes:
        number, own = self._find(index)
        return self.parts[number].read(own)

    @cached_property
    def fingerprint(self) -> str:
        told = [part.fingerprint for part in self.parts]
        return hashlib.sha256(f"{told} {self.weights}".encode()).hexdigest()[:16]

    def _find(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        return number, index - (int(self.ends[number - 1]) if number else 0)
