"""A whole run from a folder of images: what it writes, and what it refuses before it writes anything."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import capi
from capi.config.files import dump_config, load_config, parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.runtime.yaml_documents import parse_yaml
from capi.train.health import RULES
from capi.train.loop import Loop
from capi.train.run import PretrainedRun
from capi.zoo.run_folder import WALL_CLOCK, read_metrics

DEVICE = "cpu"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "nested").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(10):
        pixels = generator.integers(0, 255, (36, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / ("nested" if number % 2 else ".") / f"{number}.png")
    return folder


@pytest.fixture
def config(small_config: Config) -> Config:
    tree = small_config.model_dump(mode="json")
    tree["optimization"] |= {"steps": 6, "learning_rate": 0.01}
    tree["data"] |= {"workers": 0}
    tree["run"] |= {"log_steps": 2, "loggers": []}
    return parse_config(tree)


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    tree = config.model_dump(mode="json")
    for name, values in sections.items():
        tree[name] |= values
    return parse_config(tree)


def test__a_run_leaves_all_that_is_promised(config: Config, images: Path, tmp_path: Path) -> None:
    records: list[Any] = []
    config = changed(config, run={"loggers": None})
    done = capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE, loggers=[records.append])
    run = tmp_path / "run"
    assert (done.path, done.step, done.finished) == (run, 6, True)
    assert parse_config(parse_yaml((run / "config.yaml").read_text(), "")) == config
    record = json.loads((run / "run.json").read_text())
    assert record["data"]["images"] == 10
    assert [start["step"] for start in record["starts"]] == [0]
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [2, 4, 6]
    assert [line["step"] for line in records] == [2, 4, 6]
    assert list((run / "tensorboard").glob("events*"))
    with Image.open(run / "pictures" / "curves.png") as curves:
        assert curves.width > 500
    assert isinstance(capi.load(run), capi.VisionEncoder)


def test__the_number_of_workers_changes_nothing(config: Config, images: Path, tmp_path: Path) -> None:
    results = []
    for workers in (0, 2):
        out = tmp_path / str(workers)
        capi.pretrain(changed(config, data={"workers": workers}), data=images, out=out, device=DEVICE)
        lines = read_metrics(out / "metrics.jsonl")
        for line in lines:
            for name in WALL_CLOCK:
                line.pop(name, None)
        results.append((lines, capi.load(out, weights="student").state_dict()))
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name


def test__a_run_is_never_overwritten_by_accident(config: Config, images: Path, tmp_path: Path) -> None:
    capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(CapiError, match="`resume=True` continues it, `overwrite=True` starts again"):
        capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    # A finished run that is resumed stays as it is.
    assert capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE, resume=True).finished
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    other = config.model_copy(update={"seed": 3})
    capi.pretrain(other, data=images, out=tmp_path / "run", device=DEVICE, overwrite=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() != before


def test__a_run_that_was_stopped_before_its_first_step_does_not_block_its_folder(
    config: Config, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE)
    other = config.model_copy(update={"seed": 3})
    assert capi.pretrain(other, data=images, out=tmp_path / "run", device=DEVICE).finished
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seed"] == 3
    with pytest.raises(CapiError, match="`resume=True` continues it"):
        capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE)


@pytest.mark.parametrize(("batch", "warned"), [(10, False), (16, True)])
def test__a_batch_of_more_images_than_there_are_is_warned_of(
    config: Config, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, batch: int, warned: bool
) -> None:
    config = changed(config, optimization={"batch_size": batch, "steps": 1})
    with caplog.at_level(logging.WARNING, logger="capi"):
        capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE)
    said = "batch_size = 16 is more than the 10 images of this data" in caplog.text
    assert said == warned
    assert ("optimization.batch_size=8 or less" in caplog.text) == warned


def test__epochs_count_the_images_that_there_are_and_a_resumed_run_knows_them(
    config: Config, images: Path, tmp_path: Path
) -> None:
    config = changed(config, optimization={"batch_size": 4, "epochs": 2})
    assert capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE).step == 5
    assert capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE, resume=True).step == 5


def test__another_config_is_refused_with_the_difference(config: Config, images: Path, tmp_path: Path) -> None:
    capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE)
    other = changed(config, optimization={"learning_rate": 0.02}, model={"depth": 3})
    with pytest.raises(CapiError, match=r"model\.depth was 2, is 3; optimization\.learning_rate was 0\.01, is 0\.02"):
        capi.pretrain(other, data=images, out=tmp_path / "run", device=DEVICE, resume=True)
    harmless = changed(config, data={"cache_mib": 3}, checkpoint={"keep": 5})
    assert capi.pretrain(harmless, data=images, out=tmp_path / "run", device=DEVICE, resume=True).finished


def extended(config: Config, steps: int, images: Path, out: Path) -> PretrainedRun:
    config = changed(config, optimization={"steps": steps})
    return capi.pretrain(config, data=images, out=out, device=DEVICE, resume=True, extend=True)


def test__a_finished_run_is_extended_at_its_last_rate_and_marked(config: Config, images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = changed(config, run={"log_steps": 1})
    capi.pretrain(config, data=images, out=run, device=DEVICE)
    longer = changed(config, optimization={"steps": 10})
    with pytest.raises(CapiError, match=r"with optimization\.steps=6, not 10: give that .*, or `extend=True` to train"):
        capi.pretrain(longer, data=images, out=run, device=DEVICE, resume=True)
    shorter = changed(config, optimization={"steps": 4})
    with pytest.raises(CapiError, match=r"with optimization\.steps=6, not 4: give that to resume it$"):
        capi.pretrain(shorter, data=images, out=run, device=DEVICE, resume=True)
    assert extended(config, 10, images, run).step == 10
    rates = [line["learning_rate"] for line in read_metrics(run / "metrics.jsonl")]
    assert len(rates) == 10
    assert rates[6:] == [rates[5]] * 4
    assert [each["from_steps"] for each in json.loads((run / "run.json").read_text())["extensions"]] == [6]
    # The same command continues it, with --extend or without.
    assert extended(config, 10, images, run).step == 10
    assert capi.pretrain(longer, data=images, out=run, device=DEVICE, resume=True).step == 10
    assert "Extended" in capi.report(run).read_text()


def test__a_run_that_is_extended_twice_is_that_which_is_extended_once(
    config: Config, images: Path, tmp_path: Path
) -> None:
    for out, legs in (("once", (10,)), ("twice", (8, 10))):
        capi.pretrain(config, data=images, out=tmp_path / out, device=DEVICE)
        for steps in legs:
            extended(config, steps, images, tmp_path / out)
    once, twice = (capi.load(tmp_path / out).state_dict() for out in ("once", "twice"))
    assert all(torch.equal(value, twice[name]) for name, value in once.items())


def test__what_cannot_be_extended_is_reported(config: Config, images: Path, tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="holds none: give `resume=True`"):
        extended(config, 10, images, tmp_path / "none")
    capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE)
    with pytest.raises(CapiError, match="`extend=True` adds steps to the 6 of"):
        extended(config, 4, images, tmp_path / "run")
    ended = changed(config, optimization={"cosine_kept": 1.0, "steps": 40})
    capi.pretrain(changed(ended, optimization={"steps": 40}), data=images, out=tmp_path / "low", device=DEVICE)
    with pytest.raises(CapiError, match="of its peak learning rate, where more steps learn nothing"):
        extended(ended, 50, images, tmp_path / "low")


class Scores:
    """An evaluation whose scores are known beforehand."""

    every_steps = 1

    def run(self, learner: Any, step: int) -> dict[str, float]:
        return {"own/teacher": {2: 0.5, 3: 0.9, 5: 0.7}.get(step, 0.1)}


def test__the_best_checkpoint_is_kept_beside_the_newest(config: Config, images: Path, tmp_path: Path) -> None:
    config = changed(config, checkpoint={"best": "own/teacher", "keep": 1})
    short = changed(config, optimization={"steps": 4})
    for each, out, options in (
        (config, "run", {}),
        # A later start knows the best score of an earlier one.
        (short, "legs", {}),
        (config, "legs", {"resume": True, "extend": True}),
    ):
        capi.pretrain(each, data=images, out=tmp_path / out, device=DEVICE, evaluations=[Scores()], **options)
    for out in ("run", "legs"):
        checkpoints = tmp_path / out / "checkpoints"
        assert (checkpoints / "best").resolve().name == "step_00000003"
        assert sorted(path.name for path in checkpoints.glob("step_*")) == ["step_00000003", "step_00000006"]
    best, third, last = (
        next(iter(capi.load(tmp_path / "run" / place).state_dict().values()))
        for place in ("checkpoints/best", "checkpoints/step_00000003", ".")
    )
    assert torch.equal(best, third)
    assert not torch.equal(best, last)
    with pytest.raises(CapiError, match=r'checkpoint\.best = "own/techer" is no score .* did you mean "own/teacher"'):
        capi.pretrain(
            changed(config, checkpoint={"best": "own/techer"}),
            data=images,
            out=tmp_path / "misspelt",
            device=DEVICE,
            evaluations=[Scores()],
        )


def test__other_images_are_refused(config: Config, images: Path, tmp_path: Path) -> None:
    capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE)
    (images / "0.png").rename(images / "zero.png")
    with pytest.raises(CapiError, match="a run resumes with the same images"):
        capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE, resume=True)


def test__auto_statistics_are_written_down_and_kept(config: Config, images: Path, tmp_path: Path) -> None:
    auto = changed(config, data={"mean": "auto", "std": "auto"})
    capi.pretrain(auto, data=images, out=tmp_path / "run", device=DEVICE)
    written = parse_config(parse_yaml((tmp_path / "run" / "config.yaml").read_text(), ""))
    assert written.data.mean == pytest.approx([0.5] * 3, abs=0.02)
    assert capi.pretrain(auto, data=images, out=tmp_path / "run", device=DEVICE, resume=True).finished


def test__resuming_what_does_not_exist_starts_it(config: Config, images: Path, tmp_path: Path) -> None:
    assert capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE, resume=True).finished


@pytest.mark.parametrize(
    ("data", "message"),
    [("nowhere", "there is no folder"), ("file", "is a file"), ("empty", "holds no images")],
)
def test__bad_data_leaves_nothing_behind(config: Config, tmp_path: Path, data: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CapiError, match=message):
        capi.pretrain(config, data=tmp_path / data, out=tmp_path / "run", device=DEVICE)
    assert not (tmp_path / "run").exists()


def test__too_many_broken_images_stop_the_run(config: Config, images: Path, tmp_path: Path) -> None:
    for number in range(10):
        (images / f"broken{number}.png").write_bytes(b"no image")
    with pytest.raises(CapiError, match=r"of 20 images cannot be read, more than data\.broken_limit = 0\.1"):
        capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE)


def test__an_evaluation_that_cannot_be_read_is_reported_before_anything_is_written(
    config: Config, images: Path, tmp_path: Path
) -> None:
    tree = config.model_dump(mode="json")
    tree["evaluations"] = [{"benchmark": "csv/knn", "options": {"data": str(tmp_path / "labels.csv")}}]
    with pytest.raises(CapiError, match=r"there is no file .*labels\.csv"):
        capi.pretrain(parse_config(tree), data=images, out=tmp_path / "run", device=DEVICE)
    assert not (tmp_path / "run").exists()


def test__evaluations_go_into_the_metrics(config: Config, images: Path, tmp_path: Path, class_folders: Path) -> None:
    options = {"data": str(class_folders), "neighbours": [1], "votes": ["majority"], "features": ["mean_patch"]}
    evaluation = {"benchmark": "folder/knn", "options": options, "every_steps": 4, "weights": ["teacher", "student"]}
    once = {"benchmark": "folder/knn", "options": options | {"neighbours": [3]}}
    tree = config.model_dump(mode="json") | {"evaluations": [evaluation, once]}
    capi.pretrain(parse_config(tree), data=images, out=tmp_path / "run", device=DEVICE)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for name, steps in (
        ("folder/knn/teacher", [0, 4, 6]),
        ("folder/knn/student", [0, 4, 6]),
        ("folder/knn-2/teacher", [0, 6]),
    ):
        scores = {line["step"]: line[name] for line in lines if name in line}
        assert list(scores) == steps
        assert all(0 <= score <= 1 for score in scores.values())
    assert capi.pretrain(parse_config(tree), data=images, out=tmp_path / "run", device=DEVICE, resume=True).finished


def test__evaluations_change_nothing_else(config: Config, images: Path, tmp_path: Path, class_folders: Path) -> None:
    options = {"data": str(class_folders), "iterations": 2}
    evaluation = {"benchmark": "folder/linear", "options": options, "every_steps": 1}
    tree = config.model_dump(mode="json")
    for name, evaluations in (("with", [evaluation]), ("without", [])):
        chosen = parse_config(tree | {"evaluations": evaluations})
        capi.pretrain(chosen, data=images, out=tmp_path / name, device=DEVICE)
    states = [capi.load(tmp_path / name, weights="student").state_dict() for name in ("with", "without")]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def as_version_1(run: Path, evaluation: dict[str, Any]) -> None:
    """Write a run's config as version 1 did."""
    tree = parse_yaml((run / "config.yaml").read_text(), "")
    tree |= {"version": 1, "evaluations": [evaluation]}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))


def test__a_run_of_config_version_1_is_loaded_and_continues(
    config: Config, images: Path, tmp_path: Path, class_folders: Path
) -> None:
    evaluation = {"data": str(class_folders), "every_steps": 2, "neighbours": 3, "split": "val"}
    short = changed(config, checkpoint={"every_steps": 3})
    run, whole = tmp_path / "run", tmp_path / "whole"
    for out in (run, whole):
        capi.pretrain(short, data=images, out=out, device=DEVICE)
    # As it lay there when it was interrupted half-way.
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    as_version_1(run, evaluation)
    loaded = capi.load(run)
    assert isinstance(loaded, capi.VisionEncoder)
    assert isinstance(capi.load(capi.export(run, tmp_path / "encoder.safetensors")), capi.VisionEncoder)
    old = parse_config(short.model_dump(mode="json") | {"version": 1, "evaluations": [evaluation]})
    done = capi.pretrain(old, data=images, out=run, device=DEVICE, resume=True)
    assert (done.step, done.finished) == (6, True)
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines if "folder/knn/teacher" in line] == [4, 6]
    states = [capi.load(path).state_dict() for path in (run, whole)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not torch.equal(loaded.encoder.registers, capi.load(run).encoder.registers)


def without_times(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if name not in WALL_CLOCK}
        for line in read_metrics(run / "metrics.jsonl")
    ]


def test__health_is_measured_and_continues_where_an_interrupted_run_left_it(
    config: Config, images: Path, tmp_path: Path
) -> None:
    short = changed(config, checkpoint={"every_steps": 3}, clustering={"prototypes": 100})
    run, whole = tmp_path / "run", tmp_path / "whole"
    for out in (run, whole):
        capi.pretrain(short, data=images, out=out, device=DEVICE)
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    capi.pretrain(short, data=images, out=run, device=DEVICE, resume=True)
    lines = without_times(run)
    assert lines == without_times(whole)
    # 288 patches a record: 100 prototypes are known from the second on, by what the first one saw.
    assert [line["prototype_perplexity"] is None for line in lines] == [True, False, False]
    assert {rule.key for rule in RULES} <= lines[0].keys()


def test__an_alarm_raised_before_an_interruption_is_not_raised_again(
    config: Config, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in images.rglob("*.png"):
        Image.new("RGB", (36, 30), (90, 90, 90)).save(path)
    short = changed(config, checkpoint={"every_steps": 3}, run={"log_steps": 1})
    capi.pretrain(short, data=images, out=tmp_path / "run", device=DEVICE)
    alarms = [message for message in caplog.messages if "Position in the features" in message]
    assert len(alarms) == 1
    assert alarms[0].startswith("step 3: ")
    assert "positional collapse" in alarms[0]
    shutil.rmtree(max((tmp_path / "run" / "checkpoints").iterdir()))
    capi.pretrain(short, data=images, out=tmp_path / "run", device=DEVICE, resume=True)
    assert [message for message in caplog.messages if "Position in the features" in message] == alarms


def test__recipes_by_name_take_overrides(images: Path, tmp_path: Path) -> None:
    small = ["model.depth=1", "model.width=16", "model.heads=1", "clustering.prototypes=8", "data.workers=0"]
    short = ["optimization.batch_size=2", "optimization.steps=1", "run.loggers=[]"]
    done = capi.pretrain("tiny4", [*small, *short], data=images, out=tmp_path / "run", device=DEVICE)
    assert done.finished
    assert load_config(tmp_path / "run" / "config.yaml").model.depth == 1


@pytest.mark.parametrize("what", ["images", "logger"])
def test__what_goes_wrong_at_the_start_leaves_the_old_run(
    config: Config, images: Path, tmp_path: Path, what: str
) -> None:
    capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE)
    if what == "images":
        for path in images.rglob("*.png"):
            path.write_bytes(b"no image")
    else:
        config = changed(config, run={"loggers": ["wandb"]})
    with pytest.raises(CapiError, match=r"could be read|capi\[wandb\]"):
        capi.pretrain(config, data=images, out=tmp_path / "run", device=DEVICE, overwrite=True)
    assert capi.load(tmp_path / "run")


@pytest.mark.thorough
def test__compiled_networks_learn_the_same(config: Config, images: Path, tmp_path: Path) -> None:
    """In processes of their own: torch's compiler warns, and should not see the checks of annotations."""
    losses = []
    for name, switch in (("plain", "off"), ("compiled", "on")):
        recipe = tmp_path / f"{name}.yaml"
        # Compiled code draws other random numbers, so nothing is dropped here.
        changes = {"run": {"compile": switch}, "model": {"stochastic_depth": 0.0}}
        recipe.write_text(dump_config(changed(config, **changes)))
        command = [sys.executable, "-m", "capi", "pretrain", str(recipe), "--data", str(images)]
        done = subprocess.run(
            [*command, "--out", str(tmp_path / name), "--device", DEVICE], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        losses.append([line["student_loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
