"""A model as a folder in the layout of the `transformers` library; neither writing nor reading it needs that library.

FOLDER/config.json                what the model is, and what its images are normalised with
FOLDER/model.safetensors          its weights
FOLDER/preprocessor_config.json   how an image becomes its input

`capi.huggingface` is what the library itself uses to open such a folder. What it saves is read here just the same.
"""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capi.data.crops import KEPT_SHARE
from capi.errors import CapiError, quoted, some_of
from capi.models.architecture import Architecture, architecture_of, weightless_encoder
from capi.models.features import CapiEncoder
from capi.runtime.atomic import atomic_folder, atomic_path, atomic_write
from capi.runtime.documents import read_object
from capi.types import Statistics
from capi.zoo.files import read_contents

MODEL_TYPE = "capi"
MODEL_CLASS, PROCESSOR_CLASS = "CapiModel", "CapiImageProcessor"
# The attribute of `CapiModel` that holds the encoder, which names of weights begin with.
ATTRIBUTE = "model"
CONFIG, WEIGHTS, PROCESSOR = "config.json", "model.safetensors", "preprocessor_config.json"
_BICUBIC = 3
# Files come from others, and images of this size are made by default.
_LARGEST_SIDE = 2**14

ImageSize = int | tuple[int, int]
"""A side in pixels, or height and width."""


def write_transformers(encoder: CapiEncoder, out: Path, *, image_size: ImageSize, overwrite: bool = False) -> Path:
    """Write a folder for images of this size; it appears complete or not at all.

    A folder that holds something is refused; with `overwrite` one that holds nothing but such an export is replaced.
    """
    checked_image_size(image_size, encoder.patch_size)
    target = out.resolve()
    check_place(target, overwrite)
    try:
        with atomic_folder(target) as partial:
            write_files(encoder, partial, image_size=image_size)
    except CapiError:
        raise
    except Exception as error:
        # A full disk is an OSError or a SafetensorError, depending on who writes.
        raise CapiError(f"{out} cannot be written ({getattr(error, 'strerror', None) or error})") from error
    return out


def write_files(encoder: CapiEncoder, folder: Path, *, image_size: ImageSize) -> None:
    """The files themselves, into a folder that is there."""
    atomic_write(folder / CONFIG, json.dumps(config_of(encoder, image_size), indent=2) + "\n")
    atomic_write(folder / PROCESSOR, json.dumps(processor_of(encoder, image_size), indent=2) + "\n")
    _write_weights(folder / WEIGHTS, encoder)


def config_of(encoder: CapiEncoder, image_size: ImageSize) -> dict[str, Any]:
    """What config.json says of a model; a size is one number where images are square, as usual in the library."""
    architecture = architecture_of(encoder)
    height, width = checked_image_size(image_size, architecture.patch_size)
    mean, std = encoder.statistics
    check_statistics(mean, std, architecture.channels, "the model")
    return {
        "architectures": [MODEL_CLASS],
        "model_type": MODEL_TYPE,
        "dtype": str(encoder.encoder.patch_embedding.weight.dtype).removeprefix("torch."),
        **architecture.as_plain(),
        "image_size": height if height == width else [height, width],
        "image_mean": list(mean),
        "image_std": list(std),
    }


def processor_of(encoder: CapiEncoder, image_size: ImageSize) -> dict[str, Any]:
    """What preprocessor_config.json says of its images."""
    height, width = checked_image_size(image_size, encoder.patch_size)
    mean, std = encoder.statistics
    return {
        "image_processor_type": PROCESSOR_CLASS,
        "do_resize": True,
        "size": {"height": height, "width": width},
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


def checked_image_size(size: Any, patch_size: int, source: str = "") -> tuple[int, int]:
    """Height and width of a size that patches fill; any other is refused, with the file that asks for it."""
    prefix = f"{source}: " if source else ""
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in sides):
        raise CapiError(f"{prefix}an image size of {size!r:.60} is no whole number of pixels, nor two (height, width)")
    for side in sides:
        if side > _LARGEST_SIDE:
            raise CapiError(f"{prefix}an image size of {side} is too large: expected at most {_LARGEST_SIDE} pixels")
        if side < 1 or side % patch_size:
            nearest = max(math.floor(side / patch_size + 0.5), 1) * patch_size
            raise CapiError(
                f"{prefix}an image size of {side} is no multiple of the model's patch size {patch_size}: take {nearest}"
            )
    return sides[0], sides[1]


def check_statistics(mean: Any, std: Any, channels: int, source: str) -> None:
    """A mean and a std above 0 for each channel."""
    for name, values in (("image_mean", mean), ("image_std", std)):
        listed = values if isinstance(values, list | tuple) else []
        real = all(isinstance(value, int | float) and math.isfinite(value) for value in listed)
        if len(listed) != channels or not real or (name == "image_std" and min(listed) <= 0):
            above = " above 0" if name == "image_std" else ""
            raise CapiError(f"{source} has {name} {values!r}, expected a number{above} for each of {channels} channels")


def check_place(out: Path, overwrite: bool) -> None:
    """Refuse a place where something else lies than an export."""
    if not out.exists():
        return
    if not out.is_dir():
        raise CapiError(f"{out} is a file: the transformers format is a folder, so give the name of one")
    names = sorted(path.name for path in out.iterdir())
    if names and not overwrite:
        raise CapiError(f"{out} is not empty ({names[0]} lies there): choose another folder, or ask to overwrite it")
    others = [name for name in names if name not in {CONFIG, WEIGHTS, PROCESSOR}]
    if others:
        raise CapiError(f"{out} holds {others[0]}, which no export wrote and none replaces: choose another folder")


def _write_weights(path: Path, encoder: CapiEncoder) -> None:
    from safetensors.torch import save_file

    state = {f"{ATTRIBUTE}.{name}": value.contiguous() for name, value in encoder.state_dict().items()}
    with atomic_path(path) as partial:
        # The library refuses files that do not say which framework they are for.
        save_file(state, partial, metadata={"format": "pt"})


def read_transformers(path: Path) -> CapiEncoder:
    """The frozen encoder of such a folder, in evaluation mode and float32; what lacks or is unknown is named."""
    architecture, statistics, image_size = _read_config(path / CONFIG)
    if not (path / WEIGHTS).is_file():
        raise CapiError(f"{path} has no {WEIGHTS}: expected all weights in that one file")
    state = read_contents(path / WEIGHTS)
    if not isinstance(state, dict):
        raise CapiError(f"{path / WEIGHTS} holds something other than weights by name: expected a safetensors file")
    names = [name.removeprefix(f"{ATTRIBUTE}.") for name in state if isinstance(name, str)]
    model = weightless_encoder(architecture, names, statistics, str(path / CONFIG), image_size)
    _check_weights(state, {f"{ATTRIBUTE}.{name}": value.shape for name, value in model.state_dict().items()}, path)
    own = {name.removeprefix(f"{ATTRIBUTE}."): value.float() for name, value in state.items()}
    model.load_state_dict(own, strict=True, assign=True)
    return model.requires_grad_(False).eval()


def _read_config(path: Path) -> tuple[Architecture, Statistics, tuple[int, int] | None]:
    values = read_object(path)
    kind = values.get("model_type")
    if kind != MODEL_TYPE:
        raise CapiError(
            f'{path} has model_type {kind!r}: expected a folder of a CAPI model, with "{MODEL_TYPE}" there (one of '
            "another method is named baseline:NAME=FOLDER, see `capi models --all`)"
        )
    names = {field.name for field in fields(Architecture)}
    # The library adds values of its own to this file, which say nothing of the architecture.
    own = {name: value for name, value in values.items() if name in names}
    architecture = Architecture.from_plain(own, source=str(path))
    mean: Any = values.get("image_mean")
    std: Any = values.get("image_std")
    check_statistics(mean, std, architecture.channels, str(path))
    size = values.get("image_size")
    image_size = None if size is None else checked_image_size(size, architecture.patch_size, str(path))
    return architecture, Statistics(tuple(map(float, mean)), tuple(map(float, std))), image_size


def _check_weights(state: dict[Any, Any], shapes: dict[str, torch.Size], path: Path) -> None:
    """Every weight there, none too many, each of the shape that the config asks for."""
    place = path / WEIGHTS
    missing, extra = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys(), key=str)
    if missing:
        raise CapiError(f"{place} lacks {some_of(quoted(missing), 1)}, which {CONFIG} beside it asks for")
    if extra:
        raise CapiError(f"{place} has {some_of(quoted(extra), 1)}, which {CONFIG} beside it does not know")
    for name, shape in shapes.items():
        value = state[name]
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
            raise CapiError(f'{place} has "{name}", which holds no real numbers')
        if value.shape != shape:
            raise CapiError(f'{place} has "{name}" of shape {tuple(value.shape)}, but {CONFIG} asks for {tuple(shape)}')
