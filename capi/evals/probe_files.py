"""A fitted probe as a file: safetensors with a description inside; nothing in it is ever run.

The description says what the probe was fitted on and for which encoder, so that applying it to another one is an error
and not a wrong answer.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor, nn

from capi.errors import CapiError
from capi.evals.fitted import (
    AttentiveClassifier,
    Classifier,
    KnnClassifier,
    KnnSegmenter,
    LinearClassifier,
    LogisticSegmenter,
    Segmenter,
)
from capi.runtime.atomic import atomic_path
from capi.runtime.documents import parse_object
from capi.types import VisionEncoder, statistics_of

_LOG = logging.getLogger("capi")
_MARK = "capi_probe"
_VERSION = 1
KINDS: dict[str, type[Any]] = {
    "attentive": AttentiveClassifier,
    "knn": KnnClassifier,
    "knn-segmentation": KnnSegmenter,
    "linear": LinearClassifier,
    "logistic-segmentation": LogisticSegmenter,
}
# Axes of the tensors of each: s samples, d width of a feature.
_AXES: dict[str, dict[str, str]] = {
    "attentive": {
        **dict.fromkeys(("query", "key_bias", "value_bias"), "d"),
        **dict.fromkeys(("key_weight", "value_weight"), "d d"),
        **{"classifier_weight": "classes d", "classifier_bias": "classes"},
    },
    "knn": {"bank": "s d", "labels": "s"},
    "knn-segmentation": {"bank": "s d", "blocks": "s rows columns", "mean": "d", "scale": "d"},
    "linear": {"weight": "classes d", "bias": "classes"},
    "logistic-segmentation": {"weight": "classes d", "bias": "classes", "labels": "classes"},
}
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
        return self.kind.endswith("segmentation")

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
        known, found = self.encoder.get("fingerprint"), encoder_facts(encoder)["fingerprint"]
        if not (known and found):
            _LOG.warning(
                "whether the probe was fitted with this encoder cannot be told: it has no weights to know it by"
            )
        if known and found and known != found:
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
    """Write a probe; the file appears complete or not at all."""
    from safetensors.torch import save_file

    values = {each.name: getattr(probe.model, each.name) for each in fields(probe.model)}  # type: ignore[arg-type]
    tensors = {name: value.contiguous() for name, value in values.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    facts = {each.name: getattr(probe, each.name) for each in fields(probe) if each.name != "model"}
    with atomic_path(path) as partial:
        save_file(tensors, partial, metadata={_MARK: json.dumps(facts | {"version": _VERSION, "settings": plain})})


def load_probe(path: Path) -> Probe:
    """Read a probe; anything else is an error."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        found = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise CapiError(f"{found}: give the probe.safetensors that an evaluation left in its --out")
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
        raise CapiError(f"{path} is a damaged probe ({error}): evaluate once more to get a whole one") from error


def _described(facts: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> Probe:
    if facts["version"] > _VERSION or facts["kind"] not in KINDS:
        raise CapiError(f"{path} was written by a newer capi: install that one to use it")
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in facts["settings"].items()}
    height, width = (checked_count(side, _LARGEST_SIDE) for side in facts["size"])
    encoder = {"width": checked_count(facts["encoder"]["width"]), "patch_size": facts["encoder"]["patch_size"]}
    _check_model(facts["kind"], tensors, settings, encoder["width"])
    return Probe(
        kind=facts["kind"],
        model=KINDS[facts["kind"]](**tensors, **settings),
        classes={int(label): str(name) for label, name in facts["classes"].items()},
        size=(height, width),
        encoder=facts["encoder"] | encoder,
        ignored=tuple(map(int, facts["ignored"])),
        about=dict(facts["about"]),
    )


def _check_model(kind: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], width: int) -> None:
    """That tensors fit each other and the encoder, and that settings are in range."""
    sides = {"d": 2 * width if settings.get("feature") == "both" else width}
    for name, axes in _AXES[kind].items():
        if len(axes.split()) != tensors[name].ndim:
            raise ValueError(f"{name} has {tensors[name].ndim} axes")
        for axis, side in zip(axes.split(), tensors[name].shape, strict=True):
            if sides.setdefault(axis, side) != side:
                raise ValueError(f"{name} has {side} values where others have {sides[axis]}")
        if tensors[name].is_floating_point() == (name in {"labels", "blocks"}):
            raise ValueError(f"{name} holds {tensors[name].dtype}")
    _check_choices(kind, settings)
    if "neighbours" in settings:
        checked_count(settings["neighbours"])
    if kind == "knn":
        known = checked_count(settings["classes"])
        if not float(settings["temperature"]) > 0 or not ((tensors["labels"] >= 0) & (tensors["labels"] < known)).all():
            raise ValueError("labels or temperature are out of range")


def _check_choices(kind: str, settings: Mapping[str, Any]) -> None:
    """That settings which are one of several words are one of them."""
    for each in fields(KINDS[kind]):
        wanted = get_args(each.type) if get_origin(each.type) is Literal else None
        if wanted is not None and settings.get(each.name, each.default) not in wanted:
            raise ValueError(f"{each.name} is none of {', '.join(map(str, wanted))}")


def checked_count(value: Any, most: int = 2**31) -> int:
    """A whole number from 1 on."""
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{str(value)[:40]} where a number from 1 to {most} is expected")
    return value
