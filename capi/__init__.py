"""CAPI: cluster and predict latent patches for improved masked image modeling.

    import capi
    encoder = capi.load("student.pth")
    pooled, registers, feature_map = encoder(images)

Names are imported when they are first used, so that `import capi` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capi.api import build_learner as build_learner
    from capi.api import check as check
    from capi.api import check_data as check_data
    from capi.api import compare as compare
    from capi.api import compare_table as compare_table
    from capi.api import doctor as doctor
    from capi.api import draw as draw
    from capi.api import evaluate as evaluate
    from capi.api import explore as explore
    from capi.api import export as export
    from capi.api import extract as extract
    from capi.api import load as load
    from capi.api import nearest as nearest
    from capi.api import pack_shards as pack_shards
    from capi.api import plan as plan
    from capi.api import predict as predict
    from capi.api import pretrain as pretrain
    from capi.api import push as push
    from capi.api import report as report
    from capi.api import suggest as suggest
    from capi.api import transform as transform
    from capi.api import watch as watch
    from capi.api.ablation import ablate as ablate
    from capi.config.loading import load_config as load_config
    from capi.errors import CapiError as CapiError
    from capi.types import Features as Features
    from capi.types import MaskedBatch as MaskedBatch
    from capi.types import VisionEncoder as VisionEncoder

__version__ = "0.1.0"

_HOME = {
    "ablate": "capi.api.ablation",
    "build_learner": "capi.api",
    "check": "capi.api",
    "check_data": "capi.api",
    "compare": "capi.api",
    "compare_table": "capi.api",
    "doctor": "capi.api",
    "draw": "capi.api",
    "evaluate": "capi.api",
    "explore": "capi.api",
    "export": "capi.api",
    "extract": "capi.api",
    "load": "capi.api",
    "nearest": "capi.api",
    "pack_shards": "capi.api",
    "plan": "capi.api",
    "predict": "capi.api",
    "pretrain": "capi.api",
    "push": "capi.api",
    "report": "capi.api",
    "suggest": "capi.api",
    "transform": "capi.api",
    "watch": "capi.api",
    "load_config": "capi.config.loading",
    "CapiError": "capi.errors",
    "Features": "capi.types",
    "MaskedBatch": "capi.types",
    "VisionEncoder": "capi.types",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'capi' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
