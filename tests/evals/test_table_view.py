"""A table of the paper over a comparison: what is shown, and that it is escaped."""

from capi.evals.comparison_cells import (
    Cell,
    TableEntry,
    TableView,
    ViewRow,
    as_markdown,
    as_plain,
    missing_cells,
    shown_score,
)

VIEW = TableView(
    name="main",
    title="A table <of> models",
    label="tab:x",
    heads=("Model",),
    columns=(("ImageNet", "val"), ("", "SUN")),
    rows=(
        ViewRow(("MAE",), "mae", (TableEntry("imagenet/knn", "val", 79.4), TableEntry("sun397/knn", None, 61.8))),
        ViewRow(
            ("<b>mine</b>",),
            "mine",
            (TableEntry("imagenet/knn", "a", None, "no data"), TableEntry("sun397/knn", None, None)),
        ),
    ),
    notes=("A & B",),
)
DONE = {"scores": {"val": 0.78, "real": 0.8}}
CELLS = {
    ("mae", "imagenet/knn"): Cell("mae", "imagenet/knn", status="done", record=DONE),
    ("mae", "sun397/knn"): Cell("mae", "sun397/knn", status="failed", reason="out of <memory>"),
    ("mine", "imagenet/knn"): Cell("mine", "imagenet/knn", status="done", record=DONE),
    ("mine", "sun397/knn"): Cell("mine", "sun397/knn"),
}


def test__ours_stands_beside_the_papers_number() -> None:
    mae, mine = VIEW.rows
    assert shown_score(mae, mae.entries[0], CELLS, True) == "78.0 (79.4)"
    assert shown_score(mae, mae.entries[0], CELLS, False) == "78.0"
    assert shown_score(mae, mae.entries[1], CELLS, True) == "- (61.8)"
    assert shown_score(mine, mine.entries[1], CELLS, True) == "-"


def test__each_reason_is_reported_once_with_its_cells() -> None:
    assert missing_cells(VIEW, CELLS) == {"out of <memory>": ["MAE: SUN"], "no data": ["<b>mine</b>: ImageNet val"]}


def test__programs_get_numbers_and_reasons() -> None:
    rows = as_plain(VIEW, CELLS)["rows"]
    assert rows[0]["ours"] == [78.0, None]
    assert rows[0]["paper"] == [79.4, 61.8]
    assert rows[1]["missing"] == ["no data", None]


def test__markdown_has_a_line_for_each_row_and_for_what_is_missing() -> None:
    text = "\n\n".join(as_markdown(VIEW, CELLS))
    assert "| MAE | 78.0 (79.4) | - (61.8) |" in text
    assert "- no data (<b>mine</b>: ImageNet val)" in text
