"""Components that a config names: the student and its target, and encoders for evaluation."""

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, overload

from pydantic import TypeAdapter, ValidationError
from torch import nn

from capi.config.schema import Config, ModelConfig, Section
from capi.config.trust import is_named_by_trust, trusted_place
from capi.errors import CapiError
from capi.method.masking import MASKS
from capi.method.registry import TARGETS
from capi.method.student import Student, student_of
from capi.method.targets import LossLabel, RunContext, Target, TargetFacts
from capi.models.architecture import weightless
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import HEADS, LinearMap
from capi.models.low_rank import add_low_rank
from capi.models.plain_vit import PlainArchitecture, PlainEncoder, WeightsOrigin
from capi.models.positions import POSITIONS
from capi.models.predictor import PREDICTORS, Predictor, PredictorShape
from capi.runtime.plugins import check_options, code_file, import_component, look_up, sha256_of
from capi.types import Statistics, VisionEncoder

_LOG = logging.getLogger("capi")
# The keys that name components, with the tables of what comes with the package, and the class that each must be.
# `capi.train.build` adds the optimizers.
COMPONENTS: dict[str, tuple[dict[str, Any], type | None]] = {
    "target.kind": (TARGETS, Target),
    "masking.kind": (MASKS, None),
    "model.predictor.kind": (PREDICTORS, Predictor),
}
# The number of prototypes belongs to a recipe's size, the memory to the machine: any target may have them beside it.
_OF_ANY_TARGET = ("clustering.prototypes", "clustering.chunk_mib")
# Under these keys run.json has what the target of a run knows about itself, and the files of components from outside.
LOSS, TARGET, CODE = "loss", "target", "code"
# Text of a run that may come from anyone, and is shown.
_LONGEST_LABEL, _LONGEST_TEXT, _MOST_OUTPUTS = 60, 400, 2**24
_FACTS = TypeAdapter(TargetFacts)


def build_student(config: Config, target: TargetFacts | None = None) -> Student:
    """Encoder, predictor and head as a config describes them, with fresh weights.

    `target` is what a run wrote down about its own; without it, that of the config says how wide the output is.
    """
    look_up(POSITIONS, config.model.positions, "model.positions", files=False)
    encoder = _build_encoder(config)
    rank, scale = config.adapt.lora_rank, config.adapt.lora_scale
    if rank is not None:
        for block in encoder.blocks[-(config.adapt.blocks or config.model.depth) :]:
            add_low_rank(block, rank=rank, scale=scale)
    return student_of(
        encoder=encoder, predictor=_build_predictor(config), head=_build_head(config, target or target_facts(config))
    )


def _build_encoder(config: Config) -> Encoder | PlainEncoder:
    model = config.model
    if model.baseline is not None:
        architecture = plain_architecture(model)
        if architecture.relative_bias != "none" and config.grid != (architecture.grid, architecture.grid):
            raise CapiError(
                f"data.image_size is {list(config.data.height_and_width)}, but {model.baseline.name} takes images of "
                f"its own size only: set data.image_size={architecture.native_size}"
            )
        return PlainEncoder(architecture, origin=WeightsOrigin(model.baseline.name, model.baseline.layout))
    return Encoder(
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


def plain_architecture(model: ModelConfig) -> PlainArchitecture:
    """The encoder of another method that a config describes: the method's own options with its sizes."""
    # A table of 54 models in twelve files, which nothing else here needs.
    from capi.zoo.baselines.registry import baseline_named

    assert model.baseline is not None
    sizes = {name: getattr(model, name) for name in ("width", "depth", "heads", "patch_size", "registers", "channels")}
    differing = model.baseline.model_dump(exclude={"name", "layout"})
    method = baseline_named(model.baseline.name).architecture
    return method.changed(**sizes, **differing, mlp_width=round(model.width * model.mlp_ratio))


def weightless_student(config: Config, names: Sequence[str], source: str, target: TargetFacts | None = None) -> Student:
    """The student of a config that `source` gave, without memory for its weights, which `names` lists."""
    kind: type[Predictor] = component("model.predictor.kind", config)
    predictor = config.model.predictor_depth if "depth" in kind.reads else None
    depths = {"model.depth": ("encoder", config.model.depth), "model.predictor.depth": ("predictor", predictor)}
    with weightless(names, depths, source):
        return build_student(config, target)


def _build_head(config: Config, target: TargetFacts) -> nn.Module:
    """What the student's output is: prototype logits, or the values that the target has for a patch."""
    model = config.model
    assert target.outputs is not None
    head = look_up(HEADS, model.head, "model.head", files=False)
    if target.has_prototypes:
        return head(width=model.predictor_width, outputs=target.outputs)
    if model.head != ModelConfig.model_fields["head"].default:
        raise CapiError(
            f"model.head={model.head} leads to prototypes, which target.kind={config.target.kind} has not: leave it out"
        )
    return LinearMap(width=model.predictor_width, outputs=target.outputs)


def _build_predictor(config: Config) -> Predictor:
    model, section = config.model, config.model.predictor
    kind: type[Predictor] = component("model.predictor.kind", config)
    unread = dict.fromkeys(name for each in PREDICTORS.values() for name in each.reads if name not in kind.reads)
    _refuse_unread(config, "model.predictor.kind", [f"model.predictor.{name}" for name in unread])
    shape = PredictorShape(
        width=model.predictor_width,
        depth=model.predictor_depth,
        heads=model.predictor_heads,
        context_width=model.width,
        mlp_width=round(model.predictor_width * model.mlp_ratio),
        positions=model.positions,
        grid=config.grid,
        drop_rate=model.stochastic_depth,
    )
    settings = {name: getattr(section, name) for name in kind.reads if name not in shape._fields}
    options = _check_options(config, "model.predictor", ("shape", *shape._fields, *settings))
    return kind.build(shape, **settings, **options)


def component(key: str, config: Config) -> Any:
    """What the value of a key names. FILE.py:NAME is imported, if it is trusted, and enters the room's table."""
    (table, contract), name = COMPONENTS[key], _value(config, key)
    code, colon, _ = name.rpartition(":")
    if colon:
        import_component(table, name, trusted_place(code), key, contract)
    return look_up(table, name, key)


def code_record(config: Config) -> dict[str, Any]:
    """What run.json says of components that do not come with this package: their files, with their digests."""
    files = {key: code_file(component(key, config)) for key in COMPONENTS}
    return {key: {"file": str(file), "sha256": sha256_of(file)} for key, file in files.items() if file}


def check_code(record: Mapping[str, Any], config: Config, keys: Iterable[str] = COMPONENTS, *, resumed: bool) -> None:
    """Files must be what they were when the run was started; a run that is resumed refuses others, but for `trust`."""
    for key in keys:
        noted, file = record.get(CODE, {}).get(key), code_file(component(key, config))
        if not isinstance(noted, dict) or not file or sha256_of(file) == noted.get("sha256"):
            continue
        if resumed and not is_named_by_trust(file):
            raise CapiError(
                f"{file} ({key}) has changed since the run was started, and may compute something else: restore it, or "
                f"look at what is different and add --trust {file} (in Python, trust={str(file)!r})"
            )
        _LOG.warning("%s has changed since the run was started (%s): it may compute something else", file, key)


def _value(config: Config, path: str) -> Any:
    return reduce(getattr, path.split("."), config)


def _refuse_unread(config: Config, key: str, paths: Iterable[str], spared: Sequence[str] = ()) -> None:
    """What was set for another component than the one that a key names has no meaning."""
    default = Config()
    for path in paths:
        value, usual = _value(config, path), _value(default, path)
        if isinstance(value, Section):
            changed = [f"{path}.{name}" for name, each in value if each != getattr(usual, name)]
        else:
            changed = [path] * (value != usual)
        for name in changed:
            if name not in spared:
                raise CapiError(f"{name} has no meaning with {key}={_value(config, key)}: leave it out")


def _check_options(config: Config, key: str, given: Iterable[str]) -> dict[str, Any]:
    """The options of a component, once it is sure that it takes them. `given` are arguments from elsewhere."""
    kind, (_, contract) = component(f"{key}.kind", config), COMPONENTS[f"{key}.kind"]
    # A class that leaves `build` as it is takes them in its constructor.
    inherited = kind.build.__func__ is vars(contract)["build"].__func__
    options: dict[str, Any] = _value(config, f"{key}.options")
    name = _value(config, f"{key}.kind")
    check_options(kind.__init__ if inherited else kind.build, options, f"{key}.options", given=given, name=name)
    return options


def target_class(config: Config) -> type[Target]:
    """What `target.kind` names."""
    kind: type[Target] = component("target.kind", config)
    if kind.make is Target.make and kind.forward is Target.forward:
        raise CapiError(f"target.kind={config.target.kind} has neither make(rows) nor forward: write one of them")
    return kind


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
        predictor_width=model.predictor_width,
        processes=processes,
        statistics=None if "auto" in {config.data.mean, config.data.std} else statistics(config),
        encoder=encoder,
    )


def target_settings(config: Config) -> dict[str, Any]:
    """What the config says about its target, as keyword arguments."""
    kind, settings = target_class(config), dict[str, Any]()
    unread = dict.fromkeys(path for each in TARGETS.values() for path in each.reads if path not in kind.reads)
    _refuse_unread(config, "target.kind", unread, _OF_ANY_TARGET)
    for path in kind.reads:
        value = _value(config, path)
        settings |= dict(value) if isinstance(value, Section) else {path.rpartition(".")[2]: value}
    return settings | _check_options(config, "target", ("run", "teacher", *settings))


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
    """What run.json says of the target, and of code that does not come with this package."""
    facts, code = target_facts(config), code_record(config)
    described = {LOSS: loss_label(config)._asdict(), TARGET: _FACTS.dump_python(facts, mode="json")}
    return described | ({CODE: code} if code else {})


def recorded_target(record: Mapping[str, Any], config: Config) -> TargetFacts:
    """What a run says of its target; of a run of an older version, what the class says."""
    try:
        facts = _FACTS.validate_python(record[TARGET])
    except (KeyError, ValidationError):
        return target_facts(config)
    texts = [facts.description, *facts.reads, *facts.measures, *itertools.chain(*facts.advice.values())]
    shown = all(len(text) <= _LONGEST_TEXT and text.isprintable() for text in texts)
    return facts if shown and 1 <= (facts.outputs or 0) <= _MOST_OUTPUTS else target_facts(config)


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
    encoder = student.encoder
    assert isinstance(encoder, Encoder | PlainEncoder), f"CapiEncoder wants no {type(encoder).__name__}"
    return CapiEncoder(
        encoder=encoder,
        predictor=student.predictor,
        head=student.head,
        statistics=statistics,
        image_size=image_size,
    )
