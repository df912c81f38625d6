"""Probes that have been fitted: from features to classes, or to a label for every pixel.

Each is a dataclass of tensors and plain values, so that one function writes them all to a file: safetensors with a
description inside, nothing of which is ever run. Evaluation scores a test set with the same objects that `capi predict`
applies. The description says what the probe was fitted on and for which encoder, so that applying it to another one is
an error and not a wrong answer.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_origin, runtime_checkable

import torch
from torch import Tensor, nn

from capi.errors import CapiError
from capi.evals.features import vectors_of
from capi.evals.neighbors import Distance, NearestNeighbors, Vote, class_votes
from capi.evals.patches import Ties, unblock, vote_blocks
from capi.evals.probes import AttentiveProbes, LinearProbes
from capi.runtime.atomic import atomic_path
from capi.runtime.devices import float32_products
from capi.runtime.documents import parse_object
from capi.runtime.privacy import hide_paths
from capi.runtime.protocol import VectorKind
from capi.types import Features, Float, Int, Integer, VisionEncoder, statistics_of

_LOG = logging.getLogger("capi")
# Breaks a tie of votes and is too small for anything else.
_TIE = 1e-9

Fitted = TypeVar("Fitted")


@runtime_checkable
class Classifier(Protocol):
    """Features of images to a confidence in every class; rows sum to one, ties are broken by rule.

    A dataclass with the `kind` of its protocol, and with the `axes` of its tensors: s samples, d width of a feature.
    """

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
    """Features of images to the label of every pixel, as the data set counts labels; else like a classifier."""

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


# By `kind`, the fitted probe of each protocol.
PROBES: dict[str, Any] = {}


def _listed(probe: type[Fitted]) -> type[Fitted]:
    PROBES[probe.kind] = probe  # type: ignore[attr-defined]
    return probe


class VectorClassifier:
    """What classifiers of one vector an image have in common."""

    feature: VectorKind

    @property
    def needs_pooled(self) -> bool:
        return self.feature != "mean_patch"

    @property
    def needs_patches(self) -> bool:
        return False

    def inputs(self, features: Features) -> Tensor:
        return vectors_of(features, self.feature)


@_listed
@dataclass(frozen=True)
class LinearClassifier(VectorClassifier):
    """A linear map of one vector an image."""

    kind: ClassVar[str] = "linear"
    axes: ClassVar[dict[str, str]] = {"weight": "classes d", "bias": "classes"}
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
    def images_at_a_time(self) -> int:
        return 1

    @float32_products("highest")
    def judge(self, inputs: Tensor) -> Float[Tensor, "b classes"]:
        logits = inputs @ self.weight.to(inputs.device).T + self.bias.to(inputs.device)
        return logits.cpu().double().softmax(1)


@_listed
@dataclass(frozen=True)
class AttentiveClassifier:
    """One learned query over the patches, then a linear map."""

    kind: ClassVar[str] = "attentive"
    axes: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("query", "key_bias", "value_bias"), "d"),
        **dict.fromkeys(("key_weight", "value_weight"), "d d"),
        **{"classifier_weight": "classes d", "classifier_bias": "classes"},
    }
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

    @float32_products("highest")
    def judge(self, inputs: Tensor) -> Float[Tensor, "b classes"]:
        logits: Tensor = self._probes.to(inputs.device)(inputs)[0]
        return logits.cpu().double().softmax(1)


@_listed
@dataclass(frozen=True)
class KnnClassifier(VectorClassifier):
    """The nearest training images vote."""

    kind: ClassVar[str] = "knn"
    axes: ClassVar[dict[str, str]] = {"bank": "s d", "labels": "s"}
    bank: Float[Tensor, "s d"]
    labels: Int[Tensor, " s"]
    feature: VectorKind
    neighbors: int
    vote: Vote
    temperature: float
    classes: int

    def __post_init__(self) -> None:
        in_range = (self.labels >= 0) & (self.labels < checked_count(self.classes))
        if not float(self.temperature) > 0 or not in_range.all():
            raise ValueError("labels or temperature are out of range")

    @property
    def width(self) -> int:
        return self.bank.shape[1] // (2 if self.feature == "both" else 1)

    @cached_property
    def _search(self) -> NearestNeighbors:
        return NearestNeighbors(self.neighbors, "cosine").fit(self.bank)

    @property
    def images_at_a_time(self) -> int:
        # Each search goes through the whole bank, but many classes make large tables of votes.
        return max(2**22 // self.classes, 64)

    def judge(self, inputs: Tensor) -> Float[Tensor, "b classes"]:
        self._search.device = inputs.device
        nearest = self._search.kneighbors(inputs)
        return vote_confidences(
            self.labels[nearest.index],
            nearest.closeness,
            neighbors=self.neighbors,
            classes=self.classes,
            vote=self.vote,
            temperature=self.temperature,
        )


def vote_confidences(
    labels: Int[Tensor, "s n"],
    closeness: Float[Tensor, "s n"],
    *,
    neighbors: int,
    classes: int,
    vote: Vote,
    temperature: float,
) -> Float[Tensor, "s classes"]:
    """Shares of the votes; a tie goes to the class whose nearest member is closest."""
    # Shares are of differences alone, and the exponential of these cannot overflow at a low temperature.
    behind = closeness - closeness[:, :1]
    votes = class_votes(labels, behind, neighbors, classes, vote=vote, temperature=temperature)
    nearest = labels[:, :neighbors]
    earliness = 1 - torch.arange(neighbors, dtype=torch.float64) / neighbors
    first = torch.zeros_like(votes).scatter_reduce_(1, nearest, earliness.expand(nearest.shape), "amax")
    shares = votes / votes.sum(1, keepdim=True) + _TIE * first
    return shares / shares.sum(1, keepdim=True)


@_listed
@dataclass(frozen=True)
class KnnSegmenter:
    """The pixel labels of the nearest training patches vote."""

    kind: ClassVar[str] = "knn-segmentation"
    axes: ClassVar[dict[str, str]] = {"bank": "s d", "blocks": "s rows columns", "mean": "d", "scale": "d"}
    bank: Float[Tensor, "s d"]
    blocks: Integer[Tensor, "s block_height block_width"]
    mean: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]
    neighbors: int
    distance: Distance
    ignored: tuple[int, ...]
    clean: bool
    ties: Ties = "smallest"

    @property
    def width(self) -> int:
        return self.bank.shape[1]

    @cached_property
    def _search(self) -> NearestNeighbors:
        return NearestNeighbors(self.neighbors, self.distance).fit(self.bank, mean=self.mean, scale=self.scale)

    def segment(self, features: Features, size: tuple[int, int]) -> Int[Tensor, "b height width"]:
        rows, columns = features.feature_map.shape[1:3]
        if (rows * self.blocks.shape[1], columns * self.blocks.shape[2]) != size:
            raise CapiError(
                f"patches of this probe have {self.blocks.shape[1]} x {self.blocks.shape[2]} pixels, which do not tile "
                f"{size[0]} x {size[1]} pixels in {rows} x {columns} patches: use the encoder it was fitted with"
            )
        self._search.device = features.feature_map.device
        nearest = self._search.kneighbors(features.feature_map.flatten(0, 2))
        voted = vote_blocks(self.blocks, nearest.index, ignored=self.ignored, clean=self.clean, ties=self.ties)
        return unblock(voted, rows, columns).long()


@_listed
@dataclass(frozen=True)
class LogisticSegmenter:
    """Logistic regression gives each patch one label."""

    kind: ClassVar[str] = "logistic-segmentation"
    axes: ClassVar[dict[str, str]] = {"weight": "classes d", "bias": "classes", "labels": "classes"}
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


_MARK = "capi_probe"
_VERSION = 1
# Fields that files call otherwise.
_IN_FILES = {"neighbors": "neighbours"}
# Pixels: as large as a config allows.
_LARGEST_SIDE = 2**16


@dataclass(frozen=True)
class Probe:
    """A fitted probe, the images it wants, and the names of what it predicts."""

    kind: str
    model: Classifier | Segmenter = field(repr=False)
    classes: dict[int, str]
    size: tuple[int, int]
    encoder: dict[str, Any]
    """Width, patch size and fingerprint of the encoder that it was fitted with."""
    ignored: tuple[int, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)
    """Where it comes from: benchmark, scores, settings."""

    @property
    def segments(self) -> bool:
        return isinstance(self.model, Segmenter)

    def refuse_other(self, encoder: VisionEncoder) -> None:
        """A probe belongs to the encoder whose features it was fitted on."""
        if encoder.width != self.encoder["width"]:
            raise CapiError(
                f"the probe was fitted on features of width {self.encoder['width']}, but this encoder gives "
                f"{encoder.width}: use the encoder it was fitted with"
            )
        if encoder.patch_size != self.encoder["patch_size"]:
            raise CapiError(
                f"the probe was fitted on patches of {self.encoder['patch_size']} pixels, but those of this encoder "
                f"have {encoder.patch_size}: use the encoder it was fitted with"
            )
        expected, fingerprint = self.encoder.get("fingerprint"), encoder_facts(encoder)["fingerprint"]
        if not (expected and fingerprint):
            _LOG.warning(
                "it is unknown whether the probe was fitted with this encoder, which has no weights to compare"
            )
        if expected and fingerprint and expected != fingerprint:
            raise CapiError(
                "the probe was fitted with another encoder of the same width, whose features mean something else: use "
                "that one, or evaluate this one to get a probe of its own"
            )


def encoder_facts(encoder: VisionEncoder) -> dict[str, Any]:
    """What identifies an encoder: its sizes, and where it is a module a digest of its weights and statistics."""
    facts: dict[str, Any] = {"width": encoder.width, "patch_size": encoder.patch_size, "fingerprint": None}
    if isinstance(encoder, nn.Module):
        digest = hashlib.sha256(repr(tuple(statistics_of(encoder))).encode())
        for name, value in sorted(encoder.state_dict().items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        facts["fingerprint"] = digest.hexdigest()[:16]
    return facts


def save_probe(probe: Probe, path: Path) -> None:
    """Write a probe, without places of this machine; the file appears complete or not at all."""
    from safetensors.torch import save_file

    values = {each.name: getattr(probe.model, each.name) for each in fields(probe.model)}  # type: ignore[arg-type]
    tensors = {name: value.contiguous() for name, value in values.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    facts = {each.name: getattr(probe, each.name) for each in fields(probe) if each.name != "model"}
    settings = {_IN_FILES.get(name, name): value for name, value in plain.items()}
    facts |= {"about": hide_paths(probe.about), "version": _VERSION, "settings": settings}
    with atomic_path(path) as partial:
        save_file(tensors, partial, metadata={_MARK: json.dumps(facts)})


def load_probe(path: Path) -> Probe:
    """Read a probe; anything else is an error."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        problem = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise CapiError(f"{problem}: give the probe.safetensors that an evaluation left in its --out")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise CapiError(f"{path} is no probe: expected the probe.safetensors of an evaluation") from error
    if _MARK not in metadata:
        raise CapiError(f"{path} holds tensors, but no probe: expected the probe.safetensors of an evaluation")
    try:
        return _described(parse_object(metadata[_MARK], str(path)), tensors, path)
    except CapiError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CapiError(f"{path} is a damaged probe ({error}): evaluate again to get a whole one") from error


def _described(facts: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> Probe:
    if facts["version"] > _VERSION or facts["kind"] not in PROBES:
        raise CapiError(f"{path} was written by a newer capi: install that one to use it")
    ours = {word: name for name, word in _IN_FILES.items()}
    settings = {
        ours.get(name, name): tuple(value) if isinstance(value, list) else value
        for name, value in facts["settings"].items()
    }
    height, width = (checked_count(side, _LARGEST_SIDE) for side in facts["size"])
    encoder = {"width": checked_count(facts["encoder"]["width"]), "patch_size": facts["encoder"]["patch_size"]}
    _check_model(facts["kind"], tensors, settings, encoder["width"])
    return Probe(
        kind=facts["kind"],
        model=PROBES[facts["kind"]](**tensors, **settings),
        classes={int(label): str(name) for label, name in facts["classes"].items()},
        size=(height, width),
        encoder=facts["encoder"] | encoder,
        ignored=tuple(map(int, facts["ignored"])),
        about=dict(facts["about"]),
    )


def _check_model(kind: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], width: int) -> None:
    """That tensors fit each other and the encoder, and that settings are in range."""
    sides = {"d": 2 * width if settings.get("feature") == "both" else width}
    for name, axes in PROBES[kind].axes.items():
        if len(axes.split()) != tensors[name].ndim:
            raise ValueError(f"{name} has {tensors[name].ndim} axes")
        for axis, side in zip(axes.split(), tensors[name].shape, strict=True):
            if sides.setdefault(axis, side) != side:
                raise ValueError(f"{name} has {side} values where others have {sides[axis]}")
        if tensors[name].is_floating_point() == (name in {"labels", "blocks"}):
            raise ValueError(f"{name} holds {tensors[name].dtype}")
    _check_choices(kind, settings)
    if "neighbors" in settings:
        checked_count(settings["neighbors"])


def _check_choices(kind: str, settings: Mapping[str, Any]) -> None:
    """That settings which are one of several words are one of them."""
    for each in fields(PROBES[kind]):
        wanted = get_args(each.type) if get_origin(each.type) is Literal else None
        if wanted is not None and settings.get(each.name, each.default) not in wanted:
            raise ValueError(f"{each.name} is none of {', '.join(map(str, wanted))}")


def checked_count(value: Any, most: int = 2**31) -> int:
    """A whole number from 1 on."""
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{str(value)[:40]} where a number from 1 to {most} is expected")
    return value
