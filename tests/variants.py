"""Every switch of the method, as overrides of a config."""

from capi.config.files import overridden, parse_config
from capi.config.schema import Config
from capi.train.build import build_learner, resolve_target
from capi.train.step import Learner

PREDICTORS = {
    "self": ["model.predictor.kind=self"],
    "self at all masked": [
        "model.predictor.kind=self",
        "model.predictor.mask_tokens=masked",
        "model.predictor.width=16",
        "model.predictor.heads=1",
    ],
    "fused": ["model.predictor.kind=fused"],
}
NETWORKS = PREDICTORS | {"learned": ["model.positions=learned"], "mlp": ["model.head=mlp"]}
TARGETS = {
    "ema_head": ["target.kind=ema_head"],
    "ema_head with sinkhorn": ["target.kind=ema_head", "target.ema_head.balance=sinkhorn"],
    "features": ["target.kind=features"],
    "pixels": ["target.kind=pixels"],
    "frozen": ["target.kind=frozen", "target.frozen.encoder=pixels:8"],
}
TOGETHER = {
    "fused, learned, pixels": [*PREDICTORS["fused"], "model.positions=learned", *TARGETS["pixels"]],
    "self, learned, frozen": [*PREDICTORS["self at all masked"], "model.positions=learned", *TARGETS["frozen"]],
    "fused, mlp, ema_head": [*PREDICTORS["fused"], "model.head=mlp", *TARGETS["ema_head"]],
}
LAYERS = {
    "all layers": ["target.layers=all", "target.normalize=instance"],
    "some layers, features": ["target.layers=[1,0]", "target.normalize=layer", "target.kind=features"],
    "last layer normalized, ema_head": ["target.normalize=instance", "target.kind=ema_head"],
}
SETTINGS = LAYERS | {
    "muon": ["optimization.optimizer=muon"],
    "random masks": ["masking.kind=random", "masking.roll=false"],
    "block masks": ["masking.kind=block"],
    "several blocks": ["masking.kind=multi_block"],
    "standard sinkhorn": ["clustering.sinkhorn=standard"],
    "released positions, no registers": ["model.positions=released", "model.registers=0"],
}
VARIANTS = NETWORKS | TARGETS | TOGETHER | SETTINGS


def varied(config: Config, *overrides: str) -> Config:
    return parse_config(overridden(config.model_dump(mode="json"), overrides))


def learner_of(config: Config) -> Learner:
    """A learner with its frozen encoder opened, where it has one."""
    config, encoder = resolve_target(config)
    return build_learner(config, "cpu", encoder)
