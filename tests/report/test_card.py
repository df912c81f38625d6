"""What a model card says, and that nothing from outside can be more than text in it."""

from dataclasses import replace

import pytest
import yaml

from capi.errors import CapiError
from capi.method.registry import TARGETS
from capi.models.architecture import architecture_of
from capi.report.card import MARK, ModelCard, TrainingScore, as_markdown, plain, require_licence
from tests.report.small_models import untrained_model

SECTIONS = (
    "How to use",
    "Training",
    "Scores",
    "Pictures",
    "Intended use",
    "Limits",
    "Energy and CO2",
    "Licence",
    "Citation",
    "Where it comes from",
)


@pytest.fixture
def card() -> ModelCard:
    return ModelCard(
        repo_id="ana/tiny",
        licence="cc-by-nc-4.0",
        architecture=architecture_of(untrained_model()),
        parameters=1234567,
        image_size=(48, 64),
        target="the clusters (CAPI)",
        training="Trained for 60 steps.",
        data="675 images of a folder called fruit, without labels.",
        data_description="Photos of fruit, CC0.",
        training_scores=[TrainingScore("demo/knn", 0.2, 0.6, 60)],
        results=[
            {
                "benchmark": "pets/knn",
                "scores": {"val": 0.5, "other": None},
                "deviations": ["only 10 images"],
                "weights": "teacher",
            }
        ],
        pictures=[("curves.png", "Losses.")],
        alarms=["Entropy of the targets: 5 (healthy: up to 3)"],
        cost=[("Time", "2 minutes, in one start"), ("CO2 equivalent", "0.8 g")],
        assumptions=["The processor is assumed to draw 65 W."],
        provenance=[("Seed", "0"), ("Versions", "torch 2.13")],
    )


def head_of(text: str) -> dict:
    empty, head, _ = text.split("---\n", 2)
    assert empty == ""
    return yaml.safe_load(head)


def test__the_head_is_what_the_hub_reads(card: ModelCard) -> None:
    head = head_of(as_markdown(card))
    assert (head["license"], head["library_name"]) == ("cc-by-nc-4.0", "capi")
    assert head["pipeline_tag"] == "image-feature-extraction"
    assert {"capi", "self-supervised-learning"} <= set(head["tags"])


def test__every_section_is_there_in_order(card: ModelCard) -> None:
    lines = as_markdown(card).splitlines()
    assert MARK in lines
    assert [line[3:] for line in lines if line.startswith("## ")] == list(SECTIONS)


def test__it_says_all_that_it_is_given(card: ModelCard) -> None:
    text = as_markdown(card)
    for said in (
        "# tiny\n",
        "| parameters of the encoder | 1,234,567 |",
        "trained at 48 x 64 px",
        'capi.load("ana/tiny")',
        'capi.transform(encoder)("photo.jpg")',
        'AutoModel.from_pretrained("ana/tiny")',
        "by predicting the clusters (CAPI) of patches",
        "Trained for 60 steps.",
        "Data: 675 images of a folder called fruit, without labels.",
        "Photos of fruit, CC0.",
        "| pets/knn | val | 50.00 % | teacher |",
        "| pets/knn | other | - | teacher |",
        "- pets/knn: only 10 images",
        "| demo/knn | 20.00 % | 60.00 % | 60 |",
        "![Losses.](curves.png)",
        "something was not well: Entropy of the targets: 5 (healthy: up to 3)",
        "| CO2 equivalent | 0.8 g |",
        "- The processor is assumed to draw 65 W.",
        "`cc-by-nc-4.0`",
        "| Versions | torch 2.13 |",
    ):
        assert said in text


def test__what_is_not_known_is_said_to_be_so(card: ModelCard) -> None:
    bare = replace(
        card,
        data_description=" ",
        training_scores=(),
        results=(),
        pictures=(),
        alarms=(),
        cost=(),
        assumptions=(),
        provenance=(),
    )
    text = as_markdown(bare)
    assert "What these images show, where they come from and under which terms was not said." in text
    assert "## Scores\n\nNone were measured." in text
    assert "## Pictures\n\nNone." in text
    assert "## Energy and CO2\n\nNot known." in text
    assert text.endswith("## Where it comes from\n\nNot known.\n")
    assert "\n\n\n" not in text
    assert "healthy range" not in text


def test__a_protocol_that_was_followed_is_said_to_be(card: ModelCard) -> None:
    record = {"benchmark": "pets/knn", "scores": {"val": 0.5}, "deviations": [], "weights": None}
    assert "As in the paper's protocols." in as_markdown(replace(card, results=[record]))


@pytest.mark.parametrize("kind", TARGETS)
def test__every_target_has_its_words(card: ModelCard, kind: str) -> None:
    text = as_markdown(replace(card, target=TARGETS[kind].description))
    assert f"by predicting {TARGETS[kind].description} of patches" in text


def test__weights_that_it_started_from_are_reported_with_their_license(card: ModelCard) -> None:
    text = as_markdown(replace(card, origin="It started from the weights of x."))
    assert "It started from the weights of x." in text
    assert "have a licence of their own" in text
    assert "have a licence of their own" not in as_markdown(card)


def test__text_from_files_cannot_be_markup(card: ModelCard) -> None:
    nasty = "<script>alert(1)</script>\n## New | [x](javascript:1) `a` ![y](z)"
    record = {"benchmark": nasty, "scores": {nasty: 0.5}, "deviations": [nasty], "weights": nasty}
    text = as_markdown(
        replace(card, results=[record], alarms=[nasty], provenance=[(nasty, nasty)], pictures=[("a.png", nasty)])
    )
    assert "<script" not in text.replace("\\<script", "")
    assert "\n## New" not in text
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(SECTIONS)
    row = next(line for line in text.splitlines() if line.startswith("| \\<script"))
    assert row.replace("\\|", "").count("|") == 5


def test__plain_text_stays_on_one_line() -> None:
    assert plain("a_b *c*\n\nd\t<e>") == "a\\_b \\*c\\* d \\<e\\>"


@pytest.mark.parametrize("licence", ["", "Apache-2.0", "mit\nx: y", "cc by", "a" * 80, "-x"])
def test__what_is_no_license_is_refused(licence: str) -> None:
    with pytest.raises(CapiError, match="cannot name a licence on the Hub"):
        require_licence(licence)


def test__licenses_are_kept_as_given() -> None:
    assert require_licence("apache-2.0") == "apache-2.0"
    assert require_licence("other") == "other"


def test__a_score_that_training_did_not_raise_is_a_limit(card: ModelCard) -> None:
    better, worse = TrainingScore("a/knn", 0.1, 0.2, 9), TrainingScore("b/knn", 0.3, 0.3, 9)
    limits = as_markdown(replace(card, training_scores=[better, worse])).split("## Limits")[1].split("##")[0]
    assert "Training did not raise b/knn: 30.00 % before, 30.00 % after." in limits
    assert "a/knn" not in limits
