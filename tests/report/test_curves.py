from pathlib import Path
from typing import IO

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from capi.method.targets import LossLabel
from capi.report.curves import plot_metrics, series

LOSS = LossLabel("Cross-entropy", "nat")
RECORDS = [
    {"step": 0, "demo/knn/teacher": 0.1, "demo/knn/student": 0.2},
    {"step": 1, "student_loss": 9.0, "clustering_loss": None, "target_entropy": 3.0, "prototype_use": 0.5},
    {"step": 2, "student_loss": None, "clustering_loss": 4.0, "learning_rate": 1e-4},
    {"step": 5, "student_loss": 7.0, "demo/knn/teacher": 0.3, "demo/knn/student": None},
]
LOGGED = {
    "student_loss": ([1, 5], [9.0, 7.0]),
    "clustering_loss": ([2], [4.0]),
    "target_entropy": ([1], [3.0]),
    "prototype_use": ([1], [0.5]),
    "learning_rate": ([2], [1e-4]),
    "demo/knn/student": ([0], [0.2]),
    "demo/knn/teacher": ([0, 5], [0.1, 0.3]),
}


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def test__a_series_has_only_what_was_written() -> None:
    assert series(RECORDS, "student_loss") == ([1, 5], [9.0, 7.0])
    assert series(RECORDS, "demo/knn/student") == ([0], [0.2])
    assert series(RECORDS, "absent") == ([], [])


def test__every_metric_is_drawn_as_it_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, titles, plot, set_title = {}, [], Axes.plot, Axes.set_title

    def watched(self: Axes, steps: list, values: list, **options: object) -> list:
        drawn[options["label"]] = (steps, values)
        return plot(self, steps, values, **options)

    def titled(self: Axes, title: str, **options: object) -> object:
        titles.append(title)
        return set_title(self, title, **options)

    monkeypatch.setattr(Axes, "plot", watched)
    monkeypatch.setattr(Axes, "set_title", titled)
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: file.write(b""))
    plot_metrics(RECORDS, tmp_path / "curves.png", LOSS)
    assert drawn == LOGGED
    assert titles[-1] == "Evaluations"


@pytest.mark.parametrize("records", [RECORDS, []], ids=["some", "none"])
def test__the_picture_is_whole_and_alone_in_its_folder(tmp_path: Path, records: list) -> None:
    plot_metrics(records, tmp_path / "curves.png", LOSS)
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]
    pixels = pixels_of(tmp_path / "curves.png")
    panels = [panel for row in np.array_split(pixels, 2) for panel in np.array_split(row, 3, axis=1)]
    # Lines and marks are colored; frames and writing are grey.
    assert [np.ptp(panel, axis=2).max() > 50 for panel in panels] == [bool(records)] * 6
    # The sixth is for evaluations, and blank where there are none.
    assert [(panel < 255).any() for panel in panels] == [True] * 5 + [bool(records)]


def test__a_failure_keeps_the_picture_before_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "curves.png"
    path.write_bytes(b"before")

    def fail(self: Figure, file: IO[bytes], **options: object) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plot_metrics(RECORDS, path, LOSS)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("curves.png", b"before")]
