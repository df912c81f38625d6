from pathlib import Path

import pytest

from capi.api.ablation import StudyData, check_options, curve_evaluations, find_data, score_columns
from capi.config.experiments import find_scale
from capi.errors import CapiError
from tests.api.studies import labeled_photos

SMOKE = find_scale("smoke")


def test__a_folder_with_a_csv_gives_its_training_images_and_both_tasks(tmp_path: Path) -> None:
    labels = str(labeled_photos(tmp_path) / "labels.csv")
    wanted = StudyData(
        labels,
        {"segmentation": ("csv", {"data": labels}), "classification": ("csv", {"data": labels, "label": "label"})},
    )
    assert find_data(str(tmp_path)) == find_data(labels) == wanted


@pytest.mark.parametrize(
    ("columns", "tasks"),
    [
        ("file,split,label", {"classification": "label"}),
        ("file,split,class_id,breed", {"classification": "class_id"}),
        ("file,split,mask", {"segmentation": None}),
    ],
)
def test__columns_decide_what_is_judged(tmp_path: Path, columns: str, tasks: dict[str, str | None]) -> None:
    (tmp_path / "labels.csv").write_text(f"{columns}\n")
    data_sets = find_data(str(tmp_path)).datasets
    assert {task: options.get("label") for task, (_, options) in data_sets.items()} == tasks


def test__an_option_names_the_column_of_the_class(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("file,split,breed\n")
    data = find_data(str(tmp_path), ["seed=1", "label=breed"])
    assert data.datasets["classification"][1]["label"] == "breed"
    with pytest.raises(CapiError, match=r"nor one of colour, label, class, class_id: .* `options` label=COLUMN"):
        find_data(str(tmp_path), ["label=colour"])


def test__folders_of_classes_and_of_masks_are_known(tmp_path: Path) -> None:
    for place in ("classes/train/cat", "classes/val/cat", "masked/images/train", "masked/masks/train"):
        (tmp_path / place).mkdir(parents=True)
    classes, masked = str(tmp_path / "classes"), str(tmp_path / "masked")
    assert find_data(classes) == StudyData(f"{classes}/train", {"classification": ("folder", {"data": classes})})
    assert find_data(masked) == StudyData(f"{masked}/images/train", {"segmentation": ("masks", {"data": masked})})
    for kind in ("cat", "dog"):
        (tmp_path / "plain" / kind).mkdir(parents=True)
        (tmp_path / "plain" / kind / "1.png").touch()
    plain = str(tmp_path / "plain")
    assert find_data(plain) == StudyData(plain, {"classification": ("folder", {"data": plain})})
    assert find_data("demo") == StudyData("demo", {"classification": ("demo", {})})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "nowhere", "there is no .*nowhere: expected a folder with a labels.csv"),
        (lambda path: path, "has no labels to judge the rows of a study by: expected"),
        (lambda path: _written(path, "file,split\n"), "has neither a column mask nor one of label, class, class_id"),
    ],
)
def test__a_place_without_labels_is_reported(tmp_path: Path, make, message: str) -> None:
    with pytest.raises(CapiError, match=message):
        find_data(str(make(tmp_path)))


def _written(folder: Path, content: str) -> Path:
    (folder / "labels.csv").write_text(content)
    return folder


def test__options_go_to_the_benchmarks_that_know_them(tmp_path: Path) -> None:
    data = find_data(str(labeled_photos(tmp_path)))
    columns = score_columns(data, SMOKE.scores, ["label=kind", "class_names=[a,b,c]", "seed=3"], 32)
    configs = {column.name: column.config for column in columns}
    assert list(configs) == ["csv/knn-segmentation", "csv/logistic-segmentation", "csv/attentive"]
    assert configs["csv/attentive"].label == "kind"
    assert configs["csv/knn-segmentation"].label is None
    assert configs["csv/knn-segmentation"].class_names == ("a", "b", "c")
    assert {config.seed for config in configs.values()} == {3}
    assert {config.image_size for config in configs.values()} == {32}
    on_the_way = curve_evaluations(data, SMOKE.curves, ["label=kind"], 5)
    assert [(evaluation.benchmark, evaluation.every_steps) for evaluation in on_the_way] == [
        ("csv/knn-segmentation", 5),
        ("csv/knn", 5),
    ]
    assert on_the_way[1].options["label"] == "kind"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("strengths=[1]", "`options` strengths is an option of logistic-segmentation, which is not used"),
        ("labl=x", "label"),
    ],
)
def test__an_option_that_no_benchmark_has_is_reported(option: str, message: str) -> None:
    with pytest.raises(CapiError, match=message):
        check_options(find_data("demo"), (SMOKE.scores, SMOKE.curves), [option])
