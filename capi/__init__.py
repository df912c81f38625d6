"""CAPI: cluster and predict latent patches for improved masked image modeling.

    import capi
    encoder = capi.load("student.pth")
    pooled, registers, feature_map = encoder(images)

Names are imported when they are first used, so that `import capi` costs nothing.
"""

from typing import TYPE_CHECKING, Any

from capi import api as _api

if TYPE_CHECKING:
    from capi.api import *  # noqa: F403

__version__ = "0.1.0"

__all__ = ["__version__", *_api.PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _api.PUBLIC:
        raise AttributeError(f"module 'capi' has no attribute '{name}'")
    return getattr(_api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
