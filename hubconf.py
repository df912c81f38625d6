"""Entry points of torch.hub: `torch.hub.load(REPOSITORY, "capi_vitl14_lvd")`. Nothing but torch has to be installed.

The files lie in the cache of torch.hub, where `capi.load` finds them too.
"""

# Hidden names: torch.hub takes everything else that can be called for an entry point.
from pathlib import Path as _Path

from capi.models.features import CapiEncoder as _CapiEncoder
from capi.zoo.published.cache import cached_file as _cached_file
from capi.zoo.published.registry import RELEASED as _RELEASED
from capi.zoo.released import load_released as _load_released

dependencies = ["torch"]


def capi_vitl14_lvd() -> _CapiEncoder:
    """ViT-L/14, trained on LVD-142M: `encoder(images)` gives pooled, registers and feature_map."""
    return _published("capi_vitl14_lvd")


def capi_vitl14_p205() -> _CapiEncoder:
    """ViT-L/14, trained on Places205: `encoder(images)` gives pooled, registers and feature_map."""
    return _published("capi_vitl14_p205")


def capi_vitl14_in22k() -> _CapiEncoder:
    """ViT-L/14, trained on ImageNet-22k: `encoder(images)` gives pooled, registers and feature_map."""
    return _published("capi_vitl14_in22k")


def capi_vitl14_in1k() -> _CapiEncoder:
    """ViT-L/14, trained on ImageNet-1k: `encoder(images)` gives pooled, registers and feature_map."""
    return _published("capi_vitl14_in1k")


def capi(path: str) -> _CapiEncoder:
    """The encoder of a checkpoint in the released layout, as `capi export --format released` writes it."""
    return _load_released(_Path(path))


def _published(name: str) -> _CapiEncoder:
    return _load_released(_cached_file(_RELEASED[name]))
