"""From a config to the components that it names: the student and its target, and encoders for evaluation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from pydantic import TypeAdapter, ValidationError
from torch import nn

from capi.config.schema import Config, Section
from capi.errors import CapiError
from capi.method.registry import TARGETS
from capi.method.student import Student, student_of
from capi.method.targets import LossLabel, RunContext, Target, TargetFacts
from capi.models.architecture import weightless
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import HEADS, LinearMap
from capi.models.predictor import CrossPredictor, FusedPredictor, Predictor, SelfPredictor
from capi.types import Statistics, VisionEncoder

# Under these keys run.json has what the target of a run knows about itself.
LOSS, TARGET = "loss", "target"
# Text of a run that may come from anyone, and is shown.
_LONGEST_LABEL, _LONGEST_DESCRIPTION = 60, 200
_FACTS = TypeAdapter(TargetFacts)


def build_student(config: Config, target: TargetFacts | None = None) -> Student:
    """Encoder, predictor and head as a config describes them, with fresh weights.

    `target` is what a run wrote down about its own; without it, that of the config says how wide the output is.
    """
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
    return student_of(encoder=encoder, predictor=predictor, head=_build_head(config, target or target_facts(config)))


def weightless_student(config: Config, names: Sequence[str], source: str, target: TargetFacts | None = None) -> Student:
    """The student of a config that `source` gave, without memory for its weights, which `names` lists."""
    predictor = None if config.model.predictor.kind == "fused" else config.model.predictor_depth
    depths = {"model.depth": ("encoder", config.model.depth), "model.predictor.depth": ("predictor", predictor)}
    with weightless(names, depths, source):
        return build_student(config, target)


def _build_head(config: Config, target: TargetFacts) -> nn.Module:
    """What the student's output is: prototype logits, or the values that the target has for a patch."""
    model = config.model
    assert target.outputs is not None
    if target.has_prototypes:
        return HEADS[model.head](width=model.predictor_width, prototypes=target.outputs)
    return LinearMap(width=model.predictor_width, outputs=target.outputs)


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


def target_class(config: Config) -> type[Target]:
    """What `target.kind` names."""
    return TARGETS[config.target.kind]


def run_context(config: Config, encoder: VisionEncoder | None = None, processes: int = 1) -> RunContext:
    """What a config tells the target of one of so many processes."""
    model, optimization = config.model, config.optimization
    return RunContext(
        width=model.width,
        patch_size=model.patch_size,
        channels=model.channels,
        grid=config.grid,
        prototypes=config.clustering.prototypes,
        batch_size=optimization.batch_size,
        micro_batches=optimization.micro_batches,
        steps=optimization.steps,
        warmup_steps=optimization.warmup_steps,
        student_temperature=optimization.student_temperature,
        processes=processes,
        statistics=None if "auto" in {config.data.mean, config.data.std} else statistics(config),
        encoder=encoder,
    )


def target_settings(config: Config) -> dict[str, Any]:
    """What the config says about its target, as keyword arguments."""
    settings: dict[str, Any] = {}
    for path in target_class(config).reads:
        section: Section = config
        for name in path.split("."):
            section = getattr(section, name)
        settings |= dict(section)
    return settings


def statistics(config: Config) -> Statistics:
    """Mean and std of the channels, once they are known."""
    mean, std = config.data.mean, config.data.std
    if isinstance(mean, str) or isinstance(std, str):
        raise CapiError("data.mean and data.std are `auto`, which only a run with images can replace by numbers")
    return Statistics(mean, std)


def target_facts(config: Config) -> TargetFacts:
    """What the target of a config knows about itself."""
    target = target_class(config)
    return target.facts(target.outputs(run_context(config), **target_settings(config)))


def loss_label(config: Config) -> LossLabel:
    """Name and unit of the student's loss."""
    return LossLabel(target_class(config).loss_name, target_class(config).loss_unit)


def target_record(config: Config) -> dict[str, Any]:
    """What run.json says of the target."""
    return {LOSS: loss_label(config)._asdict(), TARGET: _FACTS.dump_python(target_facts(config), mode="json")}


def recorded_target(record: Mapping[str, Any], config: Config) -> TargetFacts:
    """What a run says of its target; of a run of an older version, what the class says."""
    try:
        facts = _FACTS.validate_python(record[TARGET])
    except (KeyError, ValidationError):
        return target_facts(config)
    return facts if len(facts.description) <= _LONGEST_DESCRIPTION else target_facts(config)


@overload
def recorded_loss(record: Mapping[str, Any], config: Config) -> LossLabel: ...
@overload
def recorded_loss(record: Mapping[str, Any], config: Config | None) -> LossLabel | None: ...
def recorded_loss(record: Mapping[str, Any], config: Config | None) -> LossLabel | None:
    """What a run says of the student's loss; of a run of an older version, what the class says."""
    noted = record.get(LOSS)
    words = (noted.get("name"), noted.get("unit")) if isinstance(noted, Mapping) else ()
    if words and all(isinstance(word, str) and 0 < len(word) <= _LONGEST_LABEL for word in words):
        return LossLabel(*map(str, words))
    return loss_label(config) if config else None


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
