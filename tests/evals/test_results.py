import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import capi
from capi.errors import CapiError
from capi.evals.fitted_probes import LinearClassifier, Probe
from capi.evals.results import (
    Context,
    Outcome,
    as_markdown,
    as_record,
    clear_results,
    make_folder,
    percent,
    read_record,
    refuse_results,
    table,
    write_record,
)
from capi.runtime.atomic import Output

CONTEXT = Context(
    model="runs/a|b",
    weights="student",
    encoder={"width": 8, "patch_size": 4, "fingerprint": "abc"},
    image_size=(8, 12),
    benchmark="folder/linear",
    config={"seed": 3, "image_size": None},
    data={"train": "123", "val": "456"},
    device="cpu",
    seconds=1.23456,
)


def outcome(**changes: Any) -> Outcome:
    model = LinearClassifier(torch.zeros(2, 8), torch.zeros(2), "mean_patch")
    values: dict[str, Any] = {
        "scores": {"val": 0.875, "val, pooled": 0.5},
        "chosen": {"learning_rate": 1e-3, "validation": 0.75},
        "grid": [{"learning_rate": 1e-3, "validation": 0.75}, {"learning_rate": 0.1, "validation": None}],
        "deviations": ["iterations: 3 instead of 12500", "image size: 8 x 8 px instead of 224 x 224 px"],
        "warnings": ["2 heads were given up"],
        "details": {"classes": 2, "test images": {"val": 8}},
        "probe": Probe("linear", model, {0: "a", 1: "b"}, (8, 8), {}),
    }
    return Outcome(**values | changes)


def test__the_record_holds_everything() -> None:
    made, record = outcome(), as_record(outcome(), CONTEXT)
    for name in ("scores", "chosen", "grid", "deviations", "warnings", "details"):
        assert record[name] == getattr(made, name)
    for name in ("model", "weights", "encoder", "benchmark", "config", "device"):
        assert record[name] == getattr(CONTEXT, name)
    assert record["data_fingerprint"] == CONTEXT.data
    assert record["image_size"] == [8, 12]
    assert record["seconds"] == 1.23
    assert {"capi", "torch", "python"} <= set(record["versions"])
    assert record["versions"]["capi"] == capi.__version__
    assert record["date"].endswith("+00:00")


def test__what_is_no_finite_number_is_null() -> None:
    details = {"IoU by class": {"a": math.nan, "b": 0.5}, "deep": [{"x": (math.inf, 1)}], 3: frozenset({4})}
    record = as_record(outcome(details=details, scores={"val": math.nan}), CONTEXT)
    assert record["details"] == {"IoU by class": {"a": None, "b": 0.5}, "deep": [{"x": [None, 1]}], "3": [4]}
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text) == record
    shown = as_markdown(record)
    assert "| val | - |" in shown
    assert "| a | - |" in shown
    assert "| b | 50.00 % |" in shown


def test__what_is_written_is_read(tmp_path: Path) -> None:
    record = as_record(outcome(warnings=["Größe: 3 é"]), CONTEXT)
    write_record(record, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]
    assert read_record(tmp_path) == record
    assert "Größe: 3 é" in (tmp_path / "results.json").read_text(encoding="utf-8")
    assert (tmp_path / "results.md").read_text(encoding="utf-8") == as_markdown(record)


@pytest.mark.parametrize("content", [None, "", "[]", "{", '{"version": 99}', "{}", b"\xff"])
def test__what_cannot_be_read_is_no_record(tmp_path: Path, content: str | bytes | None) -> None:
    if content is not None:
        (tmp_path / "results.json").write_bytes(content.encode() if isinstance(content, str) else content)
    assert read_record(tmp_path) is None


def test__the_page_opens_with_the_departures() -> None:
    page = as_markdown(as_record(outcome(), CONTEXT))
    titles = [line for line in page.splitlines() if line.startswith("#")]
    assert titles == [
        "# folder/linear: runs/a|b",
        "## Departures from the paper's protocol",
        "## Warnings",
        "## Scores",
        "## Chosen settings",
        "## All settings",
        "## Facts",
    ]
    for line in ("- iterations: 3 instead of 12500", "- image size: 8 x 8 px instead of 224 x 224 px"):
        assert 0 < page.index(line) < page.index("## Scores")
    for row in ("| val | 87.50 % |", "| learning_rate | 0.001 |", "| 0.1 | - |", "| test images | val 8 |"):
        assert row in page
    assert "| weights | student |" in page
    assert "| data fingerprint | train 123, val 456 |" in page


def test__without_departures_the_page_says_so() -> None:
    page = as_markdown(as_record(outcome(deviations=[], warnings=[], grid=[]), CONTEXT))
    assert page.index("None.") < page.index("## Scores")
    assert "Warnings" not in page
    assert "All settings" not in page


def test__tables_keep_their_columns() -> None:
    assert table(("a", "b"), [("x|y", "1\n2"), (None, 0.123456)]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| x\\|y | 1 2 |",
        "| - | 0.1235 |",
    ]
    assert [percent(value) for value in (1.0, 0.12345, None)] == ["100.00 %", "12.35 %", "-"]


def test__results_are_not_replaced_by_accident(tmp_path: Path) -> None:
    refuse_results(Output(tmp_path / "new", overwrite=False))
    refuse_results(Output(tmp_path, overwrite=False))
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(CapiError, match="already holds results: choose another `out`, or replace them"):
        refuse_results(Output(tmp_path, overwrite=False))
    refuse_results(Output(tmp_path, overwrite=True))
    for overwrite in (True, False):
        with pytest.raises(CapiError, match="is a file: `out` takes the name of a folder"):
            refuse_results(Output(tmp_path / "results.json", overwrite))


def test__a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CapiError, match=r"file/x cannot be written \(Not a directory\): choose another `out`"):
        make_folder(tmp_path / "file" / "x")


def test__only_results_are_cleared(tmp_path: Path) -> None:
    clear_results(tmp_path)
    (tmp_path / "predictions").mkdir()
    for name in ("results.json", "results.md", "probe.safetensors", "predictions/00000.png", "mine.txt"):
        (tmp_path / name).write_text("")
    clear_results(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
