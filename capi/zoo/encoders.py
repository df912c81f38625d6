"""Encoders by the name that a user gives: a file, a run, a published model, a baseline, raw patches, an untrained
recipe, or Python of one's own.

What exists under a name on the disk comes first; only a name that does not is looked for elsewhere.
"""

import re
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from capi.config.files import load_config
from capi.config.trust import Trust, trusted_place, trusting
from capi.errors import CapiError, expect
from capi.models.features import CapiEncoder, PixelEncoder
from capi.models.plain_vit import PlainViT
from capi.runtime.plugins import import_code, in_one_line
from capi.types import IMAGENET, Statistics, VisionEncoder
from capi.zoo import build
from capi.zoo.baselines import is_baseline, is_on_this_machine
from capi.zoo.checkpoint_files import STATE
from capi.zoo.huggingface.files import CONFIG, WEIGHTS, read_transformers
from capi.zoo.published.registry import RELEASED, similar_names
from capi.zoo.released import load_released
from capi.zoo.run_folder import RECORD, RunFolder, run_config
from capi.zoo.weights import WeightsName, check_weights, load_exported, load_run

TRAINED = (
    "a run folder, a file of `capi export`, a checkpoint in the released layout, a folder in the transformers format, "
    f"a published model ({', '.join(RELEASED)}), or an id of the Hub (owner/name)"
)
ENCODER_FORMS = (
    f"{TRAINED}; or baseline:NAME (another method's), pixels:PATCH_SIZE (raw patches), untrained:RECIPE (or a run), or "
    "FILE.py:NAME or MODULE:NAME (an encoder of your own)"
)

# Kinds that are made here, with no file but a recipe.
_OURS = ("pixels", "untrained")


@runtime_checkable
class Trainee(Protocol):
    """Something that is being trained and can give its encoder as it stands, such as a learner."""

    def as_encoder(self, weights: WeightsName = "teacher") -> CapiEncoder: ...


def load(model: str | Path, *, weights: WeightsName = "teacher", trust: Trust = ()) -> CapiEncoder | PlainViT:
    """The frozen encoder of a run folder, of what `capi export` writes (but ONNX), of a checkpoint in the released
    layout, of a published model by its name (`capi models` lists them), or of a Hub id (`owner/name`); or of another
    method, as `baseline:NAME`.

    Of a run `weights` chooses the teacher (the moving average) or the student; files hold one of them. Calling the
    encoder on normalised images gives `Features(pooled, registers, feature_map)`; with `pooled=False` the pooled
    vector is neither computed nor given. A key that is missing, unknown or misshapen is an error that names it; of the
    released layout all keys of the head may be missing, since features need none of them. `trust` names the Python file
    that a run has its predictor from.
    """
    with trusting(trust):
        return _open_baseline(str(model)) if is_baseline(str(model)) else open_capi_encoder(model, weights)


def _open_baseline(name: str) -> PlainViT:
    # A table of 54 models in twelve files, which nothing else needs.
    from capi.zoo.baselines.load import open_baseline

    return open_baseline(name)


def open_capi_encoder(model: str | Path | Trainee, weights: WeightsName = "teacher") -> CapiEncoder:
    """The frozen encoder of a CAPI model by its path or name; `TRAINED` lists the forms. It may be downloaded."""
    if isinstance(model, Trainee):
        check_weights(weights)
        return model.as_encoder(weights)
    expect("the model", model, (str, Path), f"a learner, or the name or the path of {TRAINED}")
    if not str(model):
        raise CapiError(f"the model has an empty name: expected {TRAINED}")
    path = Path(model)
    check_weights(weights)
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:
        raise CapiError(f"{model} cannot be looked at ({error.strerror}): expected {TRAINED}") from error
    if is_folder:
        # A run, or else what the transformers library wrote.
        of_library = not (path / RECORD).is_file() and not (path / STATE).is_file() and (path / CONFIG).is_file()
        return read_transformers(path) if of_library else load_run(path, weights)
    return _load_file(path) if is_there else _load_named(str(model), TRAINED)


def _load_file(path: Path) -> CapiEncoder:
    exported = load_exported(path)
    if exported is not None:
        return exported
    if path.name == WEIGHTS and (path.parent / CONFIG).is_file():
        return read_transformers(path.parent)
    return load_released(path)


def _load_named(name: str, kinds: str) -> CapiEncoder:
    """A published model or one of the Hub; what has another name raises, with those that are spelt like it."""
    if is_baseline(name):
        raise CapiError(f"{name} is no model of CAPI, which this asks for: it can be evaluated, compared and loaded")
    # Imported where a file may have to be fetched: most models lie on this machine.
    from capi.zoo.published import hub
    from capi.zoo.published.cache import cached_file

    if name in RELEASED:
        return load_released(cached_file(RELEASED[name]))
    if hub.is_hub_id(name):
        # A folder that is here, and a run that is not: most likely misspelt, and asking the Hub takes long.
        if Path(name).parent.is_dir():
            raise CapiError(f"there is no {name} in the folder {Path(name).parent}{_similar(name)}: expected {kinds}")
        return read_transformers(hub.hub_folder(name))
    raise CapiError(f"there is no encoder {name}{_similar(name)}: expected {kinds}")


def _similar(name: str) -> str:
    """Names like this one, also of what lies in its folder."""
    folder = Path(name).parent
    try:
        beside = [str(folder / each.name) for each in folder.iterdir()]
    except OSError:
        beside = []
    return similar_names(name, beside)


def open_encoder(
    model: str | Path | VisionEncoder | Trainee, *, weights: WeightsName = "teacher", device: torch.device | str = "cpu"
) -> VisionEncoder:
    """Any encoder: by its name (`ENCODER_FORMS` lists the forms), of a learner, or given as it is.

    A module is set to evaluate on the device.
    """
    if isinstance(model, Trainee):
        model = open_capi_encoder(model, weights)
    encoder = _open(str(model), weights) if isinstance(model, str | Path) else model
    _check_encoder(encoder)
    if isinstance(encoder, nn.Module):
        encoder.eval().to(device)
    return encoder


def open_noted_encoder(
    name: object, file: str | Path, *, weights: WeightsName = "teacher", device: torch.device | str = "cpu"
) -> VisionEncoder:
    """The encoder that a file says it was made with.

    Anyone may have written the file, so that what it says runs no Python and downloads nothing but published models.
    """
    if not isinstance(name, str):
        raise CapiError(f"{file} says that {name!r} made it, which is no name: give the model with --model")
    if not _is_harmless(name):
        elsewhere = "not on this machine, and would be looked for on the Hub"
        reason = "Python that would be run" if _code_of(name) else elsewhere
        raise CapiError(f"{file} says that {name} made it, which is {reason}: if you trust it, give it with --model")
    return open_encoder(name, weights=weights, device=device)


def open_configured_encoder(name: str, *, device: torch.device | str = "cpu") -> VisionEncoder:
    """The encoder that a config names. Python code is imported only if it is trusted."""
    code = _code_of(name)
    if code is not None:
        name = f"{trusted_place(code)}:{name.rpartition(':')[2]}"
    return open_encoder(name, device=device)


def _code_of(name: str) -> str | None:
    """The Python file or module that opening this name imports; None where it imports none."""
    kind = name.rpartition(":")[0]
    return None if not kind or kind in _OURS or is_baseline(name) or Path(name).exists() else kind


def _is_harmless(name: str) -> bool:
    """Whether opening it runs no code of others and asks no place of their choice for files."""
    if Path(name).exists() or name in RELEASED:
        return True
    if is_baseline(name):
        return is_on_this_machine(name)
    return name.rpartition(":")[0] in _OURS


def _check_encoder(encoder: VisionEncoder) -> None:
    """An encoder of a user's own may say of itself what no encoder can be."""
    name = type(encoder).__name__
    for what, value in (("width", encoder.width), ("patch_size", encoder.patch_size)):
        if not isinstance(value, int) or value < 1:
            raise CapiError(f"{what} of the encoder {name} is {value!r}: expected a whole number from 1 on")
    size: object = getattr(encoder, "image_size", None)
    sides = size if isinstance(size, tuple | list) else (1, 1) if size is None else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CapiError(
            f"image_size of the encoder {name} is {size!r}: expected a side in pixels, (height, width), or None"
        )
    statistics: object = getattr(encoder, "statistics", None)
    if statistics is None:
        return
    if not isinstance(statistics, Statistics) or len(statistics.mean) != len(statistics.std):
        raise CapiError(
            f"statistics of the encoder {name} are {statistics!r}: expected capi.types.Statistics(mean, std), with one "
            "number for each channel in both"
        )


def _open(name: str, weights: WeightsName) -> VisionEncoder:
    if Path(name).exists():
        return open_capi_encoder(Path(name), weights)
    if is_baseline(name):
        return _open_baseline(name)
    kind, colon, rest = name.rpartition(":")
    if not colon:
        return _load_named(name, ENCODER_FORMS)
    if kind == "pixels":
        sizes = re.fullmatch(r"0*([1-9]\d{0,3})(?:x0*([1-9]\d{0,3}))?", rest)
        if sizes is None:
            raise CapiError(
                f'"pixels:{rest}" needs the side of a patch in pixels, such as pixels:16, or pixels:16x5 where images '
                "have 5 channels"
            )
        side, channels = int(sizes[1]), int(sizes[2] or len(IMAGENET.mean))
        plain = Statistics((0.0,) * channels, (1.0,) * channels)
        return PixelEncoder(side, IMAGENET if channels == len(IMAGENET.mean) else plain)
    if kind == "untrained":
        return untrained(rest)
    return _own(kind, rest, name)


def untrained(recipe: str) -> CapiEncoder:
    """The encoder of a recipe or of a run with fresh weights, drawn from its seed."""
    config = run_config(RunFolder(Path(recipe))) if Path(recipe).is_dir() else load_config(recipe)
    torch.manual_seed(config.seed)
    student = build.build_student(config)
    encoder = build.frozen(student, build.statistics(config), config.data.height_and_width)
    return encoder.eval().requires_grad_(False)


def _own(place: str, attribute: str, name: str) -> VisionEncoder:
    """An object of the user's own Python, called if it is no encoder yet; this runs their code."""
    try:
        module = import_code(place)
    except ModuleNotFoundError as error:
        raise CapiError(f"there is no encoder {name} ({error}): expected {ENCODER_FORMS}") from error
    encoder: Any = getattr(module, attribute, None)
    if encoder is None:
        raise CapiError(f'{place} has nothing called "{attribute}": expected an encoder, or what makes one when called')
    if isinstance(encoder, type) or not isinstance(encoder, VisionEncoder):
        encoder = _called(encoder, name)
    if not isinstance(encoder, VisionEncoder):
        raise CapiError(f"{name} is no encoder: it needs width, patch_size and a call that gives Features")
    return encoder


def _called(encoder: Any, name: str) -> Any:
    if not callable(encoder):
        return encoder
    try:
        return encoder()
    except Exception as error:
        raise CapiError(
            f"{name} makes no encoder when it is called without arguments ({in_one_line(error)})"
        ) from error
