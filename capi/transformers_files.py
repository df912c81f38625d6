"""A model as a folder in the layout of the `transformers` library; neither writing nor reading it needs that library.

FOLDER/config.json                what the model is, and what its images are normalised with
FOLDER/model.safetensors          its weights
FOLDER/preprocessor_config.json   how an image becomes its input

`capi.huggingface` is what the library itself uses to open such a folder. What it saves is read here just the same.
"""

import json
import math
import stat
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capi.data.crops import KEPT_SHARE
from capi.data.replacing import replacing_folder
from capi.errors import CapiError, quoted, some_of
from capi.models.architecture import Architecture, architecture_of, build_encoder
from capi.models.features import CapiEncoder
from capi.models.files import read_contents
from capi.models.weightless import without_weights
from capi.runtime.documents import read_object
from capi.types import Statistics

MODEL_TYPE = "capi"
MODEL_CLASS, PROCESSOR_CLASS = "CapiModel", "CapiImageProcessor"
# The attribute of `CapiModel` that holds the encoder, which names of weights begin with.
ATTRIBUTE = "model"
CONFIG, WEIGHTS, PROCESSOR = "config.json", "model.safetensors", "preprocessor_config.json"
_BICUBIC = 3


def write_transformers(encoder: CapiEncoder, out: Path, *, image_size: int, overwrite: bool = False) -> Path:
    """Write a folder for images of this size; it appears complete or not at all.

    A folder that holds something is refused; with `overwrite` one that holds nothing but such an export is replaced.
    """
    config, processor = config_of(encoder, image_size), processor_of(encoder, image_size)
    target = out.resolve()
    _check_place(target, overwrite)
    try:
        with replacing_folder(target) as partial:
            partial.mkdir(parents=True)
            _write_json(partial / CONFIG, config)
            _write_json(partial / PROCESSOR, processor)
            _write_weights(partial / WEIGHTS, encoder)
    except Exception as error:
        # A full disk is an OSError or a SafetensorError, depending on who writes.
        raise CapiError(f"{out} cannot be written ({getattr(error, 'strerror', None) or error})") from error
    return out


def config_of(encoder: CapiEncoder, image_size: int) -> dict[str, Any]:
    """What config.json says of a model."""
    architecture = architecture_of(encoder)
    check_image_size(image_size, architecture.patch_size)
    mean, std = encoder.statistics
    check_statistics(mean, std, architecture.channels, "the model")
    return {
        "architectures": [MODEL_CLASS],
        "model_type": MODEL_TYPE,
        "dtype": str(encoder.encoder.registers.dtype).removeprefix("torch."),
        **architecture.as_plain(),
        "image_size": image_size,
        "image_mean": list(mean),
        "image_std": list(std),
    }


def processor_of(encoder: CapiEncoder, image_size: int) -> dict[str, Any]:
    """What preprocessor_config.json says of its images."""
    mean, std = encoder.statistics
    return {
        "image_processor_type": PROCESSOR_CLASS,
        "do_resize": True,
        "size": {"height": image_size, "width": image_size},
        "resample": _BICUBIC,
        "do_center_crop": True,
        "kept_share": KEPT_SHARE,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
        "patch_size": encoder.patch_size,
    }


def check_image_size(size: Any, patch_size: int) -> None:
    """Patches must fill the image."""
    if not isinstance(size, int) or isinstance(size, bool):
        raise CapiError(f"an image size of {size!r} is no whole number of pixels")
    if size < 1 or size % patch_size:
        nearest = max(math.floor(size / patch_size + 0.5), 1) * patch_size
        raise CapiError(
            f"an image size of {size} is no multiple of the model's patch size {patch_size}: take {nearest}"
        )


def check_statistics(mean: Any, std: Any, channels: int, source: str) -> None:
    """A mean and a deviation above 0 for each channel."""
    for name, values in (("image_mean", mean), ("image_std", std)):
        listed = values if isinstance(values, list | tuple) else []
        real = all(isinstance(value, int | float) and math.isfinite(value) for value in listed)
        if len(listed) != channels or not real or (name == "image_std" and min(listed) <= 0):
            above = " above 0" if name == "image_std" else ""
            raise CapiError(f"{source} has {name} {values!r}, expected a number{above} for each of {channels} channels")


def _check_place(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise CapiError(f"{out} is a file: the transformers format is a folder, so give the name of one")
    found = sorted(path.name for path in out.iterdir())
    if found and not overwrite:
        raise CapiError(f"{out} is not empty ({found[0]} lies there): choose another folder, or ask to overwrite it")
    others = [name for name in found if name not in {CONFIG, WEIGHTS, PROCESSOR}]
    if others:
        raise CapiError(f"{out} holds {others[0]}, which no export wrote and none replaces: choose another folder")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_weights(path: Path, encoder: CapiEncoder) -> None:
    from safetensors.torch import save_file

    state = {f"{ATTRIBUTE}.{name}": value.contiguous() for name, value in encoder.state_dict().items()}
    # The library refuses files that do not say which framework they are for.
    save_file(state, path, metadata={"format": "pt"})
    # safetensors writes files that only their owner may read; this one is as open as its neighbour.
    path.chmod(stat.S_IMODE((path.parent / CONFIG).stat().st_mode))


def read_transformers(path: Path) -> CapiEncoder:
    """The frozen encoder of such a folder, in evaluation mode and float32; what lacks or is unknown is named."""
    architecture, statistics = _read_config(path / CONFIG)
    if not (path / WEIGHTS).is_file():
        raise CapiError(f"{path} has no {WEIGHTS}: expected all weights in that one file")
    with without_weights():
        model = build_encoder(architecture, statistics)
    state = read_contents(path / WEIGHTS)
    _check_weights(state, {f"{ATTRIBUTE}.{name}": value.shape for name, value in model.state_dict().items()}, path)
    own = {name.removeprefix(f"{ATTRIBUTE}."): value.float() for name, value in state.items()}
    model.load_state_dict(own, strict=True, assign=True)
    return model.requires_grad_(False).eval()


def _read_config(path: Path) -> tuple[Architecture, Statistics]:
    values = read_object(path)
    kind = values.get("model_type")
    if kind != MODEL_TYPE:
        raise CapiError(f'{path} has model_type {kind!r}: expected a folder of a CAPI model, with "{MODEL_TYPE}" there')
    names = {field.name for field in fields(Architecture)}
    # The library adds values of its own to this file, which say nothing of the architecture.
    own = {name: value for name, value in values.items() if name in names}
    architecture = Architecture.from_plain(own, source=str(path))
    mean: Any = values.get("image_mean")
    std: Any = values.get("image_std")
    check_statistics(mean, std, architecture.channels, str(path))
    return architecture, Statistics(tuple(map(float, mean)), tuple(map(float, std)))


def _check_weights(state: Any, shapes: dict[str, torch.Size], path: Path) -> None:
    """Every weight there, none too many, each of the shape that the config asks for."""
    place = path / WEIGHTS
    if not isinstance(state, dict):
        raise CapiError(f"{place} holds something other than weights by name: expected a safetensors file")
    missing, extra = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys(), key=str)
    if missing:
        raise CapiError(f"{place} lacks {some_of(quoted(missing), 1)}, which {CONFIG} beside it asks for")
    if extra:
        raise CapiError(f"{place} has {some_of(quoted(extra), 1)}, which {CONFIG} beside it does not know")
    for name, shape in shapes.items():
        value = state[name]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise CapiError(f'{place} has "{name}", which holds no real numbers')
        if value.shape != shape:
            raise CapiError(f'{place} has "{name}" of shape {tuple(value.shape)}, but {CONFIG} asks for {tuple(shape)}')
