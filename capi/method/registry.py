"""The targets by the names that `target.kind` has for them."""

from capi.method.clustering import OnlineClustering
from capi.method.ema_head import EmaHead
from capi.method.feature_targets import FeatureTargets
from capi.method.frozen_targets import FrozenTargets
from capi.method.pixel_targets import PixelTargets
from capi.method.targets import Target
from capi.runtime.plugins import register

TARGETS: dict[str, type[Target]] = {
    "clustering": OnlineClustering,
    "ema_head": EmaHead,
    "features": FeatureTargets,
    "pixels": PixelTargets,
    "frozen": FrozenTargets,
}


def register_target(name: str, target: type[Target]) -> None:
    """Make a target of your own known as `target.kind=NAME` in this process."""
    register(TARGETS, name, target, "target.kind", Target)
