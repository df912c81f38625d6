"""What an evaluation ends with, and how far it departed from the paper's protocol."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from capi.evals.probe_files import Probe
from capi.types import Int, VisionEncoder


@dataclass(frozen=True)
class SegmentedImage:
    """A test image by name and number, with its true and its predicted labels."""

    name: str
    number: int
    truth: Int[Tensor, "height width"]
    prediction: Int[Tensor, "height width"]


@dataclass(frozen=True)
class Outcome:
    """Scores from 0 to 1, the first being the one to quote; how they came about; and the probe that gave them."""

    scores: dict[str, float]
    chosen: dict[str, Any]
    """The settings that did best on held-out training images."""
    grid: list[dict[str, Any]]
    """Every setting that was tried, with its score there."""
    deviations: list[str]
    """Every departure from the paper's protocol."""
    warnings: list[str]
    details: dict[str, Any]
    probe: Probe | None = field(repr=False)
    """None in a process that helped another one."""
    pictures: list[SegmentedImage] = field(default_factory=list, repr=False)

    @property
    def main(self) -> float:
        return next(iter(self.scores.values()))


@runtime_checkable
class EvaluationProtocol(Protocol):
    """Anything that scores a frozen encoder."""

    def run(self, encoder: VisionEncoder) -> Outcome: ...


def departures(protocol: object, paper: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting that is not the paper's."""
    return [
        f"{name.replace('_', ' ')}: {_shown(getattr(protocol, name))} instead of {_shown(value)}"
        for name, value in paper.items()
        if getattr(protocol, name) != value
    ]


def _shown(value: Any) -> str:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return ", ".join(_shown(one) for one in value)


def size_notes(asked: tuple[int, int], used: tuple[int, int], patch_size: int, paper: tuple[int, int]) -> list[str]:
    """What must be said about the resolution."""
    notes = []
    if asked != paper:
        notes.append(f"image size: {_pixels(asked)} instead of {_pixels(paper)}")
    if used != asked:
        notes.append(f"image size: {_pixels(used)}, the nearest to {_pixels(asked)} that patches of {patch_size} fill")
    return notes


def precision_notes(precision: torch.dtype) -> list[str]:
    """What must be said about the precision of the encoder."""
    name = str(precision).removeprefix("torch.")
    return [] if name == "float32" else [f"precision: {name} instead of float32"]


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]} px"
