"""What a study is trained on and judged by, from one place: a CSV or a folder with one, class folders, or `demo`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capi.config.ablations import Benchmarks, Options, Task
from capi.config.benchmark_loading import load_benchmark, protocols_with
from capi.config.benchmarks import PROTOCOLS
from capi.config.loading import overridden
from capi.config.run_sections import EvaluationConfig
from capi.data.sources import read_csv
from capi.errors import CapiError
from capi.evals.comparison_cells import Column

LABELS = "labels.csv"
# Columns of a CSV that are taken for the class, in this order, where none is named.
_CLASS_COLUMNS = ("label", "class", "class_id")
_EXPECTED = (
    f"a folder with a {LABELS} (columns file, split, and label or mask), a CSV like it, a folder with the folders "
    "train and test (or val) that hold a folder for each class, one with images/ and masks/ by split, or demo"
)


@dataclass(frozen=True)
class StudyData:
    """Images to train on, and the data sets to judge by: name and options, by task."""

    images: str
    datasets: Mapping[Task, tuple[str, Options]]


def find_data(place: str, options: Sequence[str] = ()) -> StudyData:
    """What lies at a place. Without labels a study cannot say which row is better; an option may name their column."""
    path = Path(place)
    if place == "demo":
        return StudyData("demo", {"classification": ("demo", {})})
    if not path.exists():
        raise CapiError(f"there is no {path}: expected {_EXPECTED}")
    if path.suffix.lower() == ".csv":
        return _of_csv(path, options)
    if (path / LABELS).is_file():
        return _of_csv(path / LABELS, options)
    if (path / "masks").is_dir() and (path / "images" / "train").is_dir():
        return StudyData(str(path / "images" / "train"), {"segmentation": ("masks", {"data": str(path)})})
    if (path / "train").is_dir() and any((path / test).is_dir() for test in ("test", "val")):
        return StudyData(str(path / "train"), {"classification": ("folder", {"data": str(path)})})
    raise CapiError(f"{path} has no labels to judge the rows of a study by: expected {_EXPECTED}")


def _of_csv(path: Path, options: Sequence[str]) -> StudyData:
    columns, _ = read_csv(path)
    named = [option.partition("=")[2].strip() for option in options if option.partition("=")[0].strip() == "label"]
    found: dict[Task, tuple[str, Options]] = {}
    if "mask" in columns:
        found["segmentation"] = ("csv", {"data": str(path)})
    column = next((name for name in (*named, *_CLASS_COLUMNS) if name in columns), None)
    if column is not None:
        found["classification"] = ("csv", {"data": str(path), "label": column})
    if not found:
        known = ", ".join((*named, *_CLASS_COLUMNS))
        raise CapiError(
            f"{path} has neither a column mask nor one of {known}: add one to judge the rows by, or name one with "
            "--option label=COLUMN"
        )
    return StudyData(str(path), found)


def score_columns(data: StudyData, benchmarks: Benchmarks, options: list[str], image_size: Any) -> list[Column]:
    """The benchmarks of finished encoders that the labels allow."""
    return [
        Column(name, load_benchmark(name, options={"image_size": image_size} | settings))
        for name, settings in _named(data, benchmarks, options)
    ]


def curve_evaluations(
    data: StudyData, benchmarks: Benchmarks, options: list[str], every_steps: int
) -> list[EvaluationConfig]:
    """The benchmarks on the way that the labels allow."""
    return [
        EvaluationConfig(benchmark=name, options=settings, every_steps=every_steps)
        for name, settings in _named(data, benchmarks, options)
    ]


def check_options(data: StudyData, benchmarks: Sequence[Benchmarks], options: list[str]) -> None:
    """An option that none of the benchmarks knows is an error."""
    protocols = [protocol for task in data.datasets for each in benchmarks for protocol in each.get(task, {})]
    for option in options:
        key = option.partition("=")[0].strip()
        if any(key in PROTOCOLS[protocol].model_fields for protocol in protocols):
            continue
        if owners := protocols_with(key, but=protocols):
            raise CapiError(f"--option {key} is an option of {owners}, which is not used here: leave it out")
        # No protocol has it: a benchmark's own message names the nearest key.
        load_benchmark(f"demo/{protocols[0]}", [option])


def _named(data: StudyData, benchmarks: Benchmarks, options: list[str]) -> list[tuple[str, Options]]:
    return [
        (f"{dataset}/{protocol}", _with_options(protocol, own | settings, options))
        for task, (dataset, own) in data.datasets.items()
        for protocol, settings in benchmarks.get(task, {}).items()
    ]


def _with_options(protocol: str, settings: Options, options: list[str]) -> Options:
    """A user's options go to each protocol that knows the key; the column of the class is none of segmentation's."""
    known = set(PROTOCOLS[protocol].model_fields)
    if PROTOCOLS[protocol].task == "segmentation":
        known.discard("label")
    return overridden(settings, [option for option in options if option.partition("=")[0].strip() in known])
