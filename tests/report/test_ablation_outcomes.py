import math
from dataclasses import replace

import pytest

from capi.config.paper import PaperRow, PaperTable, paper_table
from capi.report.ablation import (
    Point,
    RowOutcome,
    RunOutcome,
    Spread,
    TableOutcome,
    columns_side_by_side,
    orderings,
    orderings_sentence,
    paper_score,
    percent_points,
    row_seconds,
    score_at,
    score_text,
    spread,
    verdicts,
)

PAPER = PaperTable(title="t", label="l", columns=["ADE20K k-NN"], rows=[])


def row(name: str, paper: float, *scores: float) -> RowOutcome:
    runs = [RunOutcome(f"{name}{number}", {"csv/knn-segmentation": score}) for number, score in enumerate(scores)]
    return RowOutcome(name, runs, PaperRow(name=name, models=["Adcab"], scores=[paper]))


def table(*rows: RowOutcome) -> TableOutcome:
    return TableOutcome("n", PAPER, rows, (), ["csv/knn-segmentation"], {}, {}, {})


def test__spread_is_mean_and_sample_deviation() -> None:
    spread_of_three = spread([0.1, 0.2, 0.6])
    assert spread_of_three is not None
    assert spread_of_three.mean == pytest.approx(0.3)
    assert spread_of_three.std == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2))
    assert spread([0.5]).std is None
    assert spread([]) is None


def test__scores_between_evaluations_lie_on_a_line() -> None:
    points = [Point(0, 0.0, 0.1), Point(10, 2.0, 0.3), Point(20, 6.0, 0.1)]
    assert score_at(points, 1.0) == pytest.approx(0.2)
    assert score_at(points, 2.0) == pytest.approx(0.3)
    assert score_at(points, 5.0) == pytest.approx(0.15)
    assert score_at(points, 6.1) is None
    assert score_at([], 1.0) is None


def test__an_ordering_holds_is_reversed_or_is_undecided() -> None:
    judged = orderings(
        table(
            row("best", 30.0, 0.50, 0.52),
            row("middle", 20.0, 0.40, 0.42),
            row("worst", 10.0, 0.60, 0.62),
            row("like the middle", 15.0, 0.39, 0.42),
        ),
        0,
        "csv/knn-segmentation",
    )
    verdicts = {(ordering.better, ordering.worse): ordering.verdict for ordering in judged}
    assert verdicts[("best", "middle")] == "holds"
    assert verdicts[("best", "worst")] == "reversed"
    assert verdicts[("middle", "like the middle")] == "not told apart"
    first = next(ordering for ordering in judged if ordering.worse == "middle" and ordering.better == "best")
    assert (first.paper, first.here) == (10.0, pytest.approx(10.0))
    assert first.uncertainty == pytest.approx(100 * math.sqrt(2 * 0.0002 / 2))


def test__rows_that_the_paper_scores_alike_or_not_at_all_have_no_order() -> None:
    drawn = RowOutcome("drawn", [], PaperRow(name="drawn", models=["Adcab"], scores="figure only"))
    assert orderings(table(row("a", 20.0, 0.1), row("b", 20.0, 0.2), drawn), 0, "csv/knn-segmentation") == []


@pytest.mark.parametrize("gap", [0.0, 0.0004, -0.0004])
def test__scores_that_are_printed_alike_are_no_reversal(gap: float) -> None:
    rows = row("a", 20.0, 0.2 + gap, 0.2 + gap), row("b", 10.0, 0.2, 0.2)
    (ordering,) = orderings(table(*rows), 0, "csv/knn-segmentation")
    assert (ordering.verdict, percent_points(ordering.here)) == ("no difference", "0.0")


def test__with_one_seed_or_at_smoke_scale_no_ordering_is_judged() -> None:
    one_seed = table(row("a", 20.0, 0.10), row("b", 10.0, 0.2))
    three = table(row("a", 20.0, 0.10, 0.11, 0.12), row("b", 10.0, 0.2, 0.21, 0.22))
    smoke = replace(three, facts={"scale": "smoke"})
    for each, reason in ((one_seed, "one seed does not tell"), (smoke, "runs at smoke scale are too short to learn")):
        (ordering,) = orderings(each, 0, "csv/knn-segmentation")
        assert (ordering.uncertainty, ordering.verdict) == (None, "not judged")
        assert ordering.here < 0
        assert verdicts(each) == {}
        assert orderings_sentence(each).startswith(f"No ordering of the paper is judged: {reason}")
        assert "csv/knn-segmentation here: a " in orderings_sentence(each)
    assert verdicts(three) == {"reversed": 1}


def test__what_a_study_came_to_is_a_sentence() -> None:
    alike = [row("a", 30.0, 0.2, 0.2), row("b", 20.0, 0.2, 0.2), row("c", 10.0, 0.2, 0.2)]
    assert orderings_sentence(table(*alike)) == "0 of 3 orderings of the paper hold here; 3 show no difference"
    mixed = table(row("a", 30.0, 0.4, 0.4), row("b", 20.0, 0.5, 0.5), row("c", 10.0, 0.4, 0.4))
    assert orderings_sentence(mixed) == "1 of 3 orderings of the paper hold here; 1 reversed, 1 shows no difference"


def test__seconds_count_of_runs_that_came_to_their_end() -> None:
    runs = [
        RunOutcome("a", steps=4, total_steps=4, seconds=10.0),
        RunOutcome("b", steps=2, total_steps=4, seconds=3.0),
    ]
    assert RowOutcome("r", runs).seconds.mean == 10.0
    assert table(RowOutcome("r", runs)).shortest == 10.0
    assert not table(RowOutcome("r", runs)).finished


def test__columns_stand_beside_those_that_judge_the_same_way() -> None:
    paper = paper_table("model-size")
    table = TableOutcome(
        "n", paper, (), (), ["csv/attentive", "csv/knn-segmentation", "csv/logistic-segmentation"], {}, {}, {}
    )
    pairs = [(paper.columns[number], column) for number, column in columns_side_by_side(table)]
    assert pairs == [
        ("ADE20K k-NN", "csv/knn-segmentation"),
        ("ADE20K linear", "csv/logistic-segmentation"),
        ("ImageNet-1k attentive", "csv/attentive"),
    ]


def test__scores_are_written_in_per_cent_with_their_spread() -> None:
    assert score_text(Spread(0.123, 0.0149, 3)) == "12.3 ± 1.5"
    assert score_text(Spread(0.123, None, 1)) == "12.3"
    assert score_text(None) == "-"
    assert percent_points(-1.04) == "-1.0"


def test__what_the_paper_does_not_print_is_not_invented() -> None:
    drawn = RowOutcome("r", [], PaperRow(name="r", models=["Adcab"], scores="figure only"))
    assert paper_score(drawn, 0) == "figure only"
    assert paper_score(RowOutcome("pixels", []), 0) == "-"
    assert row_seconds(drawn) == "-"
