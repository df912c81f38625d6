"""A run's own size is the default of whatever uses its encoder, by the run's folder or by an export."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import capi
from capi.evals.feature_files import read_features
from capi.report.explorer import page
from capi.zoo.run_folder import FILE, read_metrics
from tests.cli.conftest import RunHere

MODEL = {"width": 16, "depth": 1, "heads": 1, "patch_size": 4, "registers": 4}
QUIET = {"loggers": [], "report": False, "snapshots": 0, "log_steps": 1}
SIZES = {"square": (24, 24), "wide": (16, 24)}


@pytest.fixture(scope="module", params=SIZES)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, class_folders: Path, mask_folders: Path
) -> tuple[Path, tuple[int, int]]:
    """A folder with a run that was scored by two benchmarks on the way, and the size that it has."""
    from capi.config.files import parse_config

    place, size = tmp_path_factory.mktemp("trained"), SIZES[request.param]
    benchmarks = {
        "folder/knn": {"data": str(class_folders), "neighbors": [1], "save_probe": True},
        "masks/knn-segmentation": {"data": str(mask_folders), "ignored": [255], "neighbors": [1]},
    }
    config = parse_config(
        {
            "data": {"image_size": list(size) if size[0] != size[1] else size[0], "workers": 0},
            "model": MODEL,
            "clustering": {"prototypes": 8},
            "masking": {"predict": 4},
            "optimization": {"batch_size": 4, "steps": 3},
            "evaluations": [
                {"benchmark": name, "options": options, "every_steps": 3} for name, options in benchmarks.items()
            ],
            "run": QUIET,
        }
    )
    capi.pretrain(config, data=class_folders / "train", out=place / "run", device="cpu")
    for format, name in (("safetensors", "run.safetensors"), ("transformers", "hf"), ("released", "run.pth")):
        capi.export(place / "run", place / name, format=format)
    # A file that is made from an export, without the run at hand.
    capi.export(place / "hf", place / "again.safetensors", format="safetensors")
    return place, size


MODELS = ["run", "run.safetensors", "hf", "again.safetensors"]


@pytest.mark.parametrize("model", MODELS)
def test__a_benchmark_has_the_score_that_it_had_during_the_run(
    model: str, trained: tuple[Path, tuple[int, int]], run_here: RunHere, tmp_path: Path
) -> None:
    (place, size), config = trained, capi.load_config(str(trained[0] / "run" / "config.yaml"))
    last: dict[str, Any] = {}
    for record in read_metrics(place / "run" / FILE):
        last |= record
    for number, evaluation in enumerate(config.evaluations):
        options = [f"{key}={json.dumps(value)}" for key, value in evaluation.options.items()]
        records, banks = [], []
        for asked in ([], [f"image_size={list(size)}"]):
            out = tmp_path / f"{number}{len(asked)}"
            ran = run_here("evaluate", place / model, evaluation.benchmark, *options, *asked, "--out", out)
            assert ran.code == 0, ran.stderr
            records.append(json.loads((out / "results.json").read_text()))
            banks.append(load_file(out / "probe.safetensors"))
            assert f"image size: {size[0]} x {size[1]} px instead of 224 x 224 px" in records[-1]["deviations"]
        default, explicit = records
        assert default["image_size"] == explicit["image_size"] == list(size)
        assert default["scores"] == explicit["scores"]
        assert next(iter(default["scores"].values())) == last[f"{evaluation.benchmark}/teacher"]
        assert all(banks[0][name].equal(banks[1][name]) for name in banks[1])


@pytest.mark.parametrize("model", MODELS)
def test__images_are_transformed_to_it(model: str, trained: tuple[Path, tuple[int, int]]) -> None:
    place, size = trained
    assert capi.transform(capi.load(place / model)).size == size


@pytest.mark.parametrize("model", MODELS)
def test__extract_visualize_and_explore_take_it(
    model: str,
    trained: tuple[Path, tuple[int, int]],
    run_here: RunHere,
    tmp_path: Path,
    class_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (place, size), photos = trained, class_folders / "val"
    ran = run_here("extract", place / model, photos, "--out", tmp_path / "f.safetensors")
    assert ran.code == 0, ran.stderr
    assert read_features(tmp_path / "f.safetensors").facts.framing.size == size
    ran = run_here("visualize", place / model, photos, "--kind", "pca", "--out", tmp_path / "drawn")
    assert ran.code == 0, ran.stderr
    # Pictures are larger by a whole factor, as those of the report: with so few patches nobody sees shapes.
    enlarged = min(size) * (24 // (max(size) // MODEL["patch_size"]))
    assert f"short side of {enlarged} px" in (tmp_path / "drawn" / "index.html").read_text()
    explorers: list[Any] = []

    def served(explorer: Any, *_: object, **__: object) -> Any:
        explorers.append(explorer)
        raise capi.CapiError("far enough")

    monkeypatch.setattr(page, "serving", served)
    assert "far enough" in run_here("explore", place / model, photos).stderr
    assert explorers[0].frame.side == enlarged


def test__an_export_for_the_library_prepares_images_of_it(trained: tuple[Path, tuple[int, int]]) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoImageProcessor, AutoModel

    import capi.huggingface

    place, (height, width) = trained
    processor, model = (each.from_pretrained(place / "hf") for each in (AutoImageProcessor, AutoModel))
    assert (processor.size["height"], processor.size["width"]) == (height, width)
    assert capi.transform(model.model).size == (height, width)


def test__what_does_not_say_its_size_has_the_paper_s(trained: tuple[Path, tuple[int, int]]) -> None:
    place, _ = trained
    assert capi.transform(capi.load(place / "run.pth")).size == (224, 224)


def test__each_model_of_a_comparison_has_its_own_size_and_the_table_says_it(
    trained: tuple[Path, tuple[int, int]], run_here: RunHere, tmp_path: Path, class_folders: Path
) -> None:
    place, (height, width) = trained
    words = ["compare", place / "run", "pixels:32", "--on", "folder/knn", "--out", tmp_path / "out"]
    words += [f"data={class_folders}", "neighbors=[1]"]
    ran = run_here(*words)
    assert ran.code == 0, ran.stderr
    own = f"{height} px" if height == width else f"{height} x {width} px"
    lines = ran.stdout.splitlines()
    assert "image size" in lines[0]
    assert own in next(line for line in lines if "run" in line and "%" in line)
    assert "224 px" in next(line for line in lines if line.startswith("pixels:32"))
    cells = json.loads((tmp_path / "out" / "comparison.json").read_text())["cells"]
    assert [cell["results"]["image_size"] for cell in cells] == [[height, width], [224, 224]]
    with (tmp_path / "out" / "comparison.csv").open() as file:
        sizes = {row["model"]: row["image_size"] for row in csv.DictReader(file)}
    assert list(sizes.values()) == [f"{height}x{width}", "224x224"]
    assert f"| {own} |" in (tmp_path / "out" / "comparison.md").read_text()
    assert f'<td class="number">{own}</td>' in (tmp_path / "out" / "comparison.html").read_text()
    # Cells that were computed at another default are not kept.
    for identity in (tmp_path / "out").glob("cells/*/identity.json"):
        record = json.loads(identity.read_text())
        identity.write_text(json.dumps({name: value for name, value in record.items() if name != "image_size"}))
    assert run_here(*words).code == 0
    cells = json.loads((tmp_path / "out" / "comparison.json").read_text())["cells"]
    assert [cell["kept"] for cell in cells] == [False, False]
