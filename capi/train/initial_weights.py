"""Continued pretraining: a new run starts from the weights of a trained model in place of fresh ones.

Encoder, predictor and head of the student are filled, and the teacher is its copy; from a run of ours the prototypes
come along. `init.strict` asks that encoder and predictor fit in everything. The head and the prototypes belong to a
target, which a new run may change: they are taken where they fit, and where they do not is logged.

With `init.parts=encoder` the encoder alone is filled, which may be another method's: `adapted_sections` says what a
config must have for it. A patch embedding of another patch size or of other channels is resampled.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.config.schema import BaselineConfig, Config
from capi.data.crops import image_size_of
from capi.data.survey import significant
from capi.errors import CapiError, counted, some_of
from capi.models.architecture import Architecture, architecture_of
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.plain_vit import PlainEncoder, PlainNetwork
from capi.models.weightless import without_weights
from capi.runtime.protocol import PAPER_SIZE
from capi.train.step import Learner
from capi.types import Float, VisionEncoder, statistics_of
from capi.zoo import build as networks
from capi.zoo.baselines import is_baseline
from capi.zoo.baselines.load import weightless_baseline
from capi.zoo.checkpoint_files import CheckpointFolder, StoredTensors
from capi.zoo.encoders import open_configured_encoder
from capi.zoo.run_folder import RunFolder

Tensors = Mapping[str, Tensor]
_MUST_FIT = ("encoder", "predictor")


@dataclass(frozen=True)
class LoadedPart:
    """What became of the encoder, the predictor, the head or the prototypes, by the names of their tensors."""

    name: str
    loaded: tuple[str, ...]
    parameters: int
    """Numbers in the loaded tensors."""
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not (self.missing or self.extra or self.misshapen)

    @property
    def sentence(self) -> str:
        """The outcome in one line."""
        faults = (
            ("fresh (not there)", self.missing),
            ("fresh (another shape)", self.misshapen),
            ("left out (the run has no such tensors)", self.extra),
        )
        misfits = [f"{some_of(names)} {what}" for what, names in faults if names]
        loaded = f"{counted(len(self.loaded), 'tensor')} with {counted(self.parameters, 'parameter')} loaded"
        return f"{self.name}: {'; '.join([loaded, *misfits])}"


@dataclass(frozen=True)
class Initialized:
    """What a run started from: for people in `lines`, for its provenance in `record`."""

    source: str
    sha256: str
    parts: tuple[LoadedPart, ...]
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        heading = f"starts from {self.source} (sha256 of its tensors {self.sha256[:16]})"
        return [heading, *(f"  {part.sentence}" for part in self.parts), *(f"  {note}" for note in self.notes)]

    @property
    def record(self) -> dict[str, Any]:
        loaded = {part.name: {"tensors": len(part.loaded), "parameters": part.parameters} for part in self.parts}
        return {"encoder": self.source, "sha256": self.sha256, "loaded": loaded, "notes": list(self.notes)}


def initialize(learner: Learner, config: Config) -> Initialized | None:
    """Fill a fresh learner as `init` asks; None where it asks for nothing. Nothing is changed where it is refused."""
    source = config.init.encoder
    if source is None:
        return None
    if config.init.parts == "encoder":
        return _fill_encoder(learner, config, source)
    given, student = _opened(source, learner.device), learner.student
    wanted = architecture_of(given)
    differing = _differences(architecture_of(networks.frozen(student, given.statistics)), wanted)
    parts = [
        _compared(name, getattr(student, name).state_dict(), network.state_dict() if network else {})
        for name in (*_MUST_FIT, "head")
        for network in [getattr(given, name)]
    ]
    if config.init.strict:
        _refuse_misfits(source, differing, wanted, parts)
    elif not parts[0].loaded:
        raise CapiError(f"nothing of {source} fits the encoder of the config: {_remedies(differing, wanted)}")
    for part in parts:
        _copy(part, getattr(student, part.name), getattr(given, part.name))
    learner.teacher.average.load_state_dict(student.state_dict())
    prototypes, untold = _take_prototypes(learner, source)
    notes = [_unseen(difference) for difference in differing if difference.key in _SHAPELESS]
    notes += _statistics_note(config, given) + untold
    return Initialized(source, fingerprint(given.state_dict()), (*parts, *prototypes), tuple(notes))


def _opened(source: str, device: torch.device) -> CapiEncoder:
    given = open_configured_encoder(source, device=device)
    if not isinstance(given, CapiEncoder):
        raise CapiError(
            f"init.encoder={source} is a {type(given).__name__}, whose weights a run cannot start from: name a run, a "
            "file or a folder with the weights of a CAPI model, or start with `capi adapt`"
        )
    return given


def adapted_sections(source: str, *, weights: bool = True) -> dict[str, Any]:
    """The sections of a config that describe an encoder and its images, for a student that starts from it.

    Without `weights` a baseline that is named without a place is described as it is published.
    """
    published = not weights and is_baseline(source) and "=" not in source
    given = weightless_baseline(source) if published else open_configured_encoder(source)
    network = _network_of(given, source)
    plain = isinstance(network, PlainNetwork)
    trunk: Any = network.architecture if plain else architecture_of(cast("CapiEncoder", given))
    names = ("width", "depth", "heads", "patch_size", "registers", "channels")
    model: dict[str, Any] = {name: getattr(trunk, name) for name in names}
    model |= {"mlp_ratio": trunk.mlp_width / trunk.width, "predictor": {"depth": max(min(trunk.depth // 2, 4), 1)}}
    if isinstance(network, PlainNetwork):
        # Refuses a model that cannot be masked before anything is built.
        with without_weights():
            PlainEncoder(trunk)
        assert network.origin is not None, "an encoder of a file knows where it is from"
        differing = {key: getattr(trunk, key) for key in BaselineConfig.model_fields if key not in ("name", "layout")}
        model["baseline"] = {"name": network.origin.baseline, "layout": network.origin.layout, **differing}
        size = [min(trunk.native_size, PAPER_SIZE[0]) // trunk.patch_size * trunk.patch_size] * 2
    else:
        model["positions"] = trunk.positions
        size = list(image_size_of(given))
    mean, std = statistics_of(given)
    data = {"image_size": size[0] if size[0] == size[1] else size, "mean": list(mean), "std": list(std)}
    return {"model": model, "data": data, "init": {"encoder": source, "parts": "encoder"}}


def _network_of(given: VisionEncoder, source: str) -> Encoder | PlainNetwork:
    """The part of an opened model that a student's encoder can be."""
    network = given.encoder if isinstance(given, CapiEncoder) else given
    if not isinstance(network, Encoder | PlainNetwork):
        raise CapiError(
            f"{source} is a {type(given).__name__}, whose weights no student can start from: name a run, a published "
            "model, a file, or baseline:NAME (`capi models` lists them)"
        )
    return network


def _fill_encoder(learner: Learner, config: Config, source: str) -> Initialized:
    """Student and teacher get the encoder; predictor, head and prototypes stay new."""
    given, own = open_configured_encoder(source, device=learner.device), learner.student.encoder
    state, ours = _network_of(given, source).state_dict(), cast("nn.Module", own).state_dict()
    if "rotary_periods" in ours:
        state["rotary_periods"] = cast("Tensor", cast("PlainNetwork", _network_of(given, source)).rotary_periods)
    name = "patch_embedding.weight"
    state[name], notes = fitted_patches(state[name], ours[name])
    part = _compared("encoder", ours, state)
    # What LoRA puts beside a map is new.
    part = replace(part, missing=tuple(key for key in part.missing if not key.endswith((".down", ".up"))))
    if not part.fits:
        wanted = adapted_sections(source)["model"]
        differing = [
            f"model.{key}={value}"
            for key, value in wanted.items()
            if key in _SIZES and value != getattr(config.model, key)
        ]
        raise CapiError(
            f"{source} does not fit in its {part.sentence}"
            + (f": set {' '.join(differing)}" if differing else ": start it with `capi adapt`")
        )
    with torch.no_grad():
        for key in part.loaded:
            ours[key].copy_(state[key])
    learner.teacher.average.load_state_dict(learner.student.state_dict())
    licence = getattr(given, "licence", "")
    notes += _statistics_note(config, given) + ([f"license of these weights: {licence}"] if licence else [])
    return Initialized(source, fingerprint(state), (part,), ("predictor, head and prototypes: new", *notes))


# They are the encoder's own; patch size and channels may change.
_SIZES = ("width", "depth", "heads", "registers", "mlp_ratio")


def fitted_patches(
    weight: Float[Tensor, "d c size size"], like: Float[Tensor, "d e other other"]
) -> tuple[Float[Tensor, "d e other other"], list[str]]:
    """A patch embedding for the channels and the patch size of another one, and what was done to it.

    A patch of another size gives what it gave once it is resized to the old one, which is linear: with R for the
    resizing the new weights are R^T w. New channels begin as the mean of the old ones; all are scaled so that their
    sum stays of the same size.
    """
    notes = []
    (given, size), (channels, other) = weight.shape[1:3], like.shape[1:3]
    if size != other:
        pixels = torch.eye(other * other, device=weight.device).view(1, other * other, other, other)
        resize = F.interpolate(pixels, (size, size), mode="bicubic", antialias=True)[0].flatten(1)
        weight = (weight.flatten(2) @ resize.T).unflatten(2, (other, other))
        notes.append(f"patch embedding: resampled from {size} to {other} pixels a side")
    if given != channels:
        mean = weight.mean(1, keepdim=True)
        own = weight if channels > given else mean[:, :0]
        weight = torch.cat([own, mean.expand(-1, channels - own.shape[1], -1, -1)], 1) * (given / channels)
        own_channels = f"{given} of its own and " if own.shape[1] else ""
        notes.append(
            f"patch embedding: {counted(channels, 'channel')}, {own_channels}{channels - own.shape[1]} as the mean of "
            "those"
        )
    return weight, notes


def fingerprint(state: Tensors) -> str:
    """A checksum of tensors and their names, whatever file or device they lie in."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class _Difference:
    """A key of the config, its value there and the one that the weights want."""

    key: str
    ours: Any
    theirs: Any


# They change what is computed, but the shape of no tensor.
_SHAPELESS = ("model.heads", "model.positions", "model.predictor.heads")
_RESAMPLED = ("model.patch_size", "model.channels")
_KEYS = {
    "width": "model.width",
    "depth": "model.depth",
    "heads": "model.heads",
    "patch_size": "model.patch_size",
    "registers": "model.registers",
    "channels": "model.channels",
    "positions": "model.positions",
    "predictor_kind": "model.predictor.kind",
    "predictor_width": "model.predictor.width",
    "predictor_depth": "model.predictor.depth",
    "predictor_heads": "model.predictor.heads",
}


def _differences(ours: Architecture, theirs: Architecture) -> list[_Difference]:
    """Where two architectures differ in encoder or predictor, by the keys of the config."""
    pairs = {key: (getattr(ours, name), getattr(theirs, name)) for name, key in _KEYS.items()}
    pairs["model.mlp_ratio"] = (ours.mlp_width / ours.width, theirs.mlp_width / theirs.width)
    pairs["data.image_size"] = (_native_size(ours), _native_size(theirs))
    differences = [_Difference(key, *values) for key, values in pairs.items() if values[0] != values[1]]
    # A size that only one of them has follows from the kind, which is named already.
    return [difference for difference in differences if difference.ours is not None and difference.theirs is not None]


def _native_size(architecture: Architecture) -> list[int] | None:
    """Height and width of the images that learned positions belong to."""
    return None if architecture.grid is None else [side * architecture.patch_size for side in architecture.grid]


def _remedies(differing: list[_Difference], theirs: Architecture) -> str:
    texts = [
        f"{difference.key} is {_spoken(difference.ours)} and its weights have {_spoken(difference.theirs)}"
        for difference in differing
    ]
    wanted = {difference.key: difference.theirs for difference in differing}
    if wanted.keys() & {"model.width", "model.depth", "model.heads"}:
        # What a config leaves open of the predictor follows the encoder, which is about to change.
        sizes = {key: getattr(theirs, name) for name, key in _KEYS.items() if name.startswith("predictor_")}
        wanted |= {key: value for key, value in sizes.items() if value is not None and key != "model.predictor.kind"}
    return f"{', '.join(texts)}: set {' '.join(f'{key}={_spoken(value)}' for key, value in wanted.items())}"


def _spoken(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unseen(difference: _Difference) -> str:
    return (
        f"{difference.key} is {difference.ours}, but these weights were trained with {difference.theirs}: they will "
        "compute something else"
    )


def _compared(name: str, own: Tensors, given: Tensors) -> LoadedPart:
    shared = [key for key in own if key in given]
    loaded = tuple(key for key in shared if own[key].shape == given[key].shape)
    return LoadedPart(
        name,
        loaded,
        parameters=sum(own[key].numel() for key in loaded),
        missing=tuple(key for key in own if key not in given),
        extra=tuple(key for key in given if key not in own),
        misshapen=tuple(key for key in shared if key not in loaded),
    )


def _refuse_misfits(source: str, differing: list[_Difference], wanted: Architecture, parts: list[LoadedPart]) -> None:
    """The key of the config says more than the names of tensors."""
    if differing:
        patches = not {difference.key for difference in differing}.isdisjoint(_RESAMPLED)
        other = f"; or start with `capi adapt {source}`, which resamples the patch embedding" if patches else ""
        raise CapiError(
            f"{source} does not fit the config: {_remedies(differing, wanted)}; or init.strict=false, which takes what "
            f"fits{other}"
        )
    for part in parts:
        if part.name in _MUST_FIT and not part.fits:
            raise CapiError(f"{source} does not fit in its {part.sentence}: init.strict=false takes what fits")


def _copy(part: LoadedPart, own: nn.Module, given: nn.Module | None) -> None:
    """Copy in place, since the optimiser knows the parameters as they are."""
    if given is None:
        return
    into, out_of = own.state_dict(), given.state_dict()
    with torch.no_grad():
        for key in part.loaded:
            into[key].copy_(out_of[key])


def _take_prototypes(learner: Learner, source: str) -> tuple[list[LoadedPart], list[str]]:
    """The prototypes of a run of ours, where this one has some; what is to be said where there are none to take."""
    if not learner.target.clusters:
        return [], []
    own, name = dict(learner.target.named_parameters()), learner.target.name
    stored = _newest_checkpoint(source)
    there = {} if stored is None else stored.weightless
    given = {key: there[f"{name}.{key}"] for key in ("prototypes", "bias") if f"{name}.{key}" in there}
    if stored is None or not given:
        return [], [f"prototypes: fresh, since {source} carries none"]
    part = _compared("prototypes", own, given)
    stored.read({f"{name}.{key}": own[key].detach() for key in part.loaded})
    return [part], []


def _newest_checkpoint(source: str) -> StoredTensors | None:
    folder = RunFolder(Path(source))
    if not folder.exists:
        return None
    return StoredTensors(CheckpointFolder(folder.checkpoints).newest)


def _statistics_note(config: Config, given: VisionEncoder) -> list[str]:
    if "auto" in {config.data.mean, config.data.std}:
        return []
    ours, theirs = networks.statistics(config), statistics_of(given)
    if ours == theirs or len(ours.mean) != len(theirs.mean):
        return []
    wanted = " ".join(f"data.{name}=[{significant(values, 4)}]" for name, values in theirs._asdict().items())
    return [
        f"images are normalized with mean {significant(ours.mean, 4)} and std {significant(ours.std, 4)}, but "
        f"these weights learnt from images normalised with {wanted}"
    ]
