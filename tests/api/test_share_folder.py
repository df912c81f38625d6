"""What a run becomes for others: all of it there, nothing of the machine it was trained on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from capi.api.share import prepare_folder
from capi.config.files import dump_config, load_config, parse_config
from capi.errors import CapiError
from capi.models.features import PixelEncoder
from capi.report.card import MARK
from capi.report.costs import CostAssumptions
from capi.runtime.atomic import Output
from capi.train.build import build_learner
from capi.train.checkpoint import Checkpoints, Position
from capi.zoo.huggingface.files import read_transformers
from capi.zoo.weights import load_run
from tests.report.run_folders import record


def prepared(run: Path, out: Path, *, overwrite: bool = False, **others: Any) -> str:
    folder = prepare_folder(run, Output(out, overwrite), name="ana/tiny", licence="mit", **others)
    assert folder == out
    return (out / "README.md").read_text()


def with_config(run: Path, changes: dict[str, dict[str, Any]]) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    for name, values in changes.items():
        tree[name] |= values
    (run / "config.yaml").write_text(dump_config(parse_config(tree)))


def results(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    record = {"version": 1, "benchmark": "pets/knn", "scores": {"val": 0.25}, "deviations": [], "weights": "teacher"}
    (folder / "results.json").write_text(json.dumps(record | changes))
    return folder


def test__the_folder_holds_all_that_is_promised(trained: Path, tmp_path: Path) -> None:
    text = prepared(trained, tmp_path / "out", data_description="Groceries.")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        "config.json",
        "config.yaml",
        "curves.png",
        "model.safetensors",
        "preprocessor_config.json",
        "snapshots.png",
    }
    assert MARK in text
    assert "Trained with batches of 64 images for 60 steps. The weights are the moving average" in text
    assert "| demo/knn | 20.00 % | 60.00 % | 60 |" in text
    assert "Groceries." in text
    assert "| Time | 2 minutes, in one start |" in text
    assert "| Versions | python 3.11, torch 2.13 |" in text
    assert "| Code | commit abc |" in text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("weights", ["teacher", "student"])
def test__its_weights_are_those_of_the_run(trained: Path, tmp_path: Path, weights: Any) -> None:
    text = prepared(trained, tmp_path / "out", weights=weights)
    assert f"(the {weights})" in text
    weights_read, expected = read_transformers(tmp_path / "out").state_dict(), load_run(trained, weights).state_dict()
    assert weights_read.keys() == expected.keys()
    assert all(torch.equal(weights_read[name], value) for name, value in expected.items())
    assert ("| demo/knn | 20.00 % | 50.00 % | 60 |" in text) == (weights == "student")


def test__it_names_no_place_of_this_machine(run: Path, tmp_path: Path) -> None:
    evaluation = {"benchmark": "folder/knn", "options": {"data": "/home/ana/secret/pets"}}
    tree = yaml.safe_load((run / "config.yaml").read_text()) | {"evaluations": [evaluation]}
    (run / "config.yaml").write_text(dump_config(parse_config(tree)))
    with_config(run, {"init": {"encoder": "../secret/older"}})
    record = json.loads((run / "run.json").read_text())
    record["data"]["path"] = "/home/ana/secret/fruit_photos"
    record["init"] = {"encoder": "../secret/older", "sha256": "ab" * 32}
    (run / "run.json").write_text(json.dumps(record))
    text = prepared(run, tmp_path / "out")
    assert "a folder called fruit\\_photos" in text
    assert f"It started from the weights of older (sha256 of the tensors {'ab' * 8})" in text
    for path in (tmp_path / "out").iterdir():
        assert b"secret" not in path.read_bytes(), path
        assert b"somewhere" not in path.read_bytes(), path
    shared = load_config(tmp_path / "out" / "config.yaml")
    assert shared.evaluations[0].options["data"] == "pets"
    assert shared.optimization == load_config(run / "config.yaml").optimization


def test__several_sources_are_reported_without_their_places(run: Path, tmp_path: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    places = [
        "/home/ana/secret/fruit",
        "/home/ana/secret/{00..12}.tar",
        "hf://owner/name?split=train",
        "hf:///secret/set",
    ]
    record["data"]["sources"] = [{"path": place, "weight": None} for place in places]
    record["data"]["path"] = ", ".join(places)
    (run / "run.json").write_text(json.dumps(record))
    text = prepared(run, tmp_path / "out")
    assert (
        "images of a folder called fruit and files called {00..12}.tar and the data set owner/name?split=train" in text
    )
    assert "secret" not in text


def test__a_distilled_model_names_its_teacher(run: Path, tmp_path: Path) -> None:
    frozen = {"kind": "frozen", "frozen": {"encoder": "/somewhere/big_model", "width": 48}}
    with_config(run, {"target": frozen})
    config = load_config(run / "config.yaml")
    shutil.rmtree(run / "checkpoints")
    Checkpoints(run / "checkpoints").save(build_learner(config, frozen_encoder=PixelEncoder(4)), Position(step=60))
    text = prepared(run, tmp_path / "out")
    assert "Its targets are features of big\\_model." in text
    assert "another encoder's features (distillation)" in text


def test__a_run_that_was_not_finished_says_so(run: Path, tmp_path: Path) -> None:
    with_config(run, {"optimization": {"steps": 1000}})
    assert "for 60 of 1,000 steps: the run was not finished." in prepared(run, tmp_path / "out")


def test__a_run_in_bad_health_says_so(run: Path, tmp_path: Path) -> None:
    bad = [record(step, effective_rank=1.0) for step in range(5, 61, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in bad))
    assert "At the end of training something was not well: " in prepared(run, tmp_path / "out")


def test__results_are_found_in_the_run_and_where_they_are_named(run: Path, tmp_path: Path) -> None:
    results(run / "evaluations" / "pets")
    results(run / "broken", scores="many")
    results(run / "later", version=99)
    given = results(tmp_path / "elsewhere", benchmark="voc/knn", scores={"mIoU": 0.5}, deviations=["smaller images"])
    text = prepared(run, tmp_path / "out", results=[given])
    assert "| pets/knn | val | 25.00 % | teacher |" in text
    assert "| voc/knn | mIoU | 50.00 % | teacher |" in text
    assert "- voc/knn: smaller images" in text
    assert text.count("pets/knn |") == 1
    with pytest.raises(CapiError, match=r"holds no results of `capi evaluate`"):
        prepared(run, tmp_path / "other", results=[tmp_path / "nowhere"])


def test__photos_are_shown_only_when_asked_for(trained: Path, tmp_path: Path) -> None:
    prepared(trained, tmp_path / "without")
    prepared(trained, tmp_path / "with", photos=True)
    sizes = []
    for name in ("without", "with"):
        with Image.open(tmp_path / name / "snapshots.png") as sheet:
            sizes.append(sheet.size)
    assert sizes[1][0] > sizes[0][0]
    assert sizes[1][1] == sizes[0][1]


def test__a_run_without_pictures_is_shared_without(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "pictures")
    assert "## Pictures\n\nNone." in prepared(run, tmp_path / "out")


def test__a_picture_that_is_broken_is_left_out(run: Path, tmp_path: Path) -> None:
    for path in (run / "pictures" / "snapshots").glob("step_*_0.png"):
        path.write_bytes(b"no picture")
    assert "snapshots.png" in prepared(run, tmp_path / "out")


def test__power_and_carbon_are_those_that_are_given(trained: Path, tmp_path: Path) -> None:
    text = prepared(trained, tmp_path / "out", costs=CostAssumptions(watts=1000.0, carbon=0.5))
    assert "The device draws 1000 W all the time, as was given." in text


def test__only_a_folder_of_ours_is_replaced(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepared(trained, out)
    with pytest.raises(CapiError, match="is not empty: choose another `out`, or give `overwrite=True`"):
        prepared(trained, out)
    (out / "curves.png").write_text("old")
    prepared(trained, out, overwrite=True)
    assert (out / "curves.png").read_bytes() != b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("# My notes")
    with pytest.raises(CapiError, match="did not write and does not replace"):
        prepared(trained, tmp_path / "mine", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CapiError, match="is a file"):
        prepared(trained, tmp_path / "file")


def test__a_failure_leaves_the_old_folder_and_nothing_else(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    before = prepared(run, out)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("capi.api.share.as_markdown", full)
    with pytest.raises(CapiError, match=r"cannot be written \(No space left on device\)"):
        prepared(run, out, overwrite=True)
    assert (out / "README.md").read_text() == before
    assert {path.name for path in tmp_path.iterdir()} == {"out", "run"}


def test__a_run_without_a_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CapiError, match="holds no checkpoint yet"):
        prepared(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
