import csv
import io
import json
from pathlib import Path
from typing import Any

from capi.config.files import load_benchmark
from capi.evals.comparison_cells import BenchmarkColumn, Cell, Comparison
from capi.report.comparison import as_csv, as_json, as_markdown, facts, plain_text, write_pages

FACTS = {
    "deviations": ["image size: 32"],
    "warnings": [],
    "chosen": {"neighbours": 3, "validation": 0.5},
    "grid": [{"neighbours": 3}],
    "details": {"test images": {"test": 40}},
    "encoder": {"fingerprint": "a", "width": 48, "patch_size": 4},
    "image_size": [32, 32],
    "seconds": 1.25,
    "device": "cpu",
    "versions": {"capi": "1", "torch": "2", "python": "3"},
    "date": "2025-01-01T00:00:00+00:00",
}


def finished(model: str, benchmark: str, scores: dict[str, float | None], **more: Any) -> Cell:
    reused = bool(more.pop("reused", False))
    return Cell(model, benchmark, status="done", reused=reused, record={"scores": scores} | FACTS | more)


def comparison(*cells: Cell, out: Path = Path("out")) -> Comparison:
    models = tuple(dict.fromkeys(cell.model for cell in cells))
    columns = tuple(
        BenchmarkColumn(name, load_benchmark(name)) for name in dict.fromkeys(cell.benchmark for cell in cells)
    )
    return Comparison(models, columns, out, "teacher", {(cell.model, cell.benchmark): cell for cell in cells})


def three() -> Comparison:
    return comparison(
        finished("a", "folder/knn", {"test": 0.5, "real": 0.25}),
        finished("b", "folder/knn", {"test": 0.5, "real": 0.75}, deviations=["image size: 32", "b alone"], reused=True),
        Cell("c", "folder/knn", status="failed", reason="x | y is <gone>"),
        Cell("d", "folder/knn"),
    )


def row(markdown: str, model: str) -> str:
    return next(line for line in markdown.splitlines() if line.startswith(f"| {model} |"))


def test__the_best_are_bold_also_when_there_are_two() -> None:
    text = as_markdown(three())
    assert row(text, "a") == "| a | 32 px | **50.00 %** |"
    assert row(text, "b") == "| b | 32 px | **50.00 %** |"
    lower = as_markdown(
        comparison(finished("a", "folder/knn", {"test": 0.1}), finished("b", "folder/knn", {"test": 0.2}))
    )
    assert row(lower, "a") == "| a | 32 px | 10.00 % |"
    assert row(lower, "b") == "| b | 32 px | **20.00 %** |"


def test__a_failed_cell_has_a_footnote_and_a_pending_one_is_marked() -> None:
    text = as_markdown(three())
    assert row(text, "c") == "| c | - | failed[^1] |"
    assert "[^1]: c on folder/knn: x | y is &lt;gone&gt;" in text
    assert row(text, "d") == "| d | - | pending |"
    assert "1 of 4 cells are still to come" in text


def test__departures_are_listed_once_and_name_the_models_they_are_about() -> None:
    lines = as_markdown(three()).splitlines()
    assert lines.count("- image size: 32") == 1
    assert "- b alone (b)" in lines


def test__seconds_say_what_was_kept() -> None:
    lines = as_markdown(three()).splitlines()
    assert "| a | 1.2 |" in lines
    assert "| b | 1.2 (kept) |" in lines


def test__names_cannot_break_the_markdown() -> None:
    name = "<script>alert(1)</script>|*b*"
    text = as_markdown(comparison(finished(name, "folder/knn", {"test": 0.5}), Cell("b", "folder/knn")))
    assert "<script" not in text
    assert plain_text("<script>*[a]`") == r"&lt;script&gt;\*\[a\]\`"
    table = [line for line in text.splitlines() if line.startswith("| …") or line.startswith("| &lt;")]
    # Scores with the size of images, and seconds.
    assert [line.replace(r"\|", "").count("|") for line in table] == [4, 3]


def test__the_csv_has_a_row_for_each_score() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(three()))))
    assert [(record["model"], record["score"], record["value"], record["status"]) for record in rows] == [
        ("a", "test", "0.5", "done"),
        ("a", "real", "0.25", "done"),
        ("b", "test", "0.5", "done"),
        ("b", "real", "0.75", "done"),
        ("c", "", "", "failed"),
        ("d", "", "", "pending"),
    ]
    assert json.loads(rows[0]["chosen"]) == {"neighbours": 3, "validation": 0.5}
    assert rows[0]["seconds"] == "1.25"
    assert rows[4]["reason"] == "x | y is <gone>"


def test__the_json_holds_the_results_without_their_grids() -> None:
    tree = json.loads(as_json(three()))
    assert [cell["status"] for cell in tree["cells"]] == ["done", "done", "failed", "pending"]
    assert tree["cells"][1]["results"]["scores"] == {"test": 0.5, "real": 0.75}
    assert "grid" not in tree["cells"][1]["results"]
    assert tree["cells"][2]["reason"] == "x | y is <gone>"
    assert tree["benchmarks"]["folder/knn"]["protocol"] == "knn"


def test__facts_name_all_versions_and_devices_that_took_part() -> None:
    versions = {"capi": "1", "torch": "9", "python": "3"}
    shown = facts(
        comparison(
            finished("a", "folder/knn", {"test": 0.5}),
            finished("b", "folder/knn", {"test": 0.5}, device="cuda", versions=versions),
        )
    )
    assert (shown["device"], shown["torch"], shown["capi"]) == ("cpu, cuda", "2, 9", "1")
    assert shown["seconds"] == "2.5"


def test__a_benchmark_that_no_model_is_run_on_has_no_bars(tmp_path: Path) -> None:
    skipped = Cell("a", "folder/linear", status="skipped", reason="no data")
    write_pages(comparison(finished("a", "folder/knn", {"test": 0.5}), skipped, out=tmp_path))
    shown = (tmp_path / "comparison.html").read_text()
    assert "<h3>folder/knn</h3>" in shown.split("<h2>Scores</h2>")[0]
    assert "<h3>folder/linear</h3>" not in shown.split("<h2>Scores</h2>")[0]


def test__all_four_files_are_written_and_nothing_else(tmp_path: Path) -> None:
    write_pages(comparison(Cell("a", "folder/knn"), out=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {
        f"comparison.{ending}" for ending in ("json", "csv", "md", "html")
    }
