"""From a config to networks: the student that it describes, and encoders for evaluation."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from capi.config.schema import Config
from capi.errors import CapiError
from capi.method.student import Student, student_of
from capi.models.architecture import weightless
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import HEADS, LinearMap
from capi.models.predictor import CrossPredictor, FusedPredictor, Predictor, SelfPredictor
from capi.types import Statistics


def build_student(config: Config) -> Student:
    """Encoder, predictor and head as a config describes them, with fresh weights."""
    model = config.model
    encoder = Encoder(
        width=model.width,
        depth=model.depth,
        heads=model.heads,
        patch_size=model.patch_size,
        registers=model.registers,
        channels=model.channels,
        mlp_width=round(model.width * model.mlp_ratio),
        positions=model.positions,
        grid=config.grid,
        drop_rate=model.stochastic_depth,
    )
    predictor = _PREDICTORS[model.predictor.kind](config)
    return student_of(encoder=encoder, predictor=predictor, head=_build_head(config))


def weightless_student(config: Config, names: Sequence[str], source: str) -> Student:
    """The student of a config that `source` gave, without memory for its weights, which `names` lists."""
    predictor = None if config.model.predictor.kind == "fused" else config.model.predictor_depth
    depths = {"model.depth": ("encoder", config.model.depth), "model.predictor.depth": ("predictor", predictor)}
    with weightless(names, depths, source):
        return build_student(config)


def _build_head(config: Config) -> nn.Module:
    """What the student's output is: prototype logits, or the values that the target has for a patch."""
    model, target = config.model, config.target
    if target.has_prototypes:
        return HEADS[model.head](width=model.predictor_width, prototypes=config.clustering.prototypes)
    widths = {
        "features": model.width,
        "pixels": model.channels * model.patch_size**2,
        "frozen": target.frozen.width,
    }
    outputs = widths[target.kind]
    if outputs is None:
        raise CapiError("target.frozen.width is not known before a run has opened the encoder: give it in the config")
    return LinearMap(width=model.predictor_width, outputs=outputs)


def _split_shape(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "width": model.predictor_width,
        "depth": model.predictor_depth,
        "heads": model.predictor_heads,
        "context_width": model.width,
        "mlp_width": round(model.predictor_width * model.mlp_ratio),
        "positions": model.positions,
        "grid": config.grid,
        "drop_rate": model.stochastic_depth,
    }


_PREDICTORS: dict[str, Callable[[Config], Predictor]] = {
    "cross": lambda config: CrossPredictor(**_split_shape(config)),
    "self": lambda config: SelfPredictor(**_split_shape(config), mask_tokens=config.model.predictor.mask_tokens),
    "fused": lambda config: FusedPredictor(width=config.model.width),
}


def statistics(config: Config) -> Statistics:
    """Mean and deviation of the channels, once they are known."""
    mean, std = config.data.mean, config.data.std
    if isinstance(mean, str) or isinstance(std, str):
        raise CapiError("data.mean and data.std are `auto`, which only a run with images can replace by numbers")
    return Statistics(mean, std)


def frozen(student: Student, statistics: Statistics, image_size: tuple[int, int] | None = None) -> CapiEncoder:
    """A student or a teacher's average as an encoder for evaluation; it shares the weights."""
    assert isinstance(student.encoder, Encoder), f"CapiEncoder wants an Encoder, not {type(student.encoder).__name__}"
    return CapiEncoder(
        encoder=student.encoder,
        predictor=student.predictor,
        head=student.head,
        statistics=statistics,
        image_size=image_size,
    )
