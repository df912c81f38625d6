import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import capi.api.comparison as comparing
from capi.api.comparison import compare, identify_data, resolve_columns
from capi.config.files import load_benchmark
from capi.errors import CapiError
from capi.evals.comparison_cells import BenchmarkColumn
from capi.evals.datasets import DATASETS, load_classification, load_segmentation
from tests.evals.datasets.layouts import BUILDERS, root_of

COLORS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}
SMALL = ["image_size=16", "neighbors=[1]", "votes=[majority]"]
OWN_ENCODER = """
import torch
from capi.types import Features

class Scaled{base}:
    width, patch_size = 3, 8

    def __call__(self, images, *, pooled=True):
        feature_map = torch.nn.functional.avg_pool2d({scale} * images, 8).permute(0, 2, 3, 1)
        return Features(None, torch.zeros(len(images), 0, 3), feature_map)
"""


@pytest.fixture
def colored(tmp_path: Path) -> Path:
    """Noisy images in the color of their class."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 2)):
        for name, color in COLORS.items():
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = (generator.normal(0, 25, (24, 20, 3)) + color).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "data"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Which cells are computed and not kept."""
    seen: list[tuple[str, str]] = []
    real = comparing.evaluate

    def counted(model: str, benchmark: Any, **options: Any) -> Any:
        seen.append((model, benchmark.protocol))
        return real(model, benchmark, **options)

    monkeypatch.setattr(comparing, "evaluate", counted)
    return seen


def small(data: Path) -> list[str]:
    return [f"data={data}", *SMALL]


def test__every_model_is_scored_on_every_benchmark(colored: Path, tmp_path: Path) -> None:
    benchmarks = [BenchmarkColumn("one neighbour", load_benchmark("folder/knn")), "folder/knn"]
    comparison = compare(["pixels:4", "pixels:8"], benchmarks, small(colored), out=tmp_path / "out")
    assert {key: cell.value for key, cell in comparison.cells.items()} == {
        (model, name): 1.0 for model in ("pixels:4", "pixels:8") for name in ("folder/knn", "one neighbour")
    }
    assert not comparison.failed
    assert all((tmp_path / "out" / cell.folder / "results.json").is_file() for cell in comparison.cells.values())


def test__finished_cells_are_kept_and_new_ones_added(
    colored: Path, tmp_path: Path, computed: list[tuple[str, str]]
) -> None:
    compare(["pixels:4"], ["folder/knn"], small(colored), out=tmp_path / "out")
    again = compare(["pixels:4", "pixels:8"], ["folder/knn"], small(colored), out=tmp_path / "out")
    assert computed == [("pixels:4", "knn"), ("pixels:8", "knn")]
    assert [cell.reused for cell in again.in_order] == [True, False]
    assert [cell.value for cell in again.in_order] == [1.0, 1.0]


def test__results_without_the_end_of_their_cell_are_not_taken_for_finished(
    colored: Path, tmp_path: Path, computed: list[tuple[str, str]]
) -> None:
    first = compare(["pixels:4"], ["folder/knn"], small(colored), out=tmp_path / "out")
    (tmp_path / "out" / first.in_order[0].folder / "results.json").write_text("{")
    second = compare(["pixels:4"], ["folder/knn"], small(colored), out=tmp_path / "out")
    (tmp_path / "out" / second.in_order[0].folder / "identity.json").unlink()
    compare(["pixels:4"], ["folder/knn"], small(colored), out=tmp_path / "out")
    assert len(computed) == 3


@pytest.mark.parametrize("change", ["option", "new image", "other pixels", "other label"])
def test__what_a_score_depends_on_makes_a_cell_new(
    change: str, colored: Path, tmp_path: Path, computed: list[tuple[str, str]]
) -> None:
    options = small(colored)
    compare(["pixels:4"], ["folder/knn"], options, out=tmp_path / "out")
    image = colored / "test" / "red" / "0.png"
    if change == "option":
        options += ["image_size=8"]
    elif change == "new image":
        (image.parent / "copy.png").write_bytes(image.read_bytes())
    elif change == "other pixels":
        image.write_bytes((colored / "test" / "blue" / "0.png").read_bytes())
        os.utime(image, ns=(1, 1))
    else:
        image.rename(colored / "test" / "blue" / "9.png")
    compare(["pixels:4"], ["folder/knn"], options, out=tmp_path / "out")
    assert len(computed) == 2


def test__another_label_in_a_csv_makes_a_cell_new(
    colored: Path, tmp_path: Path, computed: list[tuple[str, str]]
) -> None:
    files = sorted(colored.rglob("*.png"))
    rows = [f"{file.relative_to(tmp_path)},{file.parent.name},{file.parent.parent.name}" for file in files]
    for rewritten in (rows, rows, [*rows[:-1], rows[-1].replace("red,train", "blue,train")]):
        (tmp_path / "labels.csv").write_text("\n".join(["file,label,split", *rewritten]))
        compare(["pixels:4"], ["csv/knn"], small(tmp_path / "labels.csv"), out=tmp_path / "out")
    assert len(computed) == 2


def test__a_file_with_other_weights_is_computed_again(
    colored: Path, tmp_path: Path, computed: list[tuple[str, str]]
) -> None:
    source = tmp_path / "weighted.py"
    source.write_text(
        "import torch\nfrom pathlib import Path\nfrom capi.models.features import PixelEncoder\n"
        "def trained():\n    encoder = PixelEncoder(8)\n"
        f"    encoder.register_buffer('weight', torch.load({str(tmp_path / 'weight.pt')!r}))\n    return encoder\n"
    )
    for weight in (1.0, 1.0, 2.0):
        torch.save(torch.tensor([weight]), tmp_path / "weight.pt")
        compare([f"{source}:trained"], ["folder/knn"], small(colored), out=tmp_path / "out")
    assert len(computed) == 2


def test__an_encoder_whose_code_changed_is_computed_again(
    colored: Path, tmp_path: Path, computed: list[tuple[str, str]]
) -> None:
    source = tmp_path / "own.py"
    for scale in (1, 1, -2):
        text = OWN_ENCODER.format(base="(torch.nn.Module)", scale=scale).replace("__call__", "forward")
        source.write_text(text)
        # Python tells compiled from changed source by whole seconds.
        os.utime(source, (1000 + scale, 1000 + scale))
        compare([f"{source}:Scaled"], ["folder/knn"], small(colored), out=tmp_path / "out")
    assert len(computed) == 2


def test__an_encoder_without_weights_to_know_it_by_is_never_kept_and_the_page_says_so(
    colored: Path, tmp_path: Path, computed: list[tuple[str, str]]
) -> None:
    (tmp_path / "own.py").write_text(OWN_ENCODER.format(base="", scale=1))
    model = f"{tmp_path / 'own.py'}:Scaled"
    for _ in range(2):
        comparison = compare([model], ["folder/knn"], small(colored), out=tmp_path / "out")
    assert len(computed) == 2
    assert comparison.unrecognized == [model]
    for ending in ("md", "html"):
        assert "computed again every time" in (tmp_path / "out" / f"comparison.{ending}").read_text("utf-8")


def test__a_cell_that_fails_says_why_and_the_rest_continues(colored: Path, tmp_path: Path) -> None:
    (tmp_path / "gone.yaml").write_text(f"benchmark: folder/knn\ndata: {tmp_path / 'nowhere'}\n")
    models = ["no-such-encoder", "pixels:4"]
    good = BenchmarkColumn("good", load_benchmark("folder/knn", small(colored)))
    comparison = compare(models, [tmp_path / "gone.yaml", good], out=tmp_path / "out")
    statuses = {key: cell.status for key, cell in comparison.cells.items()}
    assert statuses == {(model, name): "failed" for model in models for name in ("gone", "good")} | {
        ("pixels:4", "good"): "done"
    }
    assert "no encoder no-such-encoder" in comparison.cells["no-such-encoder", "good"].reason
    assert str(tmp_path / "nowhere") in comparison.cells["pixels:4", "gone"].reason


def test__failed_cells_are_retried(colored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\n GPU 0 has ...")

    with monkeypatch.context() as patch:
        patch.setattr(comparing, "evaluate", full)
        first = compare(["pixels:4"], ["folder/knn"], small(colored), out=tmp_path / "out")
    assert first.failed[0].reason.startswith("the memory ran out")
    assert compare(["pixels:4"], ["folder/knn"], small(colored), out=tmp_path / "out").failed == []


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device"), RuntimeError("of torch")])
def test__what_the_machine_lacks_is_the_failure_of_one_cell(
    error: Exception, colored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(comparing, "evaluate", fail)
    comparison = compare(["pixels:4", "pixels:8"], ["folder/knn"], small(colored), out=tmp_path / "out")
    assert [cell.status for cell in comparison.in_order] == ["failed", "failed"]
    assert all(cell.reason and "\n" not in cell.reason for cell in comparison.in_order)


def test__an_interruption_leaves_what_is_finished(
    colored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = comparing.evaluate

    def interrupted(model: str, benchmark: Any, **options: Any) -> Any:
        if model == "pixels:8":
            raise KeyboardInterrupt
        return real(model, benchmark, **options)

    monkeypatch.setattr(comparing, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(["pixels:4", "pixels:8"], ["folder/knn"], small(colored), out=tmp_path / "out")
    cells = json.loads((tmp_path / "out" / "comparison.json").read_text())["cells"]
    assert [cell["status"] for cell in cells] == ["done", "pending"]
    assert cells[0]["results"]["scores"] == {"test": 1.0}


def test__pages_are_written_after_every_cell(colored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, seen = tmp_path / "out", []
    write_pages = comparing.write_pages

    def look(comparison: Any) -> None:
        write_pages(comparison)
        cells = json.loads((out / "comparison.json").read_text())["cells"]
        texts = [(out / f"comparison.{ending}").read_text("utf-8").count("100.00 %") for ending in ("md", "html")]
        seen.append(([cell["status"] for cell in cells], [count > 0 for count in texts]))

    monkeypatch.setattr(comparing, "write_pages", look)
    compare(["pixels:4", "pixels:8"], ["folder/knn"], small(colored), out=out)
    assert seen == [
        (["pending", "pending"], [False, False]),
        (["running", "pending"], [False, False]),
        (["done", "pending"], [True, True]),
        (["done", "running"], [True, True]),
        (["done", "done"], [True, True]),
        (["done", "done"], [True, True]),
    ]


def test__an_override_goes_to_the_benchmarks_that_know_it() -> None:
    names = ["folder/knn", "folder/linear", "demo/knn", "csv/knn"]
    overrides = ["neighbors=[7]", "iterations=5", "data=x", "label=kind", "seed=3"]
    knn, linear, demo, table = (column.config.model_dump() for column in resolve_columns(names, overrides))
    assert knn["neighbors"] == demo["neighbors"] == table["neighbors"] == (7,)
    assert "neighbors" not in linear
    assert linear["iterations"] == 5
    assert [config["data"] for config in (knn, linear, demo, table)] == ["x", "x", None, "x"]
    assert [config["label"] for config in (knn, linear, demo, table)] == [None, None, None, "kind"]
    assert {config["seed"] for config in (knn, linear, demo, table)} == {3}


@pytest.mark.parametrize(
    ("benchmarks", "overrides", "said"),
    [
        (["folder/knn", "folder/linear"], ["neighbor=[7]"], 'no key "neighbor".*did you mean "neighbors"'),
        (
            ["folder/knn"],
            ["iterations=5"],
            "an option of attentive and linear, but the benchmarks are folder/knn",
        ),
        (["folder/knn"], ["neighbors=[0]"], "folder/knn: neighbors"),
        (["folder/knn"], ["neighbors"], "not an override: expected key=value, such as image_size=448"),
        (["folder/knn"], ["label=kind"], "label= means nothing"),
        (["folder/knn"], ["dataset=csv"], "dataset= cannot be given"),
        (["folder/knn"], ["benchmark=csv/knn"], 'no key "benchmark"'),
        (["folder/knm"], [], 'did you mean "knn"'),
        (["foldr/knn"], [], 'did you mean "folder"'),
        (["folder"], [], "is no benchmark"),
        (["nowhere.yaml"], [], "there is no file nowhere.yaml"),
        (["folder/knn-segmentation"], [], "no masks: choose folder/attentive or folder/knn or folder/linear"),
        ([], [], "no benchmark"),
        (["demo/knn", "csv/knn"], [], "csv/knn needs to know where the images lie: give data=PATH"),
    ],
)
def test__bad_benchmarks_and_options_are_refused_before_anything_is_run(
    benchmarks: list[str], overrides: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CapiError, match=said):
        compare(["pixels:4"], benchmarks, overrides, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test__no_model_and_a_file_in_the_way_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="no model"):
        compare([], ["folder/knn"], out=tmp_path / "out")
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CapiError, match="is a file"):
        compare(["pixels:4"], ["demo/knn"], out=tmp_path / "out")


def test__columns_have_names_that_tell_them_apart(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a/pets.yaml", "b/pets.yaml", "a/alone.yaml")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("benchmark: folder/knn\n")
    own = BenchmarkColumn("folder/knn", load_benchmark("folder/knn"))
    names = [column.name for column in resolve_columns([own, *files, "folder/knn", "folder/knn"])]
    assert names == ["folder/knn", "pets.yaml", "pets.yaml (2)", "alone", "folder/knn (2)"]


def test__a_model_given_twice_is_one_row(colored: Path, tmp_path: Path) -> None:
    comparison = compare(["pixels:4", "pixels:4"], ["folder/knn"], small(colored), out=tmp_path / "out")
    assert comparison.models == ("pixels:4",)


def test__whatever_goes_wrong_in_an_encoder_is_reported_in_its_cell(colored: Path, tmp_path: Path) -> None:
    call = "def __call__(self, images, *, pooled=True):\n        return [][1]\n"
    code = f"class Wrong:\n    width, patch_size = 3, 8\n    {call}"
    (tmp_path / "wrong.py").write_text(code)
    comparison = compare(
        [f"{tmp_path}/wrong.py:Wrong", "pixels:4"], ["folder/knn"], small(colored), out=tmp_path / "out"
    )
    assert [cell.status for cell in comparison.in_order] == ["failed", "done"]
    assert "index out of range" in comparison.failed[0].reason


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"demo"}))
def test__the_files_of_every_data_set_can_be_identified(name: str, tmp_path: Path) -> None:
    options = BUILDERS[name](tmp_path)
    load = load_segmentation if DATASETS[name].segmentation else load_classification
    data = load(name, root_of(name, tmp_path), options)
    assert identify_data(data) == identify_data(data)
