"""Targets, masks and predictors from outside the package: the page "Write your own target", word for word."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import capi
from capi.config.files import load_config
from capi.errors import CapiError
from capi.method.masking import MASKS, PatchGrid
from capi.method.registry import TARGETS, register_target
from capi.models.predictor import PREDICTORS
from capi.runtime.randomness import sample_keys
from capi.train.build import build_learner, mask_sampler
from capi.zoo.build import recorded_target, target_facts
from capi.zoo.checkpoint_files import CheckpointFolder, StoredTensors
from tests.cli.conftest import RunHere, assert_refused
from tests.cli.conftest import run_here as run_here  # noqa: PLC0414 - a fixture

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "own-target.md"
NAMED = ["target.kind=pca_target.py:PcaTarget", "target.options.components=4"]
STEPS = 6
SMALL = [
    *("data.image_size=16", "data.workers=0", "model.width=32", "model.depth=1", "model.heads=1", "model.patch_size=4"),
    *("masking.predict=2", "optimization.batch_size=4", "run.loggers=[]", "run.snapshots=0", "run.log_steps=1"),
    *(f"optimization.steps={STEPS}", "checkpoint.every_steps=2", "checkpoint.asynchronous=false"),
]
MASK = '''
def stripes(grid, count, keys, *, first=0):
    """As many patches from some place on, in the order of rows."""
    places = (torch.arange(grid.rows * grid.columns) - first) % (grid.rows * grid.columns)
    return (places < count).expand(len(keys), -1)
'''
PREDICTOR = '''
from capi.models.predictor import CrossPredictor

class Scaled(CrossPredictor):
    """Cross-attention, and its predictions times a number."""

    def __init__(self, *, scale=1.0, **shape):
        super().__init__(**shape)
        self.scale = scale

    def predict(self, encoded, predict_index):
        return self.scale * super().predict(encoded, predict_index)

    def pool(self, encoder, encoded):
        return self.scale * super().pool(encoder, encoded)
'''


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the checkout, with the page's file and some photos in classes."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(example.splitlines()) < 60
    (tmp_path / "pca_target.py").write_text(example)
    (tmp_path / "own_mask.py").write_text(f"import torch\n{MASK}")
    (tmp_path / "own_predictor.py").write_text(PREDICTOR)
    generator = np.random.default_rng(0)
    for number in range(8):
        place = tmp_path / "photos" / ("train", "val")[number % 2] / "ab"[number // 4] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(place)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    for table in (TARGETS, MASKS, PREDICTORS):
        for name in table:
            monkeypatch.setitem(table, name, table[name])
    monkeypatch.setattr(sys, "path", [*sys.path])


def words(out: str, *more: str) -> list[str]:
    return ["pretrain", "tiny4", *SMALL, *NAMED, *more, "--data", "photos", "--out", out, "--device", "cpu"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    folder = CheckpointFolder(run / "checkpoints")
    stored = StoredTensors(folder.path(folder.steps()[-1]))
    return stored.take(stored.weightless)


def test__the_target_of_the_page_is_trained_resumed_and_judged(run_here: RunHere, work: Path) -> None:
    assert run_here(*words("run")).code == 0
    record = json.loads((work / "run" / "run.json").read_text())
    assert record["loss"] == {"name": "Huber loss", "unit": "standard deviations"}
    assert record["target"]["outputs"] == 4
    assert record["target"]["description"] == "the principal components of the features"
    assert record["code"]["target.kind"]["file"] == str(work / "pca_target.py")
    assert weights(work / "run")["student.head.weight"].shape == (4, 32)
    assert not torch.equal(weights(work / "run")["target.product"], torch.eye(32))
    planned = run_here("plan", "tiny4", *SMALL, *NAMED, "--gpu", "a100-80g", "--json")
    assert planned.code == 0, planned.stderr
    assert {"name": "targets", "bytes": 4 * 4 * 2 * 4, "phase": "student"} in json.loads(planned.stdout)["memory"][
        "parts"
    ]
    # To look at the run nothing of the target is needed.
    (work / "pca_target.py").rename(work / "kept.py")
    judged = run_here("evaluate", "run", "folder/knn", "data=photos", "--device", "cpu", "--out", "scores")
    assert judged.code == 0, judged.stderr
    assert run_here("report", "run", "--device", "cpu").code == 0
    assert "Huber loss between predictions and targets, in standard deviations." in (
        work / "run" / "report.html"
    ).read_text(encoding="utf-8")
    assert run_here("doctor", "run").code in {0, 1}
    pushed = run_here("push", "run", "ana/pca", "--licence", "mit", "--dry-run", "--out", "card")
    assert pushed.code == 0, pushed.stderr
    # To train it is, and somebody must say so.
    (work / "kept.py").rename(work / "pca_target.py")
    again = ["pretrain", "run/config.yaml", "--data", "photos", "--out", "run", "--device", "cpu", "--resume"]
    assert_refused(run_here(*again), "the config names Python code in pca_target.py: look at it, then add --trust")
    assert run_here(*again, "--trust", "pca_target.py").code == 0
    with (work / "pca_target.py").open("a") as file:
        file.write("# Another file.\n")
    # The command that the run was started with, repeated by a scheduler, says nothing of the file as it is now.
    repeated = run_here(*words("run", "--resume"))
    assert_refused(
        repeated, "has changed since the run was started, and may compute something else: restore it, or look"
    )
    said = run_here(*again, "--trust", "pca_target.py")
    assert said.code == 0
    # A terminal breaks lines.
    assert "has changed since the run was started" in " ".join(said.stderr.split())


@pytest.mark.thorough
def test__a_run_that_is_killed_ends_like_one_that_is_not(work: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(PAGE.parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "capi", *words("killed")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 200
        while not CheckpointFolder(work / "killed" / "checkpoints").steps() and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    subprocess.run([*command, "--resume"], env=environment, check=True)
    subprocess.run([sys.executable, "-m", "capi", *words("whole")], env=environment, check=True)
    ours, theirs = weights(work / "killed"), weights(work / "whole")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target.kind=clusterin"], 'target.kind=clusterin is none of clustering, .*; did you mean "clustering"'),
        (["masking.kind=inverse_blok"], 'masking.kind=inverse_blok is none of .*; did you mean "inverse_block"'),
        (["model.predictor.kind=cros"], 'model.predictor.kind=cros is none of .*; did you mean "cross"'),
        (["model.positions=axal"], 'model.positions=axal is none of axial, released, learned; did you mean "axial"'),
        (["model.head=mpl"], 'model.head=mpl is none of linear, mlp; did you mean "mlp"'),
        (["target.options.components=4"], "target.options.components is no option of clustering, it takes none"),
        (["masking.options.count=4"], "masking.options.count is no option of inverse_block, it takes none"),
        (["model.predictor.options.width=4"], "model.predictor.options.width is no option of cross, it takes none"),
        (
            ["model.predictor.kind=fused", "model.predictor.depth=3"],
            "model.predictor.depth has no meaning with .*fused",
        ),
        (["model.predictor.mask_tokens=masked"], "mask_tokens has no meaning with model.predictor.kind=cross"),
        (["target.kind=pixels", "clustering.queue=0", "clustering.bias=false"], "clustering.bias has no meaning with"),
        (["target.kind=pixels", "optimization.student_temperature=1"], "student_temperature has no meaning with"),
        (["target.ema_head.balance=sinkhorn"], "target.ema_head.balance has no meaning with target.kind=clustering"),
        (["target.kind=features", "model.head=mlp"], "model.head=mlp leads to prototypes, which target.kind=features"),
        (["target.kind=ema_head", "model.predictor.width=64"], "make them equal"),
        (["target.kind=nowhere.py:Mine"], "there is no file nowhere.py"),
        (["target.kind=pca_target.py:Pca"], "target.kind=pca_target.py:Pca: there is no Pca in that file"),
        (["masking.kind=own_mask.py:torch"], "masking.kind=own_mask.py:torch must be a function"),
        (
            [NAMED[0], "target.options.componets=4"],
            'it takes components, momentum; did you mean "components"',
        ),
    ],
)
def test__what_is_no_component_or_option_is_refused_with_the_nearest_name(
    work: Path, overrides: list[str], message: str
) -> None:
    config = load_config("tiny4", [*SMALL, *overrides])
    build = mask_sampler if overrides[0].startswith("masking") else build_learner
    with capi.trusting(overrides=overrides), pytest.raises(CapiError, match=message):
        build(config)


def test__a_mask_of_a_file_is_found_by_workers_that_are_spawned(work: Path) -> None:
    overrides = ["masking.kind=own_mask.py:stripes", "masking.options.first=3", "masking.roll=false"]
    with capi.trusting(overrides=overrides):
        sampler = mask_sampler(load_config("tiny4", [*SMALL, *overrides, "masking.ratio=0.5"]))
    keys = sample_keys(0, 0, torch.arange(2))
    visible, _ = sampler(PatchGrid(4, 4), keys)
    assert visible[0].tolist() == [0, 1, 2, 11, 12, 13, 14, 15]
    with multiprocessing.get_context("spawn").Pool(1) as workers:
        there, _ = workers.apply(sampler, (PatchGrid(4, 4), keys))
    assert torch.equal(there, visible)


def test__a_target_that_says_nothing_of_what_is_predicted_is_refused_before_a_run(
    run_here: RunHere, work: Path
) -> None:
    code = (work / "pca_target.py").read_text()
    (work / "pca_target.py").write_text(code.replace("def make(", "def mke(").replace("def forward(", "def forwards("))
    assert_refused(run_here(*words("run")), "PcaTarget has neither make(rows) nor forward: write one of them")
    assert not (work / "run").exists()


def test__a_target_whose_outputs_are_not_its_targets_is_refused(run_here: RunHere, work: Path) -> None:
    code = (work / "pca_target.py").read_text()
    (work / "pca_target.py").write_text(code.replace("def outputs(", "def other_outputs("))
    said = run_here(*words("run"))
    assert said.code == 2
    assert "PcaTarget makes targets of 4 values for a patch, but the student gives 32" in " ".join(said.stderr.split())


def test__a_predictor_of_a_file_is_loaded_where_the_file_is_named_again(run_here: RunHere, work: Path) -> None:
    overrides = ["model.predictor.kind=own_predictor.py:Scaled", "model.predictor.options.scale=3.0"]
    capi.pretrain("tiny4", [*SMALL, *overrides, "optimization.steps=1"], data="photos", out="run", device="cpu")
    with pytest.raises(CapiError, match=r"names Python code in own_predictor\.py: look at it, then add `trust`"):
        capi.load("run")
    pushing = ["push", "run", "ana/own", "--licence", "mit", "--dry-run", "--out", "card"]
    assert_refused(run_here(*pushing), "names Python code in own_predictor.py: look at it, then add --trust")
    assert_refused(run_here(*pushing, "--trust", "own_predictor.py"), "which alone can be described without its code")
    (work / "elsewhere").mkdir()
    (work / "own_predictor.py").rename(work / "elsewhere" / "own_predictor.py")
    encoder = capi.load("run", trust="elsewhere/own_predictor.py")
    images = torch.randn(2, 3, 16, 16)
    pooled = encoder(images).pooled
    encoder.predictor.scale = 1.0
    assert torch.allclose(pooled, 3 * encoder(images).pooled)


def test__classes_are_registered_under_names_of_their_own(work: Path) -> None:
    with capi.trusting(overrides=NAMED):
        build_learner(load_config("tiny4", [*SMALL, *NAMED]))
    register_target("pca", TARGETS[NAMED[0].partition("=")[2]])
    learner = build_learner(load_config("tiny4", [*SMALL, "target.kind=pca"]))
    assert type(learner.target).__name__ == "PcaTarget"
    with pytest.raises(CapiError, match=r"target\.kind=pixels comes with capi: choose another name"):
        capi.register_target("pixels", TARGETS["pca"])
    capi.register_mask("all_at_once", MASKS["random"])
    assert mask_sampler(load_config("tiny4", [*SMALL, "masking.kind=all_at_once"])).kind == "all_at_once"


@pytest.mark.parametrize(
    "noted", [None, 7, {"outputs": "x"}, {"outputs": -3}, {"outputs": 2**60}, {"description": "a" * 1000}]
)
def test__what_no_target_says_of_itself_is_not_read(noted: object) -> None:
    config = load_config("tiny4", SMALL)
    assert recorded_target({"target": noted}, config) == target_facts(config)
    assert recorded_target({"target": {"advice": {"x": ["\x1b[2J", ""]}}}, config) == target_facts(config)
    assert (
        recorded_target({"target": {"description": "the weather", "outputs": 3}}, config).description == "the weather"
    )
