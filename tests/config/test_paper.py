"""The paper's models and tables, against a second transcription of what it prints."""

import re

import pytest
import torch
import yaml

from capi.config.experiments import result_tables, table_named
from capi.config.files import load_config, recipe_names, recipe_text
from capi.config.paper import FIGURE_ONLY, describe_results, paper_models, paper_table, paper_tables, results_of
from capi.errors import CapiError
from capi.method.masking import PatchGrid
from capi.train.build import mask_sampler
from capi.zoo.build import build_student

MODELS = paper_models()
TABLES = paper_tables()
DEFAULT = ["Adcab", "Ae3f9"]

# tab:gen_table_our_models: uid, data, iterations, patch, depth, predictor depth, width, predictor width, learning rate,
# momentum, rate of the prototypes, masks, ratio, roll, teacher head, student head, loss, positions,
# Sinkhorn, registers, crop.
LIST_OF_MODELS = """
Meb2b LVD-142M 500k 14 24 12 1024 1024 1e-03 0.999 5e-04 inverse 65 True clustering Linear CE rope modified 16 60-100
Mc2dd LVD-142M 500k 14 12 6 768 768 1e-03 0.999 5e-04 inverse 65 True clustering Linear CE rope modified 16 60-100
M8c4d LVD-142M 500k 14 12 6 384 384 2e-03 0.998 1e-03 inverse 65 True clustering Linear CE rope modified 16 60-100
Adcab IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 16 60-100
Ae3f9 IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 16 60-100
A0dd4 IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 random 90 False clustering Linear CE rope modified 16 60-100
A9b4a IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 block 65 False clustering Linear CE rope modified 16 60-100
A7cc0 IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 False clustering Linear CE rope modified 16 60-100
A3bb3 IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True identity identity Huber rope standard 16 60-100
A2fcb IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True EMA MLP CE rope modified 16 60-100
Aeb48 IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering MLP CE rope modified 16 60-100
A74f9 IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 16 100-100
Ae7b3 IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 16 20-100
A41b8 IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 55 True clustering Linear CE rope modified 16 60-100
Ac8bc IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 75 True clustering Linear CE rope modified 16 60-100
Af989 IN22k 100k 16 24 5 1024 1536 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 16 60-100
A2da0 IN22k 100k 16 24 21 1024 768 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 16 60-100
A9ce8 IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 0 60-100
A1177 IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE learn. modified 16 60-100
A72fb IN22k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope standard 16 60-100
M5e2e IN22k 500k 14 24 12 1024 1024 1e-03 0.999 5e-04 inverse 65 True clustering Linear CE rope modified 16 60-100
M2d34 IN1k 500k 14 24 12 1024 1024 1e-03 0.999 5e-04 inverse 65 True clustering Linear CE rope modified 16 60-100
M8319 P205 500k 14 24 12 1024 1024 1e-03 0.999 5e-04 inverse 65 True clustering Linear CE rope modified 16 60-100
Abe05 IN22k 25k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 16 60-100
Acd44 IN22k 50k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 16 60-100
A2ca8 IN22k 200k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 16 60-100
Aab94 IN1k 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 16 60-100
Aa428 LVD-142M 100k 16 24 12 1024 1024 2e-03 0.996 1e-03 inverse 65 True clustering Linear CE rope modified 16 60-100
"""

DATA = {"IN22k": "ImageNet-22k", "IN1k": "ImageNet-1k", "P205": "Places205"}
KINDS = {"inverse": "inverse_block"}

# Scores in the order of the rows, by label.
PRINTED = {
    "tab:ablations:pred_arch": "23.8 73.1 | 27.9 77.7 | 29.1 81.4",
    "tab:ablations:mask_type": "23.6 76.4 | 25.6 79.9 | 27.2 80.7 | 29.1 81.4",
    "tab:ablations:proj_head": "23.7 79.3 | 1.7 11.1 | 26.4 80.8 | 29.1 81.4",
    "tab:ablations:crop_range": "27.9 81.4 | 29.1 81.4 | 28.9 80.9",
    "tab:ablations:mask_ratio": "28.0 81.1 | 29.1 81.4 | 28.1 81.2",
    "tab:ablations:pred_shape": "30.9 81.5 | 29.1 81.4 | 28.3 81.3",
    "tab:ablations:n_reg": "25.9 79.3 | 29.1 81.4",
    "tab:ablations:posenc": "30.0 81.6 | 29.1 81.4",
    "tab:ablations:sinkhorn": "28.5 81.3 | 29.1 81.4",
    "fig:scaling, left": "14.9 73.8 | 19.8 77.4 | 27.5 80.7 | 28.5 81.3 | 29.1 81.4 | 29.1 81.7",
    "fig:scaling, right": "28.0 81.7 | 29.1 81.4 | 30.6 81.2",
    "tab:main_results": "82.9 87.6 72.9 47.5 43.7 76.8 65.4 70.9 | 83.6 88.1 74.3 55.2 52.4 82.0 66.3 74.5 | "
    "79.2 84.7 68.4 39.1 33.0 73.4 68.6 77.5 | 83.8 88.2 74.8 55.3 56.8 81.2 67.1 75.6",
    "tab:dense": "29.2 34.4 60.7 69.7 35.6 41.7 | 29.7 35.2 61.1 70.4 35.2 41.0 | "
    "35.2 39.1 61.7 69.4 39.5 44.6 | 32.1 37.2 63.8 72.7 38.9 44.3",
    "tab:high_res": "83.8 83.5",
    "tab:global_repr": "57.1 77.1 49.1 73.3 | 73.8 81.1 69.6 77.4",
    "tab:pred_vs_attentive_pooling": "76.8 82.5 64.4 21.8 43.5 33.9 33.7 | 81.8 86.9 71.6 46.7 55.8 47.0 48.3 | "
    "81.9 87.0 71.5 45.8 55.6 46.5 47.1 | 83.8 88.2 74.8 56.5 58.8 47.9 54.9",
    "tab:standardization": "32.5 39.2 64.9 37.9 44.7 73.2 | 33.0 39.2 65.2 37.7 44.3 73.3",
}

# tab:fig_to_model, without the figures that have no scores.
LIST_OF_FIGURES = {
    "fig:pullfig": "Meb2b Mc2dd M8c4d",
    "tab:ablations:pred_arch": "Adcab Ae3f9 Aa5a3 A7d26",
    "tab:ablations:mask_type": "Adcab Ae3f9 A0dd4 A9b4a A7cc0",
    "tab:ablations:proj_head": "Adcab Ae3f9 A3bb3 A2fcb Aeb48",
    "tab:ablations:crop_range": "Adcab Ae3f9 A74f9 Ae7b3",
    "tab:ablations:mask_ratio": "Adcab Ae3f9 A41b8 Ac8bc",
    "tab:ablations:pred_shape": "Adcab Ae3f9 Af989 A2da0",
    "tab:ablations:n_reg": "Adcab Ae3f9 A9ce8",
    "tab:ablations:posenc": "Adcab Ae3f9 A1177",
    "tab:ablations:sinkhorn": "Adcab Ae3f9 A72fb",
    "tab:main_results": "Meb2b M5e2e M2d34 M8319",
    "tab:dense": "Meb2b M5e2e M2d34 M8319",
    "tab:high_res": "Meb2b",
    "tab:global_repr": "Meb2b",
    "fig:scaling, center": "Adcab Ae3f9 Abe05 Acd44 A2ca8",
    "fig:scaling, right": "Adcab Ae3f9 Aab94 Aa428",
}


def test__all_models_of_the_paper_are_there_once() -> None:
    listed = [line.split()[0] for line in LIST_OF_MODELS.split("\n") if line]
    counts = [f"prototypes{count}" for count in (1024, 2048, 4096, 8192, 16384, 32768)]
    assert len(listed) == 28
    assert sorted(MODELS) == sorted([*listed, "Aa5a3", "A7d26", *counts])
    assert {name for name, model in MODELS.items() if model.source == "tab:gen_table_our_models"} == set(listed)
    assert not set(MODELS) & set(recipe_names())


@pytest.mark.parametrize("line", [line for line in LIST_OF_MODELS.split("\n") if line])
def test__a_recipe_is_its_row_in_the_list_of_models(line: str) -> None:
    uid, data, steps, *shape, rate, momentum, prototypes_rate, kind, ratio, roll = line.split()[:14]
    *_, registers, crop = line.split()
    config = load_config(uid)
    model, optimization, masking = config.model, config.optimization, config.masking
    assert MODELS[uid].data == DATA.get(data, data)
    assert optimization.steps == int(steps.removesuffix("k")) * 1000
    ours = model.patch_size, model.depth, model.predictor_depth, model.width, model.predictor_width
    assert ours == tuple(map(int, shape))
    assert (optimization.learning_rate, optimization.teacher_momentum) == (float(rate), float(momentum))
    assert optimization.learning_rate * config.clustering.learning_rate_multiplier == float(prototypes_rate)
    assert (masking.kind, masking.ratio, masking.roll) == (KINDS.get(kind, kind), int(ratio) / 100, roll == "True")
    assert model.registers == int(registers)
    assert config.data.crop_scale == tuple(int(bound) / 100 for bound in crop.split("-"))


@pytest.mark.parametrize("line", [line for line in LIST_OF_MODELS.split("\n") if line])
def test__target_head_and_positions_are_those_of_the_list_of_models(line: str) -> None:
    uid, (teacher_head, student_head, loss, positions, sinkhorn) = line.split(maxsplit=1)[0], line.split()[14:19]
    config = load_config(uid)
    kinds = {("clustering", "CE"): "clustering", ("EMA", "CE"): "ema_head", ("identity", "Huber"): "features"}
    assert config.target.kind == kinds[teacher_head, loss]
    # Without a head, the config's choice means nothing and keeps its default.
    assert config.model.head == {"Linear": "linear", "MLP": "mlp", "identity": "linear"}[student_head]
    assert config.model.positions == {"rope": "released", "learn.": "learned"}[positions]
    if config.target.kind == "clustering":
        assert config.clustering.sinkhorn == {"modified": "positionwise", "standard": "standard"}[sinkhorn]
    elif config.target.kind == "ema_head":
        target = config.target.ema_head
        assert (target.balance, target.iterations) == ("sinkhorn", 3)
        temperatures = target.student_temperature, target.first_temperature, target.temperature
        assert temperatures == (0.12, 0.06, 0.06)


@pytest.mark.parametrize("name", MODELS)
def test__a_recipe_has_what_all_models_of_the_paper_share(name: str) -> None:
    config = load_config(name)
    assert config.data.image_size == 224
    assert config.optimization.batch_size == 16384
    assert (config.masking.predict, config.clustering.bias) == (7, True)
    model = config.model
    assert (model.width / model.heads, model.predictor_width / model.predictor_heads) == (64, 64)
    assert model.positions == ("learned" if name == "A1177" else "released")
    assert model.predictor.kind == {"Aa5a3": "fused", "A7d26": "self"}.get(name, "cross")


@pytest.mark.parametrize("count", [1024, 2048, 4096, 8192, 16384, 32768])
def test__a_prototype_count_changes_nothing_else(count: int) -> None:
    assert load_config(f"prototypes{count}") == load_config("Adcab", [f"clustering.prototypes={count}"])


def test__the_models_of_the_default_row_differ_in_the_seed_alone() -> None:
    first, second = load_config("Adcab"), load_config("Ae3f9")
    assert first != second
    assert first.model_copy(update={"seed": second.seed}) == second


@pytest.mark.parametrize(("name", "recipe"), [("Meb2b", "vitl14"), ("Mc2dd", "vitb14"), ("M8c4d", "vits14")])
def test__models_with_a_name_of_their_own_are_the_same_recipe(name: str, recipe: str) -> None:
    assert load_config(name) == load_config(recipe)


def _encoder_parameters(width: int, depth: int, patch: int, registers: int = 16) -> int:
    block = 12 * width**2 + 2 * width
    return depth * block + 3 * patch**2 * width + width + registers * width


@pytest.mark.parametrize(
    ("name", "width", "depth", "patch", "millions"),
    [
        ("M8c4d", 384, 12, 14, 21),
        ("Mc2dd", 768, 12, 14, 85),
        ("Meb2b", 1024, 24, 14, 302),
        ("Adcab", 1024, 24, 16, 302),
    ],
)
def test__the_sizes_are_those_of_the_paper(name: str, width: int, depth: int, patch: int, millions: int) -> None:
    encoder = _parameters(name)["encoder"]
    assert encoder == _encoder_parameters(width, depth, patch)
    assert int(encoder / 1e6) == millions


@pytest.mark.parametrize(("name", "depth", "width"), [("Af989", 5, 1536), ("Adcab", 12, 1024), ("A2da0", 21, 768)])
def test__predictors_of_all_shapes_are_about_equally_large(name: str, depth: int, width: int) -> None:
    parameters = _parameters(name)["predictor"]
    # Keys and values come from the encoder's width; a mask token; two norms a block.
    assert parameters == depth * (10 * width**2 + 2 * width * 1024 + 2 * width) + width
    assert parameters == pytest.approx(12 * 12 * 1024**2, rel=0.12)


def _parameters(name: str) -> dict[str, int]:
    """How many parameters each part of a model's student has."""
    with torch.device("meta"):
        student = build_student(load_config(name))
    parts = {"encoder": student.encoder, "predictor": student.predictor, "head": student.head}
    return {part: sum(weight.numel() for weight in module.parameters()) for part, module in parts.items()}


BLOCK = 12 * 1024**2 + 2 * 1024
MLP = (1024 + 1) * 2048 + (2048 + 1) * 2048 + (2048 + 1) * 256


@pytest.mark.parametrize(
    ("name", "extra_of_encoder", "predictor", "head"),
    [
        # Of each head the last layer has a learned length for every prototype.
        ("Adcab", 0, 12 * BLOCK + 1024, 16384 * (1024 + 1)),
        ("A7d26", 0, 12 * BLOCK + 1024, 16384 * (1024 + 1)),
        # Without a predictor there is the mask token alone.
        ("Aa5a3", 0, 1024, 16384 * (1024 + 1)),
        ("Aeb48", 0, 12 * BLOCK + 1024, MLP + 16384 * (256 + 1)),
        # A table of 14 x 14 positions for the patches and one for the mask tokens.
        ("A1177", 196 * 1024, 12 * BLOCK + 1024 + 196 * 1024, 16384 * (1024 + 1)),
        ("A9ce8", -16 * 1024, 12 * BLOCK + 1024, 16384 * (1024 + 1)),
        # Features are reached by a linear map.
        ("A3bb3", 0, 12 * BLOCK + 1024, 1024**2),
        ("A2fcb", 0, 12 * BLOCK + 1024, MLP + 16384 * (256 + 1)),
        ("prototypes32768", 0, 12 * BLOCK + 1024, 32768 * (1024 + 1)),
    ],
)
def test__variants_have_the_parameters_of_their_design(
    name: str, extra_of_encoder: int, predictor: int, head: int
) -> None:
    encoder = _encoder_parameters(1024, 24, 16) + extra_of_encoder
    assert _parameters(name) == {"encoder": encoder, "predictor": predictor, "head": head}


@pytest.mark.parametrize("name", MODELS)
def test__a_recipe_validates_and_builds(name: str) -> None:
    config = load_config(name)
    visible, masked, predicted = mask_sampler(config).counts(PatchGrid(*config.grid))
    assert (predicted, visible + masked) == (7, config.grid[0] * config.grid[1])
    model = config.model
    assert _parameters(name)["encoder"] >= _encoder_parameters(
        model.width, model.depth, model.patch_size, model.registers
    )


@pytest.mark.parametrize("name", MODELS)
def test__a_recipe_opens_like_any_other_and_holds_only_what_differs(name: str) -> None:
    text = recipe_text(name)
    comment = [line for line in text.splitlines() if line.startswith("#")]
    assert comment[0].startswith(f"# {name}: ")
    assert f"# Command:  capi pretrain {name} --data IMAGES --out RUN" in comment
    assert any(line.startswith("# Expected: ") for line in comment)
    assert max(map(len, comment)) <= 120
    tree = yaml.safe_load(text)
    assert {key: value for key, value in tree.items() if key not in ("version", "extends")} == MODELS[name].changes
    assert tree["extends"] in {*MODELS, *recipe_names()}


@pytest.mark.parametrize("label", PRINTED)
def test__scores_are_those_that_the_paper_prints(label: str) -> None:
    (table,) = [table for table in TABLES.values() if table.label == label]
    printed = [[float(score) for score in row.split()] for row in PRINTED[label].split("|")]
    assert [row.scores for row in table.rows] == printed
    assert not any(row.numbers_in for row in table.rows)


def test__every_table_is_either_printed_or_a_figure() -> None:
    labels = [table.label for table in TABLES.values()]
    assert len(set(labels)) == len(labels)
    assert set(labels) - set(PRINTED) == {"fig:pullfig", "fig:scaling, center"}


@pytest.mark.parametrize("label", LIST_OF_FIGURES)
def test__a_table_has_the_models_that_the_paper_names_for_it(label: str) -> None:
    (table,) = [table for table in TABLES.values() if table.label == label]
    assert sorted({name for row in table.rows for name in row.models}) == sorted(LIST_OF_FIGURES[label].split())


def test__every_row_has_recipes_and_every_recipe_a_row() -> None:
    assert all(name in MODELS for table in TABLES.values() for row in table.rows for name in row.models)
    assert [name for name in MODELS if not results_of(name)] == []


def test__what_is_only_drawn_has_no_number() -> None:
    drawn = {row.name for table in TABLES.values() for row in table.rows if row.scores == FIGURE_ONLY}
    assert drawn == {"25k iterations", "50k iterations", "200k iterations", "ViT-S/14", "ViT-B/14"}
    for name in ("Abe05", "Acd44", "A2ca8", "Mc2dd", "M8c4d"):
        (said,) = describe_results(name)
        assert said.startswith("figure only (Figure ")
        assert not re.search(r"\d\.\d", said)


def test__the_default_row_is_one_mean_in_all_ablations() -> None:
    ablations = [table for table in TABLES.values() if any(row.default for row in table.rows)]
    assert len(ablations) == 12
    for table in ablations:
        (row,) = [row for row in table.rows if row.default]
        assert (row.models, row.scores) == (DEFAULT, [29.1, 81.4])


def test__numbers_that_figures_borrow_are_those_of_the_tables() -> None:
    length, size = TABLES["length"].rows[2], TABLES["model-size"].rows[2]
    assert (length.numbers_in, length.scores) == (["tab:ablations"], [29.1, 81.4])
    segmentation, classification = (TABLES[name].rows[-1] for name in ("dense", "main"))
    assert segmentation.models == classification.models == size.models == ["Meb2b"]
    assert size.scores == [*segmentation.scores[:2], classification.scores[0]]


def test__differences_that_the_paper_words_come_out() -> None:
    """Sentences of the paper give differences of numbers that stand in its tables."""
    without, with_registers = (row.scores for row in TABLES["registers"].rows)
    gains = [round(after - before, 1) for before, after in zip(without, with_registers, strict=True)]
    assert gains == [3.2, 2.1]
    low, high = TABLES["high-res"].rows[0].scores
    assert round(low - high, 1) == 0.3
    assert TABLES["crop-range"].rows[2].scores[1] == 80.9


def test__one_model_has_different_scores_in_different_tables() -> None:
    said = "\n".join(describe_results("Meb2b"))
    assert "ADE20K k-NN 32.1" in said
    assert "ADE20K k-NN 33.0" in said
    assert "(Table 8: with)" in said


def test__what_the_paper_leaves_open_is_said() -> None:
    for name in ("Aa5a3", "A7d26"):
        assert "does not say which of the two is fused" in " ".join(recipe_text(name).replace("#", " ").split())
    assert "which of Aa5a3 and A7d26 is fused" in (paper_table("predictor-architecture").open or "")


def test__unknown_names_suggest_the_nearest_of_recipes_and_models() -> None:
    with pytest.raises(CapiError, match='no recipe "adcab"; did you mean "Adcab"'):
        load_config("adcab")
    with pytest.raises(CapiError, match='no recipe "vitl144"; did you mean "vitl14"'):
        load_config("vitl144")
    with pytest.raises(CapiError, match='no table "predictor-arch"; did you mean "predictor-architecture"'):
        paper_table("predictor-arch")


def test__a_models_recipe_can_be_extended_by_a_file(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: A0dd4\nmasking: {ratio: 0.8}\n")
    assert load_config(path) == load_config("A0dd4", ["masking.ratio=0.8"])


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("Table 3", "dense"),
        ("3", "dense"),
        ("table 1B", "masking-strategy"),
        ("Figure 7, left", "prototypes"),
        ("figure 7 right", "dataset"),
        ("tab:high_res", "high-res"),
        ("Table 8", "standardization"),
    ],
)
def test__a_table_is_found_by_its_number_or_label(asked: str, name: str) -> None:
    assert paper_table(asked) is TABLES[name]


def test__every_table_has_a_number_of_its_own_and_results_have_the_same_name() -> None:
    assert len({table.number for table in TABLES.values()}) == len(TABLES)
    for name, table in result_tables().items():
        if table.source == "the paper":
            assert TABLES[name].label == table.label
            assert table_named(TABLES[name].number) is table
    with pytest.raises(CapiError, match="Table 1c compares trainings: `capi recipes --table` shows it"):
        table_named("Table 1c")
