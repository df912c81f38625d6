"""Recipes and the paper's tables as a user meets them."""

import pytest
import yaml

from capi.config.files import load_config, parse_config
from capi.config.paper import paper_models, paper_tables
from tests.cli.conftest import RunHere, assert_refused


@pytest.fixture(autouse=True)
def _a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tables say is one thing, how they are folded is another."""
    monkeypatch.setenv("COLUMNS", "200")


def test__recipes_lists_every_recipe_and_every_model(run_here: RunHere) -> None:
    result = run_here("recipes")
    assert result.code == 0
    first_words = {line.split()[0] for line in result.stdout.splitlines() if line}
    assert {"tiny4", "vitl14", "vits16", *paper_models()} <= first_words


def test__show_prints_comment_and_resolved_config(run_here: RunHere) -> None:
    result = run_here("recipes", "show", "vits14", "seed=7")
    assert result.code == 0
    assert result.stdout.startswith("# CAPI ViT-S/14")
    assert "\nseed: 7\n" in result.stdout
    assert "extends" not in result.stdout
    # Inherited from vitl14, and from the defaults.
    assert ": released\n" in result.stdout
    assert "teacher_momentum: 0.998" in result.stdout


def test__show_opens_a_models_recipe_with_command_cost_and_result(run_here: RunHere) -> None:
    result = run_here("recipes", "show", "A0dd4", "optimization.steps=1000")
    assert result.code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("# A0dd4: ViT-L/16, random masks, pretrained on ImageNet-22k")
    assert lines[2] == "# Command:  capi pretrain A0dd4 --data IMAGES --out RUN"
    assert lines[3].startswith("# Cost:     ")
    # 16384 images in each of 1000 steps.
    assert "1.64e+07 images seen" in lines[3]
    assert lines[4] == ("# Expected: ADE20K k-NN 23.6, ImageNet-1k attentive 76.4 (Table 1b: random, 90 %)")
    shown = parse_config(yaml.safe_load(result.stdout))
    assert shown == load_config("A0dd4", ["optimization.steps=1000"])


def test__show_does_not_open_a_frozen_encoder(run_here: RunHere) -> None:
    result = run_here("recipes", "show", "Adcab", "target={kind: frozen, frozen: {encoder: nowhere}}")
    assert result.code == 0, result.stderr
    assert "# Cost:     not known before the frozen encoder is opened\n" in result.stdout


def test__tables_are_named(run_here: RunHere) -> None:
    result = run_here("recipes", "--tables")
    assert result.code == 0
    assert {line.split()[0] for line in result.stdout.splitlines()} == {"table", *paper_tables()}


@pytest.mark.parametrize("name", paper_tables())
def test__a_table_lists_rows_recipes_and_scores(run_here: RunHere, name: str) -> None:
    result = run_here("recipes", "--table", name)
    assert result.code == 0
    table = paper_tables()[name]
    for row in table.rows:
        scores = ["figure only"] if row.scores == "figure only" else [f"{score:.1f}" for score in row.scores]
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(f"{row.name} ") and scores[0] in line]
        for part in (*row.models, *scores):
            assert part in line
    assert (table.open or "") in result.stdout


def test__a_row_of_two_models_is_called_their_mean(run_here: RunHere) -> None:
    result = run_here("recipes", "--table", "sinkhorn")
    assert "positionwise: the mean of Adcab and Ae3f9" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes", "--table", "sinkhron"], 'no table "sinkhron"; did you mean "sinkhorn"?'),
        (["recipes", "--table", "sinkhorn", "--tables"], "ask one at a time"),
        (["recipes", "--tables", "show", "Adcab"], "ask one at a time"),
        (["recipes", "show", "vitl144"], 'did you mean "vitl14"?'),
        (["recipes", "show", "Adcat"], 'did you mean "Adcab"?'),
        (["recipes", "show", "tiny4", "model.dept=3"], 'did you mean "model.depth"?'),
    ],
)
def test__wrong_questions_are_refused_in_a_sentence(run_here: RunHere, arguments: list[str], message: str) -> None:
    assert_refused(run_here(*arguments), message)


def test__a_table_has_the_short_name_that_ablate_knows(run_here: RunHere) -> None:
    short, full = (run_here("recipes", "--table", name) for name in ("predictor", "predictor-architecture"))
    assert short.code == 0, short.stderr
    assert short.stdout == full.stdout
