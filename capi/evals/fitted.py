"""Probes that have been fitted: from features to classes, or to a label for every pixel.

Each is a dataclass of tensors and plain values, so that one function writes them all to a file (`probe_files`).
Evaluation scores a test set with the same objects that `capi predict` applies.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.evals.blocks import Ties, unblock, vote_blocks
from capi.evals.features import VectorKind, vectors_of
from capi.evals.neighbours import Distance, NearestNeighbours, Vote, class_votes
from capi.evals.probes import AttentiveProbes, LinearProbes
from capi.types import Features, Float, Int, Integer

# Breaks a tie of votes and is too small for anything else.
_TIE = 1e-9


@runtime_checkable
class Classifier(Protocol):
    """Features of images to a confidence in every class; rows sum to one, and equal classes are told apart by rule."""

    @property
    def width(self) -> int: ...

    @property
    def needs_pooled(self) -> bool: ...

    @property
    def needs_patches(self) -> bool:
        """Whether a vector for each image is not enough."""
        ...

    @property
    def images_at_a_time(self) -> int:
        """How many images are best judged together."""
        ...

    def inputs(self, features: Features) -> Tensor:
        """What of the features is looked at, a row for each image."""
        ...

    def judge(self, inputs: Tensor) -> Float[Tensor, "b classes"]: ...


@runtime_checkable
class Segmenter(Protocol):
    """Features of images to the label of every pixel, as the data set counts labels."""

    @property
    def width(self) -> int: ...

    def segment(self, features: Features, size: tuple[int, int]) -> Int[Tensor, "b height width"]: ...


@dataclass
class Judge:
    """A classifier at work: it is given features batch by batch, and judges as many images at a time as suit it."""

    classifier: Classifier
    numbers: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)

    def add(self, numbers: Int[Tensor, " b"], features: Features) -> Iterator[tuple[Tensor, Tensor]]:
        """Take a batch; the numbers and confidences of images that are judged now, if any are."""
        self.numbers.append(numbers)
        self.inputs.append(self.classifier.inputs(features))
        if sum(len(part) for part in self.numbers) >= self.classifier.images_at_a_time:
            yield from self.finish()

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The images that still wait."""
        if self.numbers:
            yield torch.cat(self.numbers), self.classifier.judge(torch.cat(self.inputs))
            self.numbers, self.inputs = [], []


@dataclass(frozen=True)
class LinearClassifier:
    """A linear map of one vector an image."""

    weight: Float[Tensor, "classes d"]
    bias: Float[Tensor, " classes"]
    feature: VectorKind

    @classmethod
    def of(cls, probes: LinearProbes, feature: VectorKind) -> "LinearClassifier":
        """The one setting of these probes."""
        classifier = probes.classifier
        return cls(classifier.weight.detach()[0].cpu(), classifier.bias.detach()[0].cpu(), feature)

    @property
    def width(self) -> int:
        return self.weight.shape[1] // (2 if self.feature == "both" else 1)

    @property
    def needs_pooled(self) -> bool:
        return self.feature != "mean_patch"

    @property
    def needs_patches(self) -> bool:
        return False

    @property
    def images_at_a_time(self) -> int:
        return 1

    def inputs(self, features: Features) -> Tensor:
        return vectors_of(features, self.feature)

    def judge(self, inputs: Tensor) -> Float[Tensor, "b classes"]:
        logits = inputs @ self.weight.to(inputs.device).T + self.bias.to(inputs.device)
        return logits.cpu().double().softmax(1)


@dataclass(frozen=True)
class AttentiveClassifier:
    """One learned query over the patches, then a linear map."""

    query: Float[Tensor, " d"]
    key_weight: Float[Tensor, "d d"]
    key_bias: Float[Tensor, " d"]
    value_weight: Float[Tensor, "d d"]
    value_bias: Float[Tensor, " d"]
    classifier_weight: Float[Tensor, "classes d"]
    classifier_bias: Float[Tensor, " classes"]

    @classmethod
    def of(cls, probes: AttentiveProbes) -> "AttentiveClassifier":
        """The one setting of these probes."""
        return cls(**{name.replace(".", "_"): value[0].cpu() for name, value in probes.state_dict().items()})

    @property
    def width(self) -> int:
        return len(self.query)

    @property
    def needs_pooled(self) -> bool:
        return False

    @property
    def needs_patches(self) -> bool:
        return True

    @cached_property
    def _probes(self) -> AttentiveProbes:
        probes = AttentiveProbes(settings=1, width=self.width, classes=len(self.classifier_bias))
        state = {name: getattr(self, name.replace(".", "_"))[None] for name in probes.state_dict()}
        probes.load_state_dict(state)
        return probes.requires_grad_(False)

    @property
    def images_at_a_time(self) -> int:
        return 1

    def inputs(self, features: Features) -> Tensor:
        return features.feature_map.flatten(1, 2)

    def judge(self, inputs: Tensor) -> Float[Tensor, "b classes"]:
        logits: Tensor = self._probes.to(inputs.device)(inputs)[0]
        return logits.cpu().double().softmax(1)


@dataclass(frozen=True)
class KnnClassifier:
    """The nearest training images vote."""

    bank: Float[Tensor, "s d"]
    labels: Int[Tensor, " s"]
    feature: VectorKind
    neighbours: int
    vote: Vote
    temperature: float
    classes: int

    @property
    def width(self) -> int:
        return self.bank.shape[1] // (2 if self.feature == "both" else 1)

    @property
    def needs_pooled(self) -> bool:
        return self.feature != "mean_patch"

    @property
    def needs_patches(self) -> bool:
        return False

    @cached_property
    def _search(self) -> NearestNeighbours:
        return NearestNeighbours(self.neighbours, "cosine").fit(self.bank)

    @property
    def images_at_a_time(self) -> int:
        # Each search goes through the whole bank, but many classes make large tables of votes.
        return max(2**22 // self.classes, 64)

    def inputs(self, features: Features) -> Tensor:
        return vectors_of(features, self.feature)

    def judge(self, inputs: Tensor) -> Float[Tensor, "b classes"]:
        self._search.device = inputs.device
        found = self._search.kneighbors(inputs)
        return vote_confidences(
            self.labels[found.index],
            found.closeness,
            neighbours=self.neighbours,
            classes=self.classes,
            vote=self.vote,
            temperature=self.temperature,
        )


def vote_confidences(
    labels: Int[Tensor, "s n"],
    closeness: Float[Tensor, "s n"],
    *,
    neighbours: int,
    classes: int,
    vote: Vote,
    temperature: float,
) -> Float[Tensor, "s classes"]:
    """Shares of the votes; a tie goes to the class whose nearest member is closest."""
    # Shares are of differences alone, and the exponential of these cannot overflow at a low temperature.
    behind = closeness - closeness[:, :1]
    votes = class_votes(labels, behind, neighbours, classes, vote=vote, temperature=temperature)
    nearest = labels[:, :neighbours]
    earliness = 1 - torch.arange(neighbours, dtype=torch.float64) / neighbours
    first = torch.zeros_like(votes).scatter_reduce_(1, nearest, earliness.expand(nearest.shape), "amax")
    shares = votes / votes.sum(1, keepdim=True) + _TIE * first
    return shares / shares.sum(1, keepdim=True)


@dataclass(frozen=True)
class KnnSegmenter:
    """The pixel labels of the nearest training patches vote."""

    bank: Float[Tensor, "s d"]
    blocks: Integer[Tensor, "s block_height block_width"]
    mean: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]
    neighbours: int
    distance: Distance
    ignored: tuple[int, ...]
    clean: bool
    ties: Ties = "smallest"

    @property
    def width(self) -> int:
        return self.bank.shape[1]

    @cached_property
    def _search(self) -> NearestNeighbours:
        return NearestNeighbours(self.neighbours, self.distance).fit(self.bank, mean=self.mean, scale=self.scale)

    def segment(self, features: Features, size: tuple[int, int]) -> Int[Tensor, "b height width"]:
        rows, columns = features.feature_map.shape[1:3]
        if (rows * self.blocks.shape[1], columns * self.blocks.shape[2]) != size:
            raise CapiError(
                f"patches of this probe have {self.blocks.shape[1]} x {self.blocks.shape[2]} pixels, which do not tile "
                f"{size[0]} x {size[1]} pixels in {rows} x {columns} patches: use the encoder it was fitted with"
            )
        self._search.device = features.feature_map.device
        found = self._search.kneighbors(features.feature_map.flatten(0, 2))
        voted = vote_blocks(self.blocks, found.index, ignored=self.ignored, clean=self.clean, ties=self.ties)
        return unblock(voted, rows, columns).long()


@dataclass(frozen=True)
class LogisticSegmenter:
    """Logistic regression gives each patch one label."""

    weight: Float[Tensor, "classes d"]
    bias: Float[Tensor, " classes"]
    labels: Int[Tensor, " classes"]

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    def segment(self, features: Features, size: tuple[int, int]) -> Int[Tensor, "b height width"]:
        tokens = features.feature_map.cpu().double()
        chosen = self.labels[(tokens @ self.weight.double().T + self.bias.double()).argmax(-1)]
        return spread(chosen, size)


def spread(patches: Int[Tensor, "b rows columns"], size: tuple[int, int]) -> Int[Tensor, "b height width"]:
    """One label a patch as one label a pixel."""
    rows, columns = patches.shape[1:]
    block = block_size((rows, columns), size)
    return patches.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)


def block_size(grid: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """Pixels of a patch; a feature map that does not tile the image is an error."""
    if size[0] % grid[0] or size[1] % grid[1]:
        raise CapiError(
            f"a feature map of {grid[0]} x {grid[1]} does not tile images of {size[0]} x {size[1]} pixels: choose "
            "image_size so that it does"
        )
    return size[0] // grid[0], size[1] // grid[1]
