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
from typing import Any

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
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, metadata={_MARK: json.dumps(facts | {"version": _VERSION, "settings": plain})})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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
    return Probe(
        kind=facts["kind"],
        model=KINDS[facts["kind"]](**tensors, **settings),
        classes={int(label): name for label, name in facts["classes"].items()},
        size=tuple(facts["size"]),
        encoder=facts["encoder"],
        ignored=tuple(facts["ignored"]),
        about=facts["about"],
    )
