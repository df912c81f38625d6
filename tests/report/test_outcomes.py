import math

import pytest

from capi.config.paper import PaperRow, PaperTable
from capi.report.ablation.outcomes import Point, RowOutcome, RunOutcome, TableOutcome, orderings, score_at, spread

PAPER = PaperTable(title="t", label="l", columns=["ADE20K k-NN"], rows=[])


def row(name: str, paper: float, *scores: float) -> RowOutcome:
    runs = [RunOutcome(f"{name}{number}", {"csv/knn-segmentation": score}) for number, score in enumerate(scores)]
    return RowOutcome(name, runs, PaperRow(name=name, models=["Adcab"], scores=[paper]))


def table(*rows: RowOutcome) -> TableOutcome:
    return TableOutcome("n", PAPER, rows, (), ["csv/knn-segmentation"], {}, {}, {})


def test__spread_is_mean_and_sample_deviation() -> None:
    found = spread([0.1, 0.2, 0.6])
    assert found is not None
    assert found.mean == pytest.approx(0.3)
    assert found.deviation == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2))
    assert spread([0.5]).deviation is None
    assert spread([]) is None


def test__scores_between_evaluations_lie_on_a_line() -> None:
    points = [Point(0, 0.0, 0.1), Point(10, 2.0, 0.3), Point(20, 6.0, 0.1)]
    assert score_at(points, 1.0) == pytest.approx(0.2)
    assert score_at(points, 2.0) == pytest.approx(0.3)
    assert score_at(points, 5.0) == pytest.approx(0.15)
    assert score_at(points, 6.1) is None
    assert score_at([], 1.0) is None


def test__an_ordering_holds_is_reversed_or_cannot_be_told() -> None:
    found = orderings(
        table(
            row("best", 30.0, 0.50, 0.52),
            row("middle", 20.0, 0.40, 0.42),
            row("worst", 10.0, 0.60, 0.62),
            row("like the middle", 15.0, 0.39, 0.42),
        ),
        0,
        "csv/knn-segmentation",
    )
    verdicts = {(one.better, one.worse): one.verdict for one in found}
    assert verdicts[("best", "middle")] == "holds"
    assert verdicts[("best", "worst")] == "reversed"
    assert verdicts[("middle", "like the middle")] == "not told apart"
    first = next(one for one in found if one.worse == "middle" and one.better == "best")
    assert (first.paper, first.here) == (10.0, pytest.approx(10.0))
    assert first.uncertainty == pytest.approx(100 * math.sqrt(2 * 0.0002 / 2))


def test__rows_that_the_paper_scores_alike_or_not_at_all_have_no_order() -> None:
    drawn = RowOutcome("drawn", [], PaperRow(name="drawn", models=["Adcab"], scores="figure only"))
    assert orderings(table(row("a", 20.0, 0.1), row("b", 20.0, 0.2), drawn), 0, "csv/knn-segmentation") == []


def test__with_one_seed_the_sign_alone_is_known() -> None:
    (one,) = orderings(table(row("a", 20.0, 0.10), row("b", 10.0, 0.2)), 0, "csv/knn-segmentation")
    assert (one.uncertainty, one.verdict) == (None, "reversed")


def test__seconds_count_of_runs_that_came_to_their_end() -> None:
    runs = [
        RunOutcome("a", steps=4, total_steps=4, seconds=10.0),
        RunOutcome("b", steps=2, total_steps=4, seconds=3.0),
    ]
    assert RowOutcome("r", runs).seconds.mean == 10.0
    assert table(RowOutcome("r", runs)).shortest == 10.0
    assert not table(RowOutcome("r", runs)).finished
