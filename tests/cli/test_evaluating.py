"""Evaluation as a user meets it: exit codes, what is printed where, what is written."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from capi.runtime.numerics import NUMERICS
from tests.cli.conftest import RunHere, assert_refused
from tests.evals.datasets.layouts import build_csv

SMALL = "image_size=8"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def work(here: Path, class_folders: Path, mask_folders: Path) -> Path:
    """The same with data, by short names."""
    (here / "classes").symlink_to(class_folders)
    (here / "masks").symlink_to(mask_folders)
    return here


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "capi", *arguments], capture_output=True, text=True, check=False)


def test__evaluate_prints_scores_and_departures_and_writes_them(work: Path) -> None:
    ran = run("evaluate", "pixels:4", "folder/knn", "data=classes", SMALL, "--out", "out", "--device", "cpu")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    lines = ran.stdout.splitlines()
    assert lines[0] == "folder/knn: pixels:4"
    assert lines[2].split() == ["val", "100.00", "%"]
    # The paper has no protocol for a user's own photos; what differs from its usual one is written down.
    assert "departs" not in ran.stdout
    assert "image size: 8 x 8 px instead of 224 x 224 px" in (work / "out" / "results.md").read_text()
    assert any(line.startswith("warning: the encoder gives no pooled vector") for line in lines)
    assert lines[-2] == "out has results.json and results.md."
    said, _, command = lines[-1].partition(": ")
    assert said == "out/probe.safetensors labels other images"
    words = command.replace("IMAGES", "classes/val").replace("FOLDER", "labels").split()
    assert run(*words[1:]).stdout == "labeled 6 images: labels\n"
    record = json.loads((work / "out" / "results.json").read_text())
    assert record["scores"] == {"val": 1.0}
    assert record["config"]["data"] == "classes"
    assert record["numerics"] == NUMERICS


@pytest.mark.parametrize("protocol", ["attentive", "linear"])
def test__the_released_mean_over_heads_changes_probes_a_little(run_here: RunHere, work: Path, protocol: str) -> None:
    command = ["evaluate", "pixels:4", f"folder/{protocol}", "data=classes", SMALL, "iterations=5"]
    command += ["learning_rates=[1e-3]", "weight_decays=[1e-3]"]
    heads = []
    for mean in ("head", "released"):
        assert run_here(*command, f"loss_mean={mean}", "--out", mean).code == 0
        assert json.loads((work / mean / "results.json").read_text())["config"]["loss_mean"] == mean
        heads.append(load_file(work / mean / "probe.safetensors"))
    assert any(not torch.equal(value, heads[1][name]) for name, value in heads[0].items())
    for name, value in heads[0].items():
        torch.testing.assert_close(value, heads[1][name], rtol=0, atol=2e-3)


def test__from_labeled_images_to_labels_in_two_commands(run_here: RunHere, work: Path) -> None:
    assert run_here("evaluate", "pixels:4", "folder/knn", "data=classes", SMALL, "--out", "out").code == 0
    ran = run_here(
        "predict", "pixels:4", "out/probe.safetensors", "classes/val", "classes/train/ant/0.png", "--out", "p"
    )
    assert (ran.code, ran.stdout, ran.stderr) == (0, "labeled 7 images: p\n", "")
    with (work / "p" / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["ant"] * 2 + ["bee"] * 2 + ["cat"] * 2 + ["ant"]
    assert rows[0]["file"] == "val/ant/deep/0.jpg"


def test__images_that_cannot_be_read_are_mentioned(run_here: RunHere, work: Path) -> None:
    (work / "photos").mkdir()
    (work / "photos" / "broken.png").write_text("")
    Image.new("RGB", (8, 8)).save(work / "photos" / "whole.png")
    run_here("evaluate", "pixels:4", "folder/knn", "data=classes", SMALL, "--out", "out")
    ran = run_here("predict", "pixels:4", "out/probe.safetensors", "photos", "--out", "p")
    assert ran.code == 0
    assert ran.stdout.splitlines() == [
        "labeled 1 image: p",
        "1 image could not be read: p/failed.csv says why",
    ]


def test__a_segmentation_becomes_pictures(run_here: RunHere, work: Path) -> None:
    options = ["data=masks", SMALL, "ignored=[255]", "pictures=1"]
    ran = run_here("evaluate", "pixels:2", "masks/knn-segmentation", *options, "--out", "out")
    assert ran.code == 0
    assert "val mIoU" in ran.stdout
    assert list((work / "out" / "predictions").glob("00000_*.png"))
    ran = run_here("predict", "pixels:2", "out/probe.safetensors", "masks/images/val", "--out", "p")
    assert ran.stdout == "labeled 4 images: p\n"
    assert len(list((work / "p" / "labels").rglob("*.png"))) == len(list((work / "p" / "overlays").rglob("*.png"))) == 4


def test__a_yaml_file_names_a_benchmark(run_here: RunHere, work: Path) -> None:
    (work / "mine.yaml").write_text("benchmark: folder/knn\ndata: classes\nimage_size: 8\nneighbors: [1]\n")
    ran = run_here("evaluate", "pixels:4", "mine.yaml", "votes=[majority]")
    assert ran.code == 0
    assert "chosen: feature mean_patch, vote majority, neighbours 1;" in ran.stdout


def test__compare_takes_models_benchmarks_and_values(work: Path) -> None:
    (work / "segment.yaml").write_text("benchmark: masks/knn-segmentation\ndata: masks\nignored: [255]\n")
    (work / "classify.yaml").write_text("benchmark: folder/knn\ndata: classes\n")
    words = ["compare", "pixels:4", "pixels:2", "--on", "classify.yaml", "segment.yaml", "--out", "cmp", SMALL]
    ran = run(*words, "neighbors=[1]", "--device", "cpu")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].split() == ["model", "image", "size", "classify", "segment"]
    assert [line.split()[0] for line in lines[1:3]] == ["pixels:4", "pixels:2"]
    assert lines[-3:] == [
        "classify: val accuracy of 6 images",
        "segment: val mIoU of 4 images",
        "cmp/comparison.html shows it.",
    ]
    for page in ("comparison.md", "comparison.html"):
        assert "val accuracy of 6 images" in (work / "cmp" / page).read_text()
    names = sorted(path.name for path in (work / "cmp").iterdir())
    assert names == ["cells", "comparison.csv", "comparison.html", "comparison.json", "comparison.md"]
    records = [json.loads(path.read_text()) for path in (work / "cmp" / "cells").glob("*/results.json")]
    assert len(records) == 4
    assert all(record["config"]["neighbors"] == [1] for record in records)
    assert all(record["config"]["image_size"] == 8 for record in records)


@pytest.mark.parametrize(
    "words",
    [
        ["pixels:4", SMALL, "data=classes", "--on", "folder/knn", "--out", "cmp"],
        [SMALL, "pixels:4", "--out", "cmp", "--on", "folder/knn", "data=classes"],
        ["--out=cmp", "--on=folder/knn", "pixels:4", SMALL, "data=classes"],
        ["--on", "folder/knn", "--device", "cpu", "pixels:4", "data=classes", "--out", "cmp", SMALL],
    ],
)
def test__words_of_compare_may_stand_in_any_order(run_here: RunHere, work: Path, words: list[str]) -> None:
    ran = run_here("compare", *words)
    assert ran.code == 0, ran.stderr
    assert ran.stdout.splitlines()[1].split() == ["pixels:4", "8", "px", "100.00", "%"]


def test__a_table_of_the_paper_says_what_is_missing(
    run_here: RunHere, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(work / "torch"))
    words = ["--table", "high-res", "--models", "ijepa_vith14_in1k", "baseline:ijepa_vith16_448=x.pth", "--out", "cmp"]
    ran = run_here("compare", *words, "--data-root", ".")
    assert ran.code == 0, ran.stderr
    assert ran.stdout.count("I-JEPA-H") == 2
    assert "- (79.4)" in ran.stdout
    assert "missing in 4 cells: no data: expected imagenet" in ran.stdout


def test__a_cell_that_failed_is_reported_and_ends_with_1(run_here: RunHere, work: Path) -> None:
    words = ["pixels:4", "nowhere[b]", "--on", "folder/knn", "--out", "cmp", "data=classes", SMALL]
    ran = run_here("compare", *words)
    assert ran.code == 1
    assert "Traceback" not in ran.stderr
    assert ran.stdout.splitlines()[1].split() == ["pixels:4", "8", "px", "100.00", "%"]
    assert ran.stdout.splitlines()[2].split() == ["nowhere[b]", "-", "failed"]
    assert "failed: nowhere[b] on folder/knn: there is no encoder nowhere[b]" in ran.stdout
    assert run_here("compare", *words).stdout == ran.stdout


def test__features_are_extracted_and_searched(run_here: RunHere, work: Path) -> None:
    ran = run_here("extract", "pixels:4", "classes", "--out", "f.safetensors", "--image-size", 8, "--kind", "patch")
    assert (ran.code, ran.stdout) == (0, "wrote f.safetensors: 24 images, patch\n")
    image = "classes/val/ant/deep/0.jpg"
    ran = run_here("nearest", "f.safetensors", image, "--count", 3, "--out", "new/sheet.png")
    assert ran.code == 0
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["rank", "1", "2", "3", "The", "new/sheet.png"]
    assert lines[4] == "The image itself, which f.safetensors holds too, is left out."
    assert all("/ant/" in line and "val/ant/deep/0.jpg" not in line for line in lines[1:4])
    with Image.open(work / "new" / "sheet.png") as sheet:
        assert sheet.width > 500
    ran = run_here("nearest", "f.safetensors", image, "--count", 1, "--at", "5,1", "--out", "patch.jpg")
    lines = ran.stdout.splitlines()
    assert " row " in lines[1]
    assert "val/ant/deep/0.jpg  row 0, column 1" not in lines[1]
    assert lines[2] == "The patch itself, which f.safetensors holds too, is left out."
    # Without a name each search has a picture of its own.
    for name in ("nearest.png", "nearest_2.png"):
        assert run_here("nearest", "f.safetensors", image, "--count", 1).stdout.endswith(f"{name} shows them.\n")


def test__a_csv_gives_labels(run_here: RunHere, here: Path) -> None:
    build_csv(here / "csv")
    words = ["--image-size", 8, "--split", "train", "--kind", "mean_patch", "--dtype", "float16"]
    ran = run_here("extract", "pixels:4", "csv/table.csv", "--out", "f.parquet", *words)
    assert ran.code == 0, ran.stderr
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(here / "f.parquet").to_pydict()
    assert set(table["label"]) == {"ant", "bee", "cat"}


def test__names_are_printed_as_they_are(run_here: RunHere, here: Path, class_folders: Path) -> None:
    """What the console takes for markup is part of a name."""
    (here / "[red]dark").mkdir()
    for name in ("[bold]a.png", "[/x]b.png"):
        Image.new("RGB", (8, 8), "red").save(here / "[red]dark" / name.replace("/", "\u2215"))
    run_here("extract", "pixels:4", "[red]dark", "--out", "f.safetensors", "--image-size", 8)
    ran = run_here("nearest", "f.safetensors", "[red]dark/[bold]a.png")
    assert ran.code == 0
    assert "[\u2215x]b.png" in ran.stdout
    assert "[bold]a.png" in run_here("nearest", "f.safetensors", "[red]dark/[\u2215x]b.png").stdout
    (here / "[i]data").symlink_to(class_folders)
    (here / "[i]own.py").write_text("from capi.models.features import PixelEncoder\nmake = lambda: PixelEncoder(4)\n")
    ran = run_here("evaluate", "[i]own.py:make", "folder/knn", "data='[i]data'", SMALL)
    assert ran.stdout.splitlines()[0] == "folder/knn: [i]own.py:make"


EVALUATE = ["evaluate", "pixels:4", "folder/knn", "data=classes", SMALL]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "nowhere", "folder/knn", "data=classes"], "there is no encoder nowhere: expected a run folder"),
        (["evaluate", "pixels:x", "folder/knn", "data=classes"], "such as pixels:16"),
        (["evaluate", "EMPTY", "folder/knn", "data=classes"], "EMPTY is no run"),
        (["evaluate", "untrained:tiny5", "demo/knn"], 'did you mean "tiny4"?'),
        (["evaluate", "own.py:x", "demo/knn"], "there is no file own.py"),
        (["evaluate", "pixels:4", "folder"], '"folder" is no benchmark: expected DATASET/PROTOCOL'),
        (["evaluate", "pixels:4", "folder/kn"], 'there is no protocol "kn"; did you mean "knn"?'),
        (["evaluate", "pixels:4", "foldr/knn"], 'there is no data set "foldr"; did you mean "folder"?'),
        (["evaluate", "pixels:4", "nowhere.yaml"], "there is no file nowhere.yaml"),
        (["evaluate", "pixels:4", "folder/knn"], "give data=PATH"),
        (["compare", "pixels:4", "--on", "demo/knn", "folder/knn", "--out", "cmp"], "folder/knn needs to know"),
        (
            ["evaluate", "pixels:4", "folder/knn", "data=nowhere"],
            "nowhere is missing: the files must lie as `capi datasets show folder` says",
        ),
        (["evaluate", "pixels:4", "folder/knn", "data=EMPTY"], "EMPTY holds no images"),
        (["evaluate", "pixels:4", "demo/knn", "data=classes"], "is built in: leave out data=classes"),
        (["evaluate", "pixels:4", "folder/knn-segmentation", "data=classes"], "no masks"),
        (["evaluate", "pixels:4", "masks/linear", "data=masks"], "no classes of images"),
        ([*EVALUATE, "neighbor=[3]"], 'did you mean "neighbors"?'),
        ([*EVALUATE, "neighbors=3"], "neighbors = 3 does not fit: expected a list, so write [3]"),
        ([*EVALUATE, "iterations=3"], "iterations is an option of attentive and linear, not of knn"),
        ([*EVALUATE, "tests=[val,val]"], 'tests= names the split "val" twice'),
        ([*EVALUATE, "neighbors=[99]"], "fewer than the 99 neighbours"),
        ([*EVALUATE, "label=x"], "label= means nothing"),
        ([*EVALUATE, "dataset=pets"], "the benchmark's name says it"),
        ([*EVALUATE, "tests=[tset]"], "tset"),
        ([*EVALUATE, "features=[pooled]"], "gives no pooled vector"),
        ([*EVALUATE, "seed"], "expected key=value"),
        ([*EVALUATE, "--weights", "techer"], 'did you mean "teacher"?'),
        ([*EVALUATE, "--device", "toaster"], 'the device "toaster" is not there'),
        ([*EVALUATE, "--out", "FILE"], "FILE is a file: --out takes the name of a folder"),
        ([*EVALUATE, "--out", "FILE/x"], "FILE/x cannot be written (Not a directory)"),
        (
            ["predict", "pixels:4", "nowhere", "classes", "--out", "p"],
            "there is no file nowhere: give the probe.safetensors",
        ),
        (["predict", "pixels:4", "FILE", "classes", "--out", "p"], "FILE is no probe"),
        (["predict", "pixels:4", "EMPTY", "classes", "--out", "p"], "EMPTY is a folder: give the probe.safetensors"),
        (["compare", "pixels:4", "--on", "demo/knn", "--out", "FILE"], "FILE is a file"),
        (["compare", "pixels:4", "--on", "folder/kn", "--out", "c"], 'did you mean "knn"?'),
        (["compare", "pixels:4", "--on", "folder/knn", "--out", "c", "neighbor=[1]"], 'did you mean "neighbors"?'),
        (["compare", "pixels:4", "--on", "folder/knn", "--out", "c", "protocol=linear"], "cannot be given"),
        (["compare", "seed=3", "--on", "folder/knn", "--out", "c"], "compare needs at least one model"),
        (["compare", "--table", "densee", "--out", "c"], 'did you mean "dense"?'),
        (["compare", "--table", "dense", "--on", "folder/knn", "--out", "c"], "--table has its own benchmarks"),
        (["compare", "pixels:4", "--on", "folder/knn", "--data-root", "x", "--out", "c"], "belong to --table"),
        (["evaluate", "baseline:mae", "folder/knn", "--out", "c"], 'no baseline "mae"'),
        (["compare", "pixels:4", "--on", "folder/knn", "other/model", "--out", "c"], 'no protocol "model"'),
        (["extract", "pixels:4", "nowhere", "--out", "f.safetensors"], "there is no folder nowhere"),
        (["extract", "pixels:4", "nowhere.csv", "--out", "f.safetensors"], "there is no file nowhere.csv"),
        (["extract", "pixels:4", "EMPTY", "--out", "f.safetensors"], "EMPTY holds no images"),
        (["extract", "pixels:4", "classes", "--out", "f.txt"], "f.txt ends in neither .safetensors nor .parquet"),
        (["extract", "pixels:4", "classes", "--out", "f.safetensors", "--kind", "mean"], 'did you mean "mean_patch"?'),
        (["extract", "pixels:4", "classes", "--out", "f.safetensors", "--kind", "pooled"], "no pooled vector"),
        (
            ["extract", "pixels:4", "classes", "--out", "f.safetensors", "--dtype", "int8"],
            "not one of float32, float16",
        ),
        (["extract", "pixels:4", "classes", "--out", "f.safetensors", "--weights", "x"], "not one of teacher, student"),
        (["extract", "pixels:4", "classes", "--out", "f.safetensors", "--image-size", "8x"], "or 224x448 (height x"),
        (["extract", "pixels:4", "classes", "--out", "f.safetensors", "--image-size", "0"], "expected pixels such as"),
        (["nearest", "nowhere", "classes/train/ant/0.png"], "there is no file nowhere: give one that `capi extract`"),
        (["nearest", "FILE", "classes/train/ant/0.png"], "FILE is no file of features"),
        (["nearest", "FILE", "classes/train/ant/0.png", "--at", "1;2"], "is no point: expected x,y in pixels"),
        (["nearest", "FILE", "classes/train/ant/0.png", "--at", "1"], "is no point: expected x,y in pixels"),
        (["nearest", "FILE", "classes/train/ant/0.png", "--out", "x.txt"], "x.txt cannot be a picture"),
        (["nearest", "FILE", "classes/train/ant/0.png", "--out", "EMPTY"], "EMPTY cannot be a picture"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test__bad_input_gets_one_sentence_and_writes_nothing(
    run_here: RunHere, work: Path, arguments: list[str], message: str
) -> None:
    (work / "EMPTY").mkdir()
    (work / "FILE").write_text("text")
    before = sorted(work.rglob("*"))
    assert_refused(run_here(*arguments), message)
    assert sorted(work.rglob("*")) == before


def test__what_is_there_is_not_replaced_by_accident(run_here: RunHere, work: Path) -> None:
    extract = ["extract", "pixels:4", "classes/val", "--out", "f.safetensors", "--image-size", "8"]
    label = ["predict", "pixels:4", "out/probe.safetensors", "classes/val", "--out", "p"]
    for command, message in (
        ([*EVALUATE, "--out", "out"], "out already holds results"),
        (label, "p is not empty"),
        (extract, "f.safetensors is there already"),
        (["nearest", "f.safetensors", "classes/val/ant/deep/0.jpg", "--out", "n.png"], "n.png is there already"),
    ):
        assert run_here(*command).code == 0
        assert_refused(run_here(*command), message)
        assert run_here(*command, "--overwrite").code == 0


def test__probes_and_features_of_another_encoder_are_refused(run_here: RunHere, work: Path) -> None:
    run_here(*EVALUATE, "--out", "out")
    run_here("extract", "pixels:4", "classes", "--out", "f.safetensors", "--image-size", 8)
    assert_refused(
        run_here("predict", "pixels:8", "out/probe.safetensors", "classes", "--out", "p"),
        "fitted on features of width 48",
    )
    refused = run_here("nearest", "f.safetensors", "classes/val/ant/deep/0.jpg", "--model", "pixels:8")
    assert_refused(refused, "of an encoder of width 48, but this one has 192")
    for words, message in (
        (["classes/val/ant/deep/0.jpg", "--kind", "pooled"], 'has no "pooled" features'),
        (["classes/val/ant/deep/0.jpg", "--at", "1,2"], 'has no "patch" features, which a point needs'),
        (["nowhere.png"], "there is no file nowhere.png: give the image"),
    ):
        assert_refused(run_here("nearest", "f.safetensors", *words), message)
    assert not (work / "p").exists()
    assert not (work / "nearest.png").exists()


def test__pictures_are_drawn_of_models_and_images(run_here: RunHere, work: Path) -> None:
    words = ["pixels:2", "pixels:4", "masks/images/val", "--size", "8", "--kind", "pca", "--joint", "--out", "seen"]
    ran = run_here("visualize", *words)
    assert ran.code == 0
    assert ran.stdout.startswith("seen/index.html shows ")
    assert (work / "seen" / "pca.png").is_file()
    page = (work / "seen" / "index.html").read_text()
    assert "pixels:2" in page
    assert "pixels:4" in page
    ran = run_here("visualize", "masks/images/val", "--out", "again")
    assert (ran.code, "needs at least one model" in ran.stderr) == (2, True)


def test__a_zip_is_refused_with_what_it_serves_for(run_here: RunHere, tmp_path: Path) -> None:
    (tmp_path / "photos.zip").write_bytes(b"zip")
    ran = run_here("evaluate", "pixels:4", "folder/knn", f"data={tmp_path}/photos.zip")
    assert_refused(ran, "photos.zip is a zip, which training and `capi extract` read as it is: unzip it")
