import json
from pathlib import Path

from capi.api.ablation import Study, gather
from capi.report.ablation import as_markdown, as_plain, write_table


def test__all_three_files_are_written(done: Study, tmp_path: Path) -> None:
    page = write_table(gather(done), tmp_path)
    assert page == tmp_path / "sinkhorn.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sinkhorn.html", "sinkhorn.json", "sinkhorn.md"]
    assert json.loads((tmp_path / "sinkhorn.json").read_text())["table"] == "sinkhorn"


def test__plain_values_hold_every_run(done: Study) -> None:
    table = gather(done)
    plain = as_plain(table)
    assert plain["finished"]
    assert [row["paper"] for row in plain["rows"]] == [[28.5, 81.3], [29.1, 81.4], None, None]
    run = plain["rows"][0]["runs"][0]
    assert run["scores"] == table.rows[0].runs[0].scores
    assert plain["rows"][0]["scores"]["csv/attentive"]["mean"] == run["scores"]["csv/attentive"]
    assert run["training_seconds"] > 0
    assert len(run["curves"]["csv/knn"]) == 3


def test__markdown_has_the_papers_numbers_ours_and_the_orderings(done: Study) -> None:
    text = as_markdown(gather(done))
    assert "| standard | 28.5 | 81.3 |" in text
    assert "| raw pixels | - | - |" in text
    assert "positionwise over standard: +0.6 in the paper" in text
    assert "Not all" not in text
