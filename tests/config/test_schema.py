import pytest
from pydantic import BaseModel, ValidationError

from capi.config.files import load_config, parse_config
from capi.config.schema import Config, EvaluationConfig
from capi.errors import CapiError


def sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [field.annotation for field in section.model_fields.values()]
    return [section] + [
        section
        for kind in inner
        if isinstance(kind, type) and issubclass(kind, BaseModel)
        for section in sections(kind)
    ]


@pytest.mark.parametrize("section", [*sections(Config), EvaluationConfig])
def test__every_field_is_documented(section: type[BaseModel]) -> None:
    undocumented = [name for name, field in section.model_fields.items() if not field.description]
    assert undocumented == []


def test__configs_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().seed = 3


def test__defaults_are_the_paper_s() -> None:
    config = Config()
    assert config.optimization.warmup_steps == 50_000
    assert (config.clustering.prototypes, config.masking.ratio, config.masking.predict) == (16384, 0.65, 7)
    assert config.model.predictor_depth == config.model.depth // 2
    assert config.grid == (14, 14)


@pytest.mark.parametrize("recipe", ["demo", "vitl14"])
@pytest.mark.parametrize("kind", ["ema_head", "features", "pixels"])
def test__another_target_is_one_line_whatever_the_recipe(recipe: str, kind: str) -> None:
    assert load_config(recipe, [f"target.kind={kind}"]).target.kind == kind


def test__the_predictor_keeps_the_head_width_when_only_its_width_is_set() -> None:
    model = Config.model_validate({"model": {"width": 1024, "heads": 16, "predictor": {"width": 1536}}}).model
    assert model.predictor_heads == 24


def test__weights_to_start_from_are_optional_and_taken_strictly() -> None:
    assert (Config().init.encoder, Config().init.strict) == (None, True)
    assert parse_config({"version": 3, "seed": 1}).init == Config().init
    config = load_config("demo", ["init.encoder=some/run", "init.strict=false"])
    assert (config.init.encoder, config.init.strict) == ("some/run", False)
    with pytest.raises(CapiError, match=r"init\.strict=false has no meaning without weights .*: set init\.encoder"):
        load_config("demo", ["init.strict=false"])
    with pytest.raises(CapiError, match=r'there is no key "init\.model"'):
        load_config("demo", ["init.model=run"])


def test__the_queue_is_off_and_holds_whole_batches() -> None:
    assert Config().clustering.queue == 0
    assert load_config("mini", ["clustering.queue=192"]).clustering.queue == 192
    with pytest.raises(CapiError, match=r"clustering\.queue = 100 is no multiple .*: set clustering\.queue=64 or 128"):
        load_config("mini", ["clustering.queue=100"])
    with pytest.raises(CapiError, match=r"clustering\.queue"):
        load_config("mini", ["clustering.queue=-64"])


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["model.depth=10000000"], "model.depth"),
        (["seed=99999999999999999999999"], "seed"),
        (["optimization.steps=99999999999999999999999"], "optimization.steps"),
        (["data.workers=100000"], "data.workers"),
        (["model.registers=1000000"], "model.registers"),
        (["model.width=65536", "model.heads=64"], "model.width, model.depth"),
        (["clustering.prototypes=16777216", "model.predictor.width=8192", "model.predictor.heads=8"], "prototypes"),
        (["data.image_size=65536", "model.patch_size=1"], "data.image_size and model.patch_size"),
        (["optimization.batch_size=16777216", "data.image_size=224"], "optimization.batch_size"),
    ],
)
def test__numbers_that_no_machine_can_hold_are_refused_by_their_keys(overrides: list[str], keys: str) -> None:
    with pytest.raises(CapiError, match=keys):
        load_config("tiny4", overrides)
