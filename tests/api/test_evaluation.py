import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from capi.api import evaluation
from capi.api.evaluation import evaluate
from capi.config.files import load_benchmark
from capi.config.schema import Config
from capi.errors import CapiError, counted
from capi.evals import features
from capi.evals.fitted_probes import load_probe
from capi.evals.results import read_record
from capi.evals.team import Execution
from capi.models.features import CapiEncoder
from capi.runtime.processes import ALONE
from capi.runtime.progress import EvaluationProgress
from capi.types import Features
from tests.evals.datasets.layouts import build_csv
from tests.zoo.test_weights import make_run


class Told(EvaluationProgress):
    """Hands on what it is called with."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__(None)
        self.tell = tell

    def __call__(self, what: str, done: int, total: int) -> None:
        self.tell(what, done, total)


def watched(tell: Callable[..., None]) -> Execution:
    return Execution(ALONE, torch.device("cpu"), Told(tell))


FILES = ["probe.safetensors", "results.json", "results.md"]


@pytest.fixture
def classes(class_folders: Path) -> list[str]:
    return [f"data={class_folders}", "image_size=8"]


@pytest.fixture
def masks(mask_folders: Path) -> list[str]:
    return [f"data={mask_folders}", "image_size=8", "ignored=[255]"]


def read(folder: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"JSON has no {name}")

    return json.loads((folder / "results.json").read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.mark.parametrize("protocol", ["knn", "linear", "attentive"])
def test__a_classification_leaves_results_and_a_probe(classes: list[str], tmp_path: Path, protocol: str) -> None:
    few = [] if protocol == "knn" else ["iterations=20", "learning_rates=[0.01, 0.1]"]
    done = evaluate("pixels:4", f"folder/{protocol}", [*classes, *few], out=tmp_path / "new" / "out")
    folder = tmp_path / "new" / "out"
    assert done.folder == folder
    assert sorted(path.name for path in folder.iterdir()) == FILES
    record = read(folder)
    assert record == done.record
    assert record["scores"] == done.outcome.scores
    assert record["scores"]["val"] == 1.0
    assert (record["model"], record["weights"], record["benchmark"]) == ("pixels:4", None, f"folder/{protocol}")
    assert record["chosen"] in record["grid"]
    assert len(record["grid"]) > 1
    assert set(record["data_fingerprint"]) == {"train", "val"}
    assert record["encoder"]["width"] == 48
    assert record["config"]["image_size"] == 8
    assert record["seconds"] > 0
    assert any("8 x 8 px instead of 224 x 224 px" in line for line in record["deviations"])
    page = (folder / "results.md").read_text(encoding="utf-8")
    for line in record["deviations"]:
        assert page.index(line) < page.index("## Scores")


@pytest.mark.parametrize("protocol", ["knn-segmentation", "logistic-segmentation"])
def test__a_segmentation_is_drawn_too(masks: list[str], tmp_path: Path, protocol: str) -> None:
    done = evaluate("pixels:2", f"masks/{protocol}", [*masks, "pictures=3"], out=tmp_path)
    record = read(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions", *FILES]
    assert len(record["grid"]) == 8
    assert list(record["scores"]) == ["val mIoU", "val pixel accuracy"]
    assert record["scores"]["val mIoU"] == done.outcome.main > 0.5
    assert set(record["details"]["IoU by class"]) >= {"0", "1", "2"}
    pictures = sorted((tmp_path / "predictions").iterdir())
    assert [path.name[:6] for path in pictures] == ["00000_", "00001_", "00002_"]
    with Image.open(pictures[0]) as picture:
        # Photo, truth and prediction stand side by side.
        assert picture.width >= 3 * 8
        assert len(picture.convert("RGB").getcolors(2**24)) > 5


def test__what_may_be_left_out_is(masks: list[str], tmp_path: Path) -> None:
    evaluate("pixels:2", "masks/knn-segmentation", [*masks, "pictures=0", "save_probe=false"], out=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]


def test__without_a_folder_nothing_is_written(
    classes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = evaluate("pixels:4", "folder/knn", classes)
    assert done.folder is None
    assert done.record["scores"] == {"val": 1.0}
    assert list(tmp_path.iterdir()) == []


def test__the_same_inputs_give_the_same_results(masks: list[str], tmp_path: Path) -> None:
    records = [evaluate("pixels:2", "masks/knn-segmentation", masks, out=tmp_path / name).record for name in ("a", "b")]
    for record in records:
        del record["seconds"], record["date"]
    assert records[0] == records[1]
    contents = [(tmp_path / name / "probe.safetensors").read_bytes() for name in ("a", "b")]
    assert contents[0] == contents[1]


def test__the_probe_says_where_it_comes_from(classes: list[str], tmp_path: Path) -> None:
    record = evaluate("pixels:4", "folder/knn", classes, out=tmp_path).record
    probe = load_probe(tmp_path / "probe.safetensors")
    assert probe.about == {name: record[name] for name in ("model", "weights", "benchmark", "scores")}
    assert (probe.kind, probe.size, list(probe.classes.values())) == ("knn", (8, 8), ["ant", "bee", "cat"])


def test__of_a_run_the_weights_are_noted(small_config: Config, classes: list[str], tmp_path: Path) -> None:
    run = make_run(small_config, tmp_path / "run")
    facts = [evaluate(run, "folder/knn", classes, weights=weights).record for weights in ("teacher", "student")]
    assert [fact["weights"] for fact in facts] == ["teacher", "student"]
    assert facts[0]["encoder"]["fingerprint"] != facts[1]["encoder"]["fingerprint"]
    assert facts[0]["model"] == "run"


class Mean:
    """An encoder of one's own, in a few lines."""

    width, patch_size = 3, 4

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
        means = torch.nn.functional.avg_pool2d(images, 4).permute(0, 2, 3, 1)
        return Features(None, images.new_zeros(len(images), 0, 3), means)


def test__any_encoder_fits(classes: list[str], tmp_path: Path) -> None:
    done = evaluate(Mean(), load_benchmark("folder/linear", [*classes, "iterations=60"]), out=tmp_path)
    assert done.record["model"] == "Mean"
    assert done.record["encoder"] == {"width": 3, "patch_size": 4, "fingerprint": None}
    assert done.outcome.main > 0.5
    assert (tmp_path / "probe.safetensors").is_file()


def test__a_module_is_evaluated_as_it_will_be_used(model: CapiEncoder, classes: list[str]) -> None:
    """Layers would be dropped at random in training mode."""
    model.train()
    evaluate(model, "folder/knn", classes)
    assert not model.training


def test__results_are_replaced_only_on_demand_and_then_whole(
    classes: list[str], masks: list[str], tmp_path: Path
) -> None:
    evaluate("pixels:2", "masks/knn-segmentation", masks, out=tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(CapiError, match="already holds results"):
        evaluate("pixels:4", "folder/knn", classes, out=tmp_path)
    assert (tmp_path / "results.json").read_bytes() == before
    evaluate("pixels:4", "folder/knn", [*classes, "save_probe=false"], out=tmp_path, overwrite=True)
    # Neither the pictures nor the probe of the other benchmark are left to be taken for those of this one.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "results.json", "results.md"]


def test__what_fails_leaves_earlier_results_as_they_were(
    classes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate("pixels:4", "folder/knn", classes, out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CapiError, match="fewer than the 50 neighbours"):
        evaluate("pixels:4", "folder/knn", [*classes, "neighbors=[50]"], out=tmp_path, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test__a_crash_while_writing_leaves_no_results_that_look_complete(
    classes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate("pixels:4", "folder/knn", classes, out=tmp_path)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "save_probe", crash)
    with pytest.raises(KeyboardInterrupt):
        evaluate("pixels:4", "folder/knn", classes, out=tmp_path, overwrite=True)
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("fails", [False, True])
def test__features_on_disk_are_removed_also_after_an_error(
    masks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    seen: list[list[str]] = []

    def watch(what: str, done: int, total: int) -> None:
        if "val" in what:
            seen.append(sorted(path.name for path in tmp_path.glob(".features.*.partial/*")))
            if fails:
                raise CapiError("stopped")

    little = [*masks, "memory_gib=1e-9"]
    in_memory = evaluate("pixels:2", "masks/knn-segmentation", masks).record["scores"]
    if fails:
        with pytest.raises(CapiError, match="stopped"):
            evaluate("pixels:2", "masks/knn-segmentation", little, out=tmp_path, execution=watched(watch))
    else:
        done = evaluate("pixels:2", "masks/knn-segmentation", little, out=tmp_path, execution=watched(watch))
        assert done.record["scores"] == in_memory
        # What was fitted outlives the files.
        assert load_probe(tmp_path / "probe.safetensors").model.bank.isfinite().all()
    assert seen[0] == ["blocks.bin", "features.bin", "labels.bin"]
    assert not list(tmp_path.glob(".features*"))


def test__progress_tells_what_is_done(classes: list[str]) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    execution = watched(lambda what, *done: seen.setdefault(what, []).append(done))
    evaluate("pixels:4", "folder/knn", classes, execution=execution)
    assert {what: counts[-1] for what, counts in seen.items()} == {
        "training images": (18, 18),
        "test images (val)": (6, 6),
    }


def test__a_picture_shows_the_photo_with_both_labels(masks: list[str], mask_folders: Path, tmp_path: Path) -> None:
    evaluate("pixels:2", "masks/knn-segmentation", [*masks, "pictures=1", "neighbors=[1]"], out=tmp_path)
    (path,) = (tmp_path / "predictions").glob("00000_*.png")
    with Image.open(path) as picture:
        # Three panels of one width, 8 pixels apart, with margins of 14 pixels, under a line of words.
        side = (picture.width - 2 * 14 + 8) // 3 - 8
        lefts, top = (14, 14 + side + 8), 14 + 17 + 4
        panels = [picture.convert("RGB").crop((left, top, left + side, top + side)) for left in lefts]
    photo, truth = (np.asarray(panel.resize((8, 8), Image.Resampling.BOX)).astype(int) for panel in panels)
    with Image.open(next((mask_folders / "images" / "val").rglob("0.png"))) as original:
        expected = np.asarray(original.convert("RGB")).astype(int)
    assert abs(photo - expected).mean() < 8
    assert abs(truth - expected).mean() > 20


@pytest.mark.parametrize(
    ("model", "benchmark", "overrides", "message"),
    [
        ("nowhere", "folder/knn", [], "there is no encoder nowhere"),
        ("pixels:4", "folder/kn", [], 'did you mean "knn"?'),
        ("pixels:4", "foldr/knn", [], 'did you mean "folder"?'),
        ("pixels:4", "folder/knn", [], "needs to know where its files lie"),
        ("pixels:4", "folder/knn", ["data=/nowhere"], "/nowhere"),
        ("pixels:4", "folder/knn-segmentation", ["data=CLASSES"], "no masks"),
        ("pixels:4", "masks/knn", ["data=MASKS"], "no classes of images"),
        ("pixels:4", "folder/knn", ["data=CLASSES", "tests=[tset]"], "tset"),
        ("pixels:4", "folder/knn", ["data=CLASSES", "features=[pooled]"], "gives no pooled vector"),
        ("pixels:4", "masks/knn-segmentation", ["data=MASKS", "class_names=[a]"], "255"),
        ("pixels:4", "folder/knn", ["data=CLASSES", "ignored=[1]"], "ignored is an option of knn-segmentation and"),
    ],
)
def test__bad_input_is_reported_and_leaves_nothing(
    class_folders: Path,
    mask_folders: Path,
    tmp_path: Path,
    model: str,
    benchmark: str,
    overrides: list[str],
    message: str,
) -> None:
    places = {"CLASSES": str(class_folders), "MASKS": str(mask_folders)}
    for word, place in places.items():
        overrides = [override.replace(word, place) for override in overrides]
    with pytest.raises(CapiError) as caught:
        evaluate(model, benchmark, overrides, out=tmp_path / "out")
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test__a_place_that_cannot_be_written_is_reported_before_the_work(
    classes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "encode", lambda *_, **__: pytest.fail("the work was done"))
    (tmp_path / "file").write_text("")
    for place, message in (("file", "is a file"), ("file/inside", "cannot be written")):
        with pytest.raises(CapiError, match=message):
            evaluate("pixels:4", "folder/knn", classes, out=tmp_path / place)


def test__overrides_go_with_a_name(classes: list[str]) -> None:
    config = load_benchmark("folder/knn", classes)
    with pytest.raises(CapiError, match="overrides go with the name of a benchmark"):
        evaluate("pixels:4", config, ["seed=3"])


def test__features_that_are_not_finite_are_an_error(model: CapiEncoder, classes: list[str]) -> None:
    with torch.no_grad():
        model.encoder.patch_embedding.weight.fill_(torch.nan)
    with pytest.raises(CapiError, match="no finite numbers"):
        evaluate(model, "folder/knn", classes)


def test__a_broken_image_is_an_error_that_names_it(tmp_path: Path, classes: list[str], class_folders: Path) -> None:
    shutil.copytree(class_folders, tmp_path / "data")
    broken = next((tmp_path / "data" / "train").rglob("3.png"))
    broken.write_bytes(broken.read_bytes()[:40])
    options = [f"data={tmp_path / 'data'}", "image_size=8"]
    for limit in ([], ["limit_train=17"]):
        with pytest.raises(CapiError, match=f"^{broken} cannot be read .*: repair it or take it out"):
            evaluate("pixels:4", "folder/knn", [*options, *limit])


def test__a_file_that_a_table_names_and_is_not_there_is_reported_so(tmp_path: Path) -> None:
    build_csv(tmp_path)
    (tmp_path / "photos" / "3.png").unlink()
    with pytest.raises(CapiError, match=f"^there is no file {tmp_path}/photos/3.png: put it there, or take it out"):
        evaluate("pixels:4", "csv/knn", [f"data={tmp_path / 'table.csv'}", "image_size=8"])


@pytest.mark.parametrize("limit", ["limit_train=11", "seed=0"])
def test__a_mask_that_does_not_fit_is_named_with_its_folders(tmp_path: Path, mask_folders: Path, limit: str) -> None:
    shutil.copytree(mask_folders, tmp_path / "data")
    mask = next((tmp_path / "data" / "masks" / "train").rglob("6.png"))
    photo = next((tmp_path / "data" / "images" / "train").rglob("6.jpg"))
    Image.new("L", (4, 4)).save(mask)
    with pytest.raises(CapiError, match=f"^the mask {mask} has 4 x 4 pixels, but its image {photo} has 8 x 8"):
        evaluate("pixels:4", "masks/knn-segmentation", [f"data={tmp_path / 'data'}", "image_size=8", limit])


def test__photos_in_both_splits_are_among_the_departures(tmp_path: Path, class_folders: Path) -> None:
    shutil.copytree(class_folders, tmp_path / "data")
    shutil.copy(tmp_path / "data" / "train" / "ant" / "0.png", tmp_path / "data" / "val" / "ant" / "new.png")
    evaluate("pixels:4", "folder/knn", [f"data={tmp_path / 'data'}", "image_size=8"], out=tmp_path / "out")
    (note,) = (line for line in read(tmp_path / "out")["deviations"] if "also training images" in line)
    assert note.startswith("1 of 7 val images")
    departures = (tmp_path / "out" / "results.md").read_text().split("## Warnings")[0]
    assert f"- {note}" in departures


def test__an_unseen_class_is_reported_once(tmp_path: Path, class_folders: Path) -> None:
    shutil.copytree(class_folders, tmp_path / "data")
    shutil.move(tmp_path / "data" / "train" / "cat", tmp_path / "cat")
    done = evaluate("pixels:4", "folder/knn", [f"data={tmp_path / 'data'}", "image_size=8"])
    lines = [line for kind in ("deviations", "warnings") for line in done.record[kind]]
    warnings = [line for line in lines if "cat occur" in line or "only in test" in line]
    assert warnings == ["val: cat occur in the test but not in training, and cannot be recognised"]


@pytest.mark.parametrize(("benchmark", "held_out"), [("folder/knn", 1), ("folder/linear", 1), ("folder/attentive", 1)])
def test__results_say_how_many_images_settings_were_chosen_by(
    classes: list[str], tmp_path: Path, benchmark: str, held_out: int
) -> None:
    options = [] if benchmark == "folder/knn" else ["iterations=2"]
    done = evaluate("pixels:4", benchmark, [*classes, *options], out=tmp_path / "out")
    assert read(tmp_path / "out")["details"]["held-out images"] == held_out
    assert f"| held-out images | {held_out} |" in (tmp_path / "out" / "results.md").read_text()
    assert any(
        f"chosen by {counted(held_out, 'held-out image')} of 3 classes" in line for line in done.record["warnings"]
    )


def test__scores_are_kept_when_the_probe_cannot_be_written(
    class_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("capi.api.evaluation.save_probe", full)
    options = [f"data={class_folders}", "image_size=8", "neighbors=[1]"]
    done = evaluate("pixels:4", "folder/knn", options, out=tmp_path / "out")
    assert read_record(tmp_path / "out") == done.record
    assert any("the probe could not be written (No space left" in warning for warning in done.record["warnings"])
