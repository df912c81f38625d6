"""Where the weights of a baseline lie: `baseline:NAME`, `baseline:NAME=PLACE`, `baseline:NAME@PART`.

`baseline:NAME+RESAMPLING`, as in `mae_vitl16+antialias`, brings its positions to other grids in another way than its
authors do.

Without a place they are looked for in the folder that CAPI_BASELINES names, then in the cache of torch.hub: under the
baseline's own name (`mae_vitl16.pth`, or a folder `mae_vitl16`) or under the one that its authors gave the file. A
place is a path, an id of the Hub (owner/name), or `hub` for the id that is known. Nothing is downloaded unless it is
asked for.
"""

import os
from dataclasses import replace
from pathlib import Path

from capi.errors import CapiError
from capi.models.plain_vit import PlainViT
from capi.zoo.baselines.baseline import Baseline
from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.names import PREFIX, USUAL
from capi.zoo.baselines.registry import baseline_named
from capi.zoo.published import hub
from capi.zoo.published.cache import cache_folder

FOLDER_VARIABLE = "CAPI_BASELINES"
_BICUBIC = ("bicubic", "antialias")
_ENDINGS = ("", ".pth", ".pt", ".th", ".pth.tar", ".safetensors", ".bin")


def open_baseline(name: str) -> PlainViT:
    """The frozen encoder that `baseline:NAME[+RESAMPLING][@PART][=PLACE]` stands for."""
    whole, _, place = name.removeprefix(PREFIX).partition("=")
    model, at, part = whole.partition("@")
    model, plus, resampling = model.partition("+")
    baseline = baseline_named(model)
    if plus:
        baseline = _with_resampling(baseline, resampling)
    # A part that does not exist is told before a large file is read.
    if at:
        baseline.layout.part(part)
    return load_baseline(baseline, _named_place(baseline, place) if place else find_weights(baseline), part or None)


def _with_resampling(baseline: Baseline, resampling: str) -> Baseline:
    """The same model, whose table of positions comes to other grids by plain or by antialiased bicubic resampling."""
    own = baseline.architecture.resampling
    if own not in _BICUBIC or baseline.architecture.positions != "table":
        raise CapiError(f'{baseline.name} has one way to other sizes than its own: leave out "+{resampling}"')
    if resampling not in _BICUBIC:
        raise CapiError(f'{baseline.name} knows "+bicubic" and "+antialias", not "+{resampling}"; its own is {own}')
    return replace(baseline, architecture=baseline.architecture.changed(resampling=resampling))


def find_weights(baseline: Baseline) -> Path:
    """The file or folder on this machine; where there is none, what to download and where to put it."""
    folders = _folders()
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


def _folders() -> list[Path]:
    named = os.environ.get(FOLDER_VARIABLE)
    return ([Path(named).expanduser()] if named else []) + [cache_folder()]


def _named_place(baseline: Baseline, place: str) -> Path:
    path = Path(place).expanduser()
    if path.exists() and place != USUAL:
        return path
    if place == USUAL and baseline.hub_id is None:
        raise CapiError(f"{baseline.name} is not known to be on the Hub: get {baseline.file} of {baseline.source}")
    name = baseline.hub_id if place == USUAL else place
    assert name is not None
    if not hub.is_hub_id(name):
        raise CapiError(f"there is no {place}: expected {baseline.file} of {baseline.source}, or a folder or Hub id")
    return hub.hub_folder(name, kind=None)
