from capi.config.paper import PaperRow, paper_table
from capi.report.ablation.outcomes import RowOutcome, Spread, TableOutcome
from capi.report.ablation.wording import columns_side_by_side, paper_score, percent_points, row_seconds, score_text


def test__columns_stand_beside_those_that_judge_the_same_way() -> None:
    paper = paper_table("model-size")
    table = TableOutcome(
        "n", paper, (), (), ["csv/attentive", "csv/knn-segmentation", "csv/logistic-segmentation"], {}, {}, {}
    )
    found = [(paper.columns[number], column) for number, column in columns_side_by_side(table)]
    assert found == [
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
