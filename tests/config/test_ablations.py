import pytest

from capi.config.experiments import ablations, base_config, find_ablation, find_scale, plan_table, scales
from capi.config.files import differences, load_benchmark, load_config
from capi.config.paper import paper_tables
from capi.config.schema import Config
from capi.errors import CapiError

# Tables whose rows are sizes, which a small encoder cannot have.
SCALED = {"predictor-shape", "registers", "prototypes", "length", "model-size"}
UNSCALED = [name for name in ablations() if name not in SCALED]


def test__every_table_that_the_paper_ablates_can_be_run() -> None:
    labels = {name for name, table in paper_tables().items() if table.label.startswith("tab:ablations")}
    assert labels <= set(ablations())
    assert {"prototypes", "length", "model-size"} <= set(ablations())


@pytest.mark.parametrize("scale", scales())
@pytest.mark.parametrize("name", ablations())
def test__every_row_is_a_valid_config_of_its_own(name: str, scale: str) -> None:
    planned = plan_table(name, find_scale(scale), [])
    assert [row.paper for row in planned.rows] == paper_tables()[name].rows
    assert len({row.config.model_dump_json() for row in planned.rows}) == len(planned.rows)
    assert len({row.run for row in planned.rows}) == len(planned.rows)
    assert [row.run for row in planned.rows].count("default") == 1


@pytest.mark.parametrize("name", UNSCALED)
def test__rows_change_what_the_papers_models_change(name: str) -> None:
    base = base_config(find_scale("mini"), [])
    for row in plan_table(name, find_scale("mini"), []).rows:
        paper = differences(load_config("Adcab"), load_config(row.paper.models[0]))
        here = differences(base, row.config)
        assert [line.partition(", is ")[2] for line in here] == [line.partition(", is ")[2] for line in paper]
        assert [line.split()[0] for line in here] == [line.split()[0] for line in paper]


@pytest.mark.parametrize("name", ["prototypes", "length"])
def test__sizes_keep_the_papers_ratios(name: str) -> None:
    def size(config: Config) -> int:
        return config.clustering.prototypes if name == "prototypes" else config.optimization.steps

    base, paper_base = size(base_config(find_scale("mini"), [])), size(load_config("Adcab"))
    for row in plan_table(name, find_scale("mini"), []).rows:
        assert size(row.config) / base == size(load_config(row.paper.models[0])) / paper_base


def test__overrides_change_all_rows_and_sizes_follow() -> None:
    planned = plan_table("prototypes", find_scale("mini"), ["clustering.prototypes=64", "optimization.steps=7"])
    assert [row.config.clustering.prototypes for row in planned.rows] == [4, 8, 16, 32, 64, 128]
    assert {row.config.optimization.steps for row in planned.rows} == {7}
    assert planned.rows[0].name == "1024 (here 4)"
    assert planned.rows[4].run == "default"


def test__shapes_of_the_predictor_are_scaled_from_what_follows_the_encoder() -> None:
    shapes = [
        (row.config.model.predictor_depth, row.config.model.predictor_width)
        for row in plan_table("predictor-shape", find_scale("mini"), []).rows
    ]
    assert shapes == [(1, 192), (2, 128), (4, 96)]


def test__short_names_stand_for_tables() -> None:
    assert find_ablation("predictor") == find_ablation("predictor-architecture") == "predictor-architecture"
    assert len({ablation.short for ablation in ablations().values()}) == len(ablations())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_ablation("masknig"), 'there is no ablation "masknig"; did you mean "masking"'),
        (lambda: find_scale("mimi"), 'there is no scale "mimi"; did you mean "mini"'),
        (lambda: plan_table("sinkhorn", find_scale("mini"), ["model.widht=3"]), "model.width"),
    ],
)
def test__unknown_names_are_answered_with_the_nearest(call, message: str) -> None:
    with pytest.raises(CapiError, match=message):
        call()


@pytest.mark.parametrize("scale", scales())
@pytest.mark.parametrize("which", ["scores", "curves"])
def test__the_benchmarks_of_a_scale_are_valid(scale: str, which: str) -> None:
    for task, protocols in getattr(find_scale(scale), which).items():
        for protocol, options in protocols.items():
            assert load_benchmark(f"csv/{protocol}", options=options).task == task
