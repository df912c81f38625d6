from pathlib import Path
from typing import Any

import pytest

from capi.config.files import load_benchmark
from capi.evals.comparison_cells import BenchmarkColumn, Cell, Comparison, shareable, short_names


def finished(model: str, benchmark: str, value: float | None, **more: Any) -> Cell:
    images = 40 if "segmentation" in benchmark else {"test": 40, "real": 30}
    record = {"scores": {"test": value}, "deviations": [], "warnings": [], "encoder": {"fingerprint": "a"}}
    record |= {"details": {"test images": images}} | more
    return Cell(model, benchmark, status="done", record=record)


def comparison(*cells: Cell) -> Comparison:
    models = tuple(dict.fromkeys(cell.model for cell in cells))
    columns = tuple(
        BenchmarkColumn(name, load_benchmark(name)) for name in dict.fromkeys(cell.benchmark for cell in cells)
    )
    return Comparison(models, columns, Path("out"), "teacher", {(cell.model, cell.benchmark): cell for cell in cells})


def column(**values: float | None) -> Comparison:
    return comparison(*(finished(model, "folder/knn", value) for model, value in values.items()))


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ({"a": 0.2, "b": 0.7, "c": 0.1}, {"b"}),
        ({"a": 0.5, "b": 0.5, "c": 0.4}, {"a", "b"}),
        # Both read 50.00 %.
        ({"a": 0.500001, "b": 0.5, "c": 0.4999}, {"a", "b"}),
        ({"a": None, "b": 0.5, "c": 0.1}, {"b"}),
        ({"a": None, "b": 0.5}, set()),
        ({"a": 0.5}, set()),
    ],
)
def test__best_are_all_that_read_the_same_as_the_highest(values: dict[str, float | None], best: set[str]) -> None:
    assert column(**values).best("folder/knn") == best


def test__a_remark_is_listed_once_and_names_its_models_unless_all_have_it() -> None:
    compared = comparison(
        finished("a", "folder/knn", 0.1, warnings=["only a", "all"]),
        finished("b", "folder/knn", 0.1, warnings=["all", "two"]),
        finished("c", "folder/knn", 0.1, warnings=["two", "all"]),
    )
    assert list(compared.remarks("folder/knn", "warnings").items()) == [
        ("all", []),
        ("only a", ["a"]),
        ("two", ["b", "c"]),
    ]


def test__cells_that_failed_alike_are_together() -> None:
    names = ("folder/knn", "csv/knn")
    cells = [Cell(model, name, status="failed", reason="gone") for model in "ab" for name in names]
    assert [[cell.benchmark for cell in group] for group in comparison(*cells).failures] == [[*names], [*names]]


def test__a_shared_reason_keeps_its_sentence_and_hides_places() -> None:
    def shared(model: str, reason: str) -> str:
        (cell,) = shareable(comparison(Cell(model, "folder/knn", status="failed", reason=reason))).failed
        return cell.reason

    expected = "expected a run folder, or an id of the Hub (owner/name)"
    assert (
        shared("/home/ann/m.pt", f"there is no encoder /home/ann/m.pt: {expected}")
        == f"there is no encoder m.pt: {expected}"
    )
    assert shared("/home/ann", "no /home/ann/secret/file: gone") == "no file: gone"
    assert shared("/srv/m.pt", "/srv/m.pt: expected /home/ann/secret/m.yaml") == "m.pt: expected m.yaml"


def test__a_model_whose_weights_changed_between_cells_is_known() -> None:
    cells = [
        finished(model, name, 0.1, encoder={"fingerprint": prints})
        for model, name, prints in (
            ("same", "folder/knn", "1"),
            ("same", "csv/knn", "1"),
            ("other", "folder/knn", "1"),
            ("other", "csv/knn", "2"),
        )
    ]
    compared = comparison(*cells)
    assert compared.changed == ["other"]
    assert compared.model_notes("same") == []
    assert len(compared.model_notes("other")) == 1


def test__a_score_is_named_with_its_images_and_mean_iou_has_its_own_name() -> None:
    compared = comparison(finished("a", "folder/knn", 0.1), finished("a", "masks/knn-segmentation", 0.1))
    assert compared.score_name("folder/knn") == "test accuracy of 40 images"
    assert compared.score_name("masks/knn-segmentation") == "test of 40 images"


def test__long_paths_are_shown_by_their_end_as_long_as_that_tells_them_apart() -> None:
    long = "/somewhere/far/away/in/a/deep/folder"
    names = short_names(["pixels:4", f"{long}/first", f"{long}/second", "x" * 60])
    assert names["pixels:4"] == "pixels:4"
    assert names[f"{long}/first"].endswith("/folder/first")
    assert all(len(name) <= 26 and (model == name or name[0] == "…") for model, name in names.items())
    twins = [f"/home/one{long}/runs/latest/run", f"/home/two{long}/runs/latest/run"]
    assert short_names(twins) == {twin: twin for twin in twins}
