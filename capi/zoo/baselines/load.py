"""Where the weights of a baseline lie: `baseline:NAME`, `baseline:NAME=PLACE`, `baseline:NAME@PART`.

`baseline:NAME+RESAMPLING`, as in `mae_vitl16+antialias`, brings its positions to other grids in another way than its
authors do.

Without a place they are looked for in the folder that CAPI_BASELINES names, then in the cache of torch.hub: under the
baseline's own name (`mae_vitl16.pth`, or a folder `mae_vitl16`) or under the one that its authors gave the file. A
place is a path, an id of the Hub (owner/name), or `hub` for the id that is known. Nothing is downloaded unless it is
asked for.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from capi.errors import CapiError
from capi.models.plain_vit import (
    PlainArchitecture,
    PlainViT,
    WeightsOrigin,
    column_first_sincos,
    rotary_periods,
    row_first_sincos,
)
from capi.models.weightless import without_weights
from capi.zoo.baselines import PREFIX, USUAL
from capi.zoo.baselines.keys import Layout, find_state, fits, is_ignored, to_ours
from capi.zoo.baselines.registry import BASELINES, Baseline, baseline_named, shapes_of
from capi.zoo.baselines.transformers_layout import (
    PICKLE,
    architecture_in,
    layout_for,
    read_config,
    read_weights,
)
from capi.zoo.files import read_contents
from capi.zoo.huggingface.files import CONFIG, WEIGHTS
from capi.zoo.released import StateDict, look_of

FOLDER_VARIABLE = "CAPI_BASELINES"
_BICUBIC = ("bicubic", "antialias")
_ENDINGS = ("", ".pth", ".pt", ".th", ".pth.tar", ".safetensors", ".bin")


def weightless_baseline(name: str) -> PlainViT:
    """The encoder that `baseline:NAME` stands for as its authors describe it, without weights."""
    baseline = baseline_named(name.removeprefix(PREFIX))
    with without_weights():
        return PlainViT(baseline.architecture, statistics=baseline.statistics, origin=WeightsOrigin(baseline.name))


def open_baseline(name: str) -> PlainViT:
    """The frozen encoder that `baseline:NAME[+RESAMPLING][@PART][=PLACE]` stands for."""
    whole, _, place = name.removeprefix(PREFIX).partition("=")
    model, at, part = whole.partition("@")
    model, plus, resampling = model.partition("+")
    baseline = baseline_named(model)
    if plus:
        baseline = _with_resampling(baseline, resampling)
    # A part that does not exist raises before a large file is read.
    if at:
        baseline.layout.part(part)
    return load_baseline(baseline, _named_place(baseline, place) if place else find_weights(baseline), part or None)


def _with_resampling(baseline: Baseline, resampling: str) -> Baseline:
    """The same model, whose positions are resampled to other grids by plain or by antialiased bicubic resampling."""
    own = baseline.architecture.resampling
    if own not in _BICUBIC or baseline.architecture.positions != "table":
        raise CapiError(f'{baseline.name} has one way to other sizes than its own: leave out "+{resampling}"')
    if resampling not in _BICUBIC:
        raise CapiError(f'{baseline.name} knows "+bicubic" and "+antialias", not "+{resampling}"; its own is {own}')
    return replace(baseline, architecture=baseline.architecture.changed(resampling=resampling))


def find_weights(baseline: Baseline) -> Path:
    """The file or folder on this machine; where there is none, what to download and where to put it."""
    from capi.zoo.published.cache import cache_folder

    named = os.environ.get(FOLDER_VARIABLE)
    folders = ([Path(named).expanduser()] if named else []) + [cache_folder()]
    names = [f"{baseline.name}{ending}" for ending in _ENDINGS] + [baseline.file]
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                return folder / name
    usual = f", or load {PREFIX}{baseline.name}={USUAL} ({baseline.hub_id} on the Hub)" if baseline.hub_id else ""
    raise CapiError(
        f"the weights of {baseline.name} are not on this machine: put {baseline.file} of {baseline.source} at "
        f"{folders[0] / baseline.name}.pth, or name the file with {PREFIX}{baseline.name}=PATH{usual}"
    )


def _named_place(baseline: Baseline, place: str) -> Path:
    path = Path(place).expanduser()
    if path.exists() and place != USUAL:
        return path
    # A file of this machine needs nothing of the Hub.
    from capi.zoo.published import hub

    if place == USUAL and baseline.hub_id is None:
        raise CapiError(f"{baseline.name} is not known to be on the Hub: get {baseline.file} of {baseline.source}")
    name = baseline.hub_id if place == USUAL else place
    assert name is not None
    if not hub.is_hub_id(name):
        raise CapiError(f"there is no {place}: expected {baseline.file} of {baseline.source}, or a folder or Hub id")
    return hub.hub_folder(name, kind=None)


_LOG = logging.getLogger("capi")
_MOST_NAMES = 4


def load_baseline(baseline: Baseline, path: Path, part: str | None = None) -> PlainViT:
    """The frozen encoder of a file or folder. `part` names one of several networks that a checkpoint holds."""
    if not path.exists():
        raise CapiError(f"there is no {path}: expected {baseline.file} of {baseline.source}")
    folder = _transformers_folder(path)
    if folder is None:
        contents = read_weights(path) if path.is_dir() else read_contents(path)
        origin = WeightsOrigin(baseline.name)
        return _build(baseline, baseline.architecture, contents, baseline.layout, part, str(path), origin)
    config = read_config(folder)
    if part is not None:
        raise CapiError(f'{folder} holds one network in the format of transformers: leave out "@{part}"')
    architecture = architecture_in(config, baseline, str(folder))
    layout = layout_for(architecture, str(config["model_type"]))
    origin = WeightsOrigin(baseline.name, "transformers")
    return _build(baseline, architecture, read_weights(folder), layout, None, str(folder), origin)


def _transformers_folder(path: Path) -> Path | None:
    """The folder that a path stands for, where its config.json names a type of transformers."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and not (folder / CONFIG).is_file():
        raise CapiError(f"{path} is a folder without {CONFIG}: give a checkpoint file, or a folder of transformers")
    named = path.is_dir() or path.name in (WEIGHTS, PICKLE)
    return folder if named and "model_type" in read_config(folder) else None


def _build(
    baseline: Baseline,
    architecture: PlainArchitecture,
    contents: Any,
    layout: Layout,
    part: str | None,
    source: str,
    origin: WeightsOrigin,
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
    left = sorted({name.split(".")[0] for name in state if is_ignored(name, layout)})
    if left:
        _LOG.info("%s: left out, as they are no part of the encoder: %s", source, ", ".join(left))
    _tell_doubtful(weights, architecture, baseline, source)
    with without_weights():
        model = PlainViT(
            architecture,
            statistics=baseline.statistics,
            licence=baseline.licence,
            verified=baseline.verified,
            origin=origin,
        )
    model.load_state_dict(weights, strict=True, assign=True)
    _set_periods(model, state, layout, source)
    return model.requires_grad_(False).eval()


def _set_periods(model: PlainViT, state: StateDict, layout: Layout, source: str) -> None:
    """Set the periods of rotary positions: those of the file, which may be rounded, else those that are computed."""
    if model.rotary_periods is None:
        return
    computed = rotary_periods(model.architecture.width // model.architecture.heads)
    periods = state.get(layout.periods, computed).detach().float()
    if periods.shape != computed.shape:
        asked = tuple(computed.shape)
        raise CapiError(f'{source} has "{layout.periods}" of shape {tuple(periods.shape)}, expected {asked}')
    model.rotary_periods = periods


def _tell_doubtful(weights: StateDict, architecture: PlainArchitecture, baseline: Baseline, source: str) -> None:
    """Names and shapes of several methods are the same; whether positions are learned tells some of them apart."""
    if "positions" not in weights:
        return
    side, width = architecture.grid, architecture.width
    table = weights["positions"][:, -side * side :]
    tables = {"column": column_first_sincos(side, side, width), "row": row_first_sincos(side, side, width, 1)}
    same = {name for name, fixed in tables.items() if torch.allclose(table, fixed, atol=1e-3)}
    expected = baseline.layout.positions
    if expected in tables and expected not in same:
        _LOG.warning(
            "%s has other positions than the fixed ones of %s: is it another method's?", source, baseline.title
        )
    if expected == "learned" and same:
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
    names = []
    for name, each in BASELINES.items():
        state = find_state(contents, each.layout, each.layout.part(None))
        if state is not None and fits(state, each.layout, each.shapes()):
            names.append(name)
    return names
