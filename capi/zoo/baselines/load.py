"""A baseline out of its file: the original checkpoint, or a folder in the format of transformers.

Nothing that a file contains is run (capi/zoo/files.py). The names must be those of the layout, no more and no fewer;
what is known not to belong to the encoder is listed in each layout. A checkpoint of another model says which one it
looks like.
"""

import logging
from pathlib import Path
from typing import Any

import torch

from capi.errors import CapiError
from capi.models.plain_architecture import Architecture
from capi.models.plain_positions import column_first_sincos, rotary_periods, row_first_sincos
from capi.models.plain_vit import PlainViT
from capi.models.weightless import without_weights
from capi.zoo.baselines.baseline import Baseline, shapes_of
from capi.zoo.baselines.keys import Layout, State, find_state, fits, is_ignored, to_ours
from capi.zoo.baselines.registry import BASELINES
from capi.zoo.baselines.transformers_layout import (
    CONFIG,
    PICKLE,
    WEIGHTS,
    architecture_in,
    layout_for,
    read_config,
    read_weights,
)
from capi.zoo.files import read_contents
from capi.zoo.recognition import look_of

_LOG = logging.getLogger("capi")
_MOST_NAMES = 4
# What comes first in fixed tables of sines and cosines, by method.
_FIXED_POSITIONS = {"MAE": "column", "I-JEPA": "column", "data2vec 2.0": "column", "MoCo v3": "row"}
_LEARNED_POSITIONS = ("DINO", "iBOT", "MSN", "DINOv2")


def load_baseline(baseline: Baseline, path: Path, part: str | None = None) -> PlainViT:
    """The frozen encoder of a file or folder. `part` names one of several networks that a checkpoint holds."""
    if not path.exists():
        raise CapiError(f"there is no {path}: expected {baseline.file} of {baseline.source}")
    folder = _transformers_folder(path)
    if folder is None:
        return _load_original(baseline, path, part)
    config = read_config(folder)
    if part is not None:
        raise CapiError(f'{folder} holds one network in the format of transformers: leave out "@{part}"')
    architecture = architecture_in(config, baseline, str(folder))
    layout = layout_for(architecture, str(config["model_type"]))
    return _build(baseline, architecture, read_weights(folder), layout, None, str(folder))


def _transformers_folder(path: Path) -> Path | None:
    """The folder that a path stands for, where its config.json names a type of transformers."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and not (folder / CONFIG).is_file():
        raise CapiError(f"{path} is a folder without {CONFIG}: give a checkpoint file, or a folder of transformers")
    named = path.is_dir() or path.name in (WEIGHTS, PICKLE)
    return folder if named and "model_type" in read_config(folder) else None


def _load_original(baseline: Baseline, path: Path, part: str | None) -> PlainViT:
    contents = read_weights(path) if path.is_dir() else read_contents(path)
    return _build(baseline, baseline.architecture, contents, baseline.layout, part, str(path))


def _build(
    baseline: Baseline, architecture: Architecture, contents: Any, layout: Layout, part: str | None, source: str
) -> PlainViT:
    state = find_state(contents, layout, layout.part(part))
    if state is None:
        where = f' (its part "{part}")' if part else ""
        raise CapiError(f"{source} is no checkpoint of {baseline.name}{where}{_likeness(contents, baseline)}")
    try:
        weights = to_ours(state, layout, shapes_of(architecture), source)
    except CapiError as error:
        raise CapiError(f"{error}, so it is not {baseline.name}{_likeness(contents, baseline)}") from error
    without = sorted(name for name, value in weights.items() if value.is_meta)
    if without:
        raise CapiError(f'{source} says the shape of "{without[0]}" but does not hold its numbers: download it again')
    _tell_ignored(state, layout, source)
    _tell_doubtful(weights, architecture, baseline, source)
    with without_weights():
        model = PlainViT(
            architecture, statistics=baseline.statistics, licence=baseline.licence, verified=baseline.verified
        )
    model.load_state_dict(weights, strict=True, assign=True)
    _set_periods(model, state, layout, source)
    return model.requires_grad_(False).eval()


def _set_periods(model: PlainViT, state: State, layout: Layout, source: str) -> None:
    """Of rotary positions: the file's where it has them, as published ones are rounded; else as they are computed."""
    if model.rotary_periods is None:
        return
    computed = rotary_periods(model.architecture.width // model.architecture.heads)
    found = state.get(layout.periods, computed).detach().float()
    if found.shape != computed.shape:
        asked = tuple(computed.shape)
        raise CapiError(f'{source} has "{layout.periods}" of shape {tuple(found.shape)}, expected {asked}')
    model.rotary_periods = found


def _tell_ignored(state: State, layout: Layout, source: str) -> None:
    left = sorted({name.split(".")[0] for name in state if is_ignored(name, layout)})
    if left:
        _LOG.info("%s: left out, as they are no part of the encoder: %s", source, ", ".join(left))


def _tell_doubtful(weights: State, architecture: Architecture, baseline: Baseline, source: str) -> None:
    """Names and shapes of several methods are the same; whether positions are learned tells some of them apart."""
    if "positions" not in weights:
        return
    side, width = architecture.grid, architecture.width
    table = weights["positions"][:, -side * side :]
    tables = {"column": column_first_sincos(side, side, width), "row": row_first_sincos(side, side, width, 1)}
    found = {name for name, known in tables.items() if torch.allclose(table, known, atol=1e-3)}
    fixed = _FIXED_POSITIONS.get(baseline.layout.method)
    if fixed is not None and fixed not in found:
        _LOG.warning(
            "%s has other positions than the fixed ones of %s: is it another method's?", source, baseline.title
        )
    if baseline.layout.method in _LEARNED_POSITIONS and found:
        _LOG.warning("%s has fixed positions, where %s learns them: is it another's?", source, baseline.title)


def _likeness(contents: Any, baseline: Baseline) -> str:
    """Whose checkpoint it is instead, as the rest of a sentence."""
    names = fitting(contents)
    if names:
        shown = " or ".join(names[:_MOST_NAMES]) + (" or others" if len(names) > _MOST_NAMES else "")
        return f": its names and shapes are those of {shown}"
    seen = look_of(contents)
    if seen is None:
        return f": expected {baseline.file} of {baseline.source}"
    method, name = seen
    return f': it looks like a checkpoint of {method} (it has "{name}"), in a size or form that is not known here'


def fitting(contents: Any) -> list[str]:
    """The baselines whose names and shapes a checkpoint has."""
    found = []
    for name, each in BASELINES.items():
        state = find_state(contents, each.layout, each.layout.part(None))
        if state is not None and fits(state, each.layout, each.shapes()):
            found.append(name)
    return found
