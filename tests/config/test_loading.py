import re
from pathlib import Path

import pytest
import yaml

from capi.config import files
from capi.config.files import as_config, differences, dump_config, load_benchmark, load_config, merge, parse_config
from capi.config.schema import Config
from capi.errors import CapiError


def test__overrides_change_one_value_and_keep_the_rest() -> None:
    base, changed = load_config("tiny4"), load_config("tiny4", ["model.depth=6", "optimization.learning_rate=2e-4"])
    assert changed.model.depth == 6
    assert changed.optimization.learning_rate == 2e-4
    assert changed.model.width == base.model.width
    assert changed.clustering == base.clustering


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("model.predictor.depth=3", lambda config: config.model.predictor.depth, 3),
        ("masking.predict=0.1", lambda config: config.masking.predict, 0.1),
        ("masking.predict=3", lambda config: config.masking.predict, 3),
        ("masking.roll=false", lambda config: config.masking.roll, False),
        ("data.image_size=[32, 64]", lambda config: config.data.height_and_width, (32, 64)),
        ("clustering.chunk_mib=null", lambda config: config.clustering.chunk_mib, None),
        ("optimization.weight_decay=0", lambda config: config.optimization.weight_decay, 0.0),
    ],
)
def test__override_values_are_yaml(override: str, read, value: object) -> None:
    result = read(load_config("tiny4", [override]))
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dept=3", 'no key "model.dept"; did you mean "model.depth"'),
        ("modle.depth=3", 'no key "modle"; did you mean "model"'),
        ("prototypes=3", 'no key "prototypes"; did you mean "clustering.prototypes"'),
        ("depth=3", 'no key "depth"; did you mean "model.depth"'),
        ("model.predictor.widht=3", 'did you mean "model.predictor.width"'),
        ("zzz=3", 'no key "zzz"; a config has the keys version, seed, data, model,'),
        ("model.predictor.zzz=3", "model.predictor has the keys kind,"),
        ("learning_rate=3", 'did you mean "optimization.learning_rate"'),
        ("lr=3", 'did you mean "optimization.learning_rate"'),
        ("patch=3", 'did you mean "model.patch_size"'),
        ("batchsize=3", 'did you mean "optimization.batch_size"'),
        ("model.image_size=3", 'did you mean "data.image_size"'),
        ("model.batch_size=3", 'did you mean "optimization.batch_size"'),
        ("model.rope=axial", 'no key "model.rope"; it is called "model.positions" now'),
        ("evaluations=", "expected a list in square brackets"),
        ("seed=2020-13-45", "not valid YAML"),
        ("seed=!!timestamp foo", "not valid YAML"),
        ("seed=0x_", "not valid YAML"),
        ("seed=" + 5000 * "1", "not valid YAML"),
        ("seed=" + 3000 * "[", "nested deeper than 64 levels"),
        ("model=&a {depth: *a}", "aliases and anchors"),
        (2000 * "a." + "a=1", "expected key=value"),
        ("model.depth=two", 'model.depth = "two" does not fit: input should be a valid integer'),
        ('model.depth="6"', 'model.depth = "6" does not fit: input should be a valid integer'),
        ("model.depth=6.0", "model.depth = 6.0 does not fit"),
        ("model.depth=0", "greater than or equal to 1"),
        ("model.depth=true", "valid integer"),
        ("masking.ratio=1.5", "less than 1"),
        ("masking.predict=0", "greater than or equal to 1"),
        ("masking.predict=0.0", "greater than 0"),
        ("model=3", "model = 3 does not fit"),
        ("seed=99999999999999999999", "seed"),
        ("optimization.learning_rate=.inf", "optimization.learning_rate"),
        ("model.width=100", "head width of 33.3333"),
        ("model.mlp_ratio=0.001", "model.mlp_ratio of 0.001 leaves nothing of model.width, 192,"),
        ("data.image_size=30", "no multiple of model.patch_size"),
        ("data.image_size=[32]", "data.image_size"),
        ("nonsense", "expected key=value"),
        (str(Path(__file__).parent), f"or did you mean `data` {Path(__file__).parent}"),
        ("=3", "expected key=value"),
        ("model..depth=3", "expected key=value"),
        ("model.depth=[", "not valid YAML"),
        ("version=99", "cannot be overridden"),
    ],
)
def test__wrong_overrides_say_what_to_do(override: str, message: str) -> None:
    with pytest.raises(CapiError) as caught:
        load_config("tiny4", [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test__off_is_a_word_although_yaml_reads_it_as_false() -> None:
    for key in ("compile", "activation_checkpointing"):
        assert getattr(load_config("tiny4", [f"run.{key}=off"]).run, key) == "off"


def test__an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(CapiError, match='no recipe "vitl144"; did you mean "vitl14"'):
        load_config("vitl144")


def test__files_are_recipes_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: tiny4\nmodel:\n  depth: 3\n")
    config = load_config(path)
    assert config == load_config(str(path)) == load_config("tiny4", "model.depth=3")
    assert config.model.depth == 3
    assert config.model.width == load_config("tiny4").model.width


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("model: {depth: 3, depth: 4}\n", 'the key "depth" stands twice'),
        ("model: [", "not valid YAML"),
        ("extends: nowhere\n", 'no recipe "nowhere"'),
        ("extends: 3\n", "extends must be the name"),
        ("seed: 2026-01-01\n", "not a number, text, list or section"),
        ("version: x\n", "version must be a whole number"),
        ("version: 99\n", "install a newer capi"),
        ("model: !!python/object/apply:os.mkdir [evil]\n", "not valid YAML"),
        (b"\xff\xfe\x00", "not a text in UTF-8"),
    ],
)
def test__broken_files_say_what_is_wrong(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CapiError) as caught:
        load_config(str(path))
    assert message in str(caught.value)


def test__a_missing_file_and_a_circle_are_refused(tmp_path: Path) -> None:
    for name in ("nowhere.yaml", 300 * "x" + ".yaml"):
        with pytest.raises(CapiError, match="there is no file"):
            load_config(str(tmp_path / name))
    path = tmp_path / "circle.yaml"
    for spelling in ("circle.yaml", f"../{tmp_path.name}/circle.yaml", "./sub/../circle.yaml"):
        path.write_text(f"extends: {spelling}\n")
        with pytest.raises(CapiError, match="extends itself"):
            load_config(str(path))


def test__a_long_row_of_files_that_extend_each_other_is_refused(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    with pytest.raises(CapiError, match="extends more than 20 others"):
        load_config(str(tmp_path / "0.yaml"))


def test__what_is_dumped_parses_to_the_same_config() -> None:
    config = load_config("vits14", ["data.image_size=[224, 448]"])
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test__older_configs_are_migrated_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(tree: dict) -> dict:
        tree = dict(tree)
        return tree | {"model": {"depth": tree.pop("layers")}} if "layers" in tree else tree

    def drop(tree: dict) -> dict:
        return {key: value for key, value in tree.items() if key not in ("obsolete", "layers")}

    monkeypatch.setattr(files, "CONFIG_VERSION", 3)
    monkeypatch.setattr(files, "MIGRATIONS", {1: rename, 2: drop})
    config = parse_config({"version": 1, "layers": 5, "obsolete": True})
    assert config.model.depth == 5
    assert config.version == 3
    with pytest.raises(CapiError, match="can no longer read"):
        parse_config({"version": 0})


def test__each_file_is_migrated_before_it_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CONFIG_VERSION", 2)
    monkeypatch.setattr(files, "MIGRATIONS", {1: lambda tree: {"model": {"depth": tree["layers"]}}})
    (tmp_path / "base.yaml").write_text("layers: 5\n")
    (tmp_path / "mine.yaml").write_text("version: 2\nextends: base.yaml\nmodel:\n  width: 48\n")
    config = load_config(str(tmp_path / "mine.yaml"))
    assert (config.model.depth, config.model.width, config.version) == (5, 48, 2)


@pytest.mark.parametrize("version", [{}, {"version": 1}, {"version": 2}, {"version": 3}])
def test__british_names_of_older_versions_are_read_with_one_warning(
    version: dict, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    old = {
        "target": {"kind": "ema_head", "ema_head": {"balance": "centring", "centre_momentum": 0.8}},
        "evaluations": [{"benchmark": "demo/knn", "options": {"neighbours": [3]}}] if version.get("version") else [],
    }
    for _ in range(2):
        config = parse_config(version | old, source=str(tmp_path))
    assert len(caplog.records) == 1
    assert config.target.ema_head.balance == "centering"
    assert config.target.ema_head.center_momentum == 0.8
    if config.evaluations and version["version"] > 1:
        assert config.evaluations[0].options == {"neighbors": [3]}
    with pytest.raises(
        CapiError, match=r'"target\.ema_head\.centre_momentum"; it is called "target\.ema_head\.center_'
    ):
        load_config("tiny4", ["target.ema_head.centre_momentum=0.8"])


def test__a_benchmark_s_neighbors_are_read_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = load_benchmark("demo/knn", ["neighbours=[3]"])
    assert config == load_benchmark("demo/knn", ["neighbors=[3]"])
    assert [record.getMessage() for record in caplog.records] == [
        "demo/knn has names of an earlier version (neighbours), which are read as today's"
    ]


@pytest.mark.parametrize("version", [{}, {"version": 1}, {"version": 2}])
def test__rotary_positions_were_called_rope(version: dict) -> None:
    old = {"model": {"width": 96, "rope": "released", "heads": 3}}
    assert parse_config(version | old) == parse_config({"model": {"width": 96, "positions": "released", "heads": 3}})
    with pytest.raises(CapiError, match=r'no key "model\.rope"'):
        parse_config({"version": 3} | old)
    with pytest.raises(CapiError, match="model = 3 does not fit"):
        parse_config(version | {"model": 3})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"data": "demo", "every_steps": 200, "neighbours": 1, "split": "test", "weights": ["teacher", "student"]},
            {
                "benchmark": "demo/knn",
                "options": {"tests": ["test"], "neighbours": [1], "votes": ["majority"], "features": ["mean_patch"]},
                "every_steps": 200,
                "weights": ["teacher", "student"],
            },
        ),
        (
            {"data": "/photos.v1", "feature": "pooled", "label": "unused"},
            {
                "benchmark": "folder/knn",
                "options": {
                    "data": "/photos.v1",
                    "tests": ["val"],
                    "neighbours": [10],
                    "votes": ["majority"],
                    "features": ["pooled"],
                },
            },
        ),
        (
            {"data": "labels.CSV", "label": "breed"},
            {
                "benchmark": "csv/knn",
                "options": {
                    "data": "labels.CSV",
                    "label": "breed",
                    "tests": ["val"],
                    "neighbours": [10],
                    "votes": ["majority"],
                    "features": ["mean_patch"],
                },
            },
        ),
    ],
    ids=["demo", "folder", "csv"],
)
@pytest.mark.parametrize("version", [{}, {"version": 1}], ids=["unsaid", "1"])
def test__the_evaluations_of_version_1_become_benchmarks(old: dict, new: dict, version: dict) -> None:
    migrated = parse_config({**version, "seed": 5, "evaluations": [old]})
    assert migrated == parse_config({"version": 2, "seed": 5, "evaluations": [new]})
    assert migrated.version == files.CONFIG_VERSION
    (evaluation,) = migrated.evaluations
    # What it becomes is a benchmark that can be read.
    assert load_benchmark(evaluation.benchmark, options=evaluation.options).protocol == "knn"


def test__evaluations_that_are_already_benchmarks_stay_as_they_are() -> None:
    tree = {"evaluations": [{"benchmark": "folder/knn", "options": {"data": "/photos"}}]}
    assert parse_config(tree) == parse_config({"version": 2} | tree)


@pytest.mark.parametrize(
    ("evaluations", "message"),
    [
        ([{"data": "demo", "neighbors": 3}], 'no key "evaluations.0.neighbors"'),
        ([{"data": 3}], "evaluations.0"),
        ([{"split": "val"}], 'no key "evaluations.0.split"'),
        (["demo"], 'evaluations.0 = "demo" does not fit'),
        ("demo", 'evaluations = "demo" does not fit'),
    ],
)
def test__wrong_evaluations_of_version_1_are_still_wrong(evaluations: object, message: str) -> None:
    with pytest.raises(CapiError) as caught:
        parse_config({"version": 1, "evaluations": evaluations})
    assert message in str(caught.value)


def test__merge_goes_section_by_section() -> None:
    assert merge({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}, "c": 5}) == {"a": {"x": 1, "y": 4}, "b": 3, "c": 5}
    assert merge({"a": {"x": 1}}, {"a": 2}) == {"a": 2}


def test__differences_name_the_key_and_both_values() -> None:
    before = load_config("tiny4")
    after = load_config("tiny4", ["seed=4", "model.depth=3", "checkpoint.keep=9", "data.workers=2"])
    changes = differences(before, after, free=["checkpoint", "data.workers"])
    assert changes == ["seed was 0, is 4", "model.depth was 12, is 3"]
    assert differences(before, before) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.crop_scale=[0.9, 0.5]", "runs backwards"),
        ("data.crop_scale=[0.5, 2.0]", "less than or equal to 1"),
        ("data.std=[0.1, 0.0, 0.1]", "above 0"),
        ("model.channels=5", "data.mean has 3 values, but model.channels is 5"),
        ("optimization.micro_batches=3", "cannot be split into 3 micro-batches of one size"),
        ("evaluations=[{benchmrk: demo/knn}]", 'did you mean "evaluations.0.benchmark"?'),
        ("evaluations=[{benchmark: demo/knn, weights: [techer]}]", "'teacher' or 'student'"),
        ("evaluations=[{benchmark: demo/knn, options: 3}]", "evaluations.0.options = 3 does not fit"),
    ],
)
def test__settings_of_runs_that_do_not_fit_are_refused(override: str, message: str) -> None:
    with pytest.raises(CapiError) as raised:
        load_config("tiny4", [override])
    assert message in str(raised.value)


def test__overrides_go_with_a_recipe(small_config: Config) -> None:
    assert as_config("tiny4", ["seed=5"]).seed == 5
    assert as_config(small_config) is small_config
    with pytest.raises(CapiError, match="overrides go with a recipe"):
        as_config(small_config, ["seed=5"])


def test__overrides_are_text_a_dict_or_keywords_alike() -> None:
    texts = ["optimization.steps=3", "optimization.learning_rate=1e-05", "data.mean=[0.1,0.2,0.3]", "seed=7"]
    nested = {"optimization": {"steps": 3, "learning_rate": 1e-5}, "data": {"mean": (0.1, 0.2, 0.3)}, "seed": 7}
    dotted = {"optimization.steps": 3, "optimization.learning_rate": 1e-5, "data.mean": [0.1, 0.2, 0.3], "seed": 7}
    expected = load_config("tiny4", texts)
    assert expected.optimization.learning_rate == 1e-5
    assert load_config("tiny4", nested) == load_config("tiny4", dotted) == load_config("tiny4", **nested) == expected
    assert load_config("tiny4", ["seed=7", "optimization.steps=3"], optimization={"steps": 4}).optimization.steps == 4


def test__a_wrong_keyword_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(CapiError, match=r'no key "steps"; did you mean "optimization\.steps"'):
        load_config("tiny4", steps=3)
    with pytest.raises(CapiError, match=r'no key "optimization\.stepz"; did you mean "optimization\.steps"'):
        load_config("tiny4", {"optimization": {"stepz": 3}})


def test__a_config_shows_what_differs_from_the_defaults() -> None:
    shown = repr(load_config("tiny4", ["optimization.steps=77"]))
    assert len(shown.splitlines()) < 15
    assert "steps=77" in shown
    assert "student_temperature" not in shown


def test__a_config_shows_in_a_screen_what_differs_from_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "40")
    for recipe in ("small", "vitl14", "demo", "distill"):
        lines = repr(load_config(recipe)).splitlines()
        assert len(lines) <= 40
        assert max(map(len, lines)) <= 80
    config = load_config("tiny4", ["optimization.steps=7", "model.predictor.depth=3"])
    assert re.search(r"optimization +.*steps=7", str(config).replace("\n", " "))
    assert "<li>" in config._repr_html_()
    assert "steps=7" in config._repr_html_()
