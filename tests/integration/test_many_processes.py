"""Real processes: any number of them is the same run, also when one of them is stopped, killed or has a full disk."""

import json
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from capi.errors import PREEMPTED
from capi.train.checkpoint import Checkpoints
from capi.zoo.checkpoint_files import StoredTensors
from capi.zoo.run_folder import WALL_CLOCK, read_metrics
from tests.integration import many_driver
from tests.integration.launched import ended, start, succeeded
from tests.photos import noise_photos

DRIVER = Path(__file__).with_name("many_driver.py")
OF_ONE = ("plain", "queued", "muon", "skipped", "layered")
OF_TWO = (*OF_ONE, "accumulated")
OF_THREE = ("replicated", "resumed", "queue_resumed", "muon", "muon_resumed")
# What else is tried where there is time.
MORE_OF_ONE = ("plain", "ibot", "balanced", "features", "standard", "clipped", "stochastic", "lowered")
MORE_OF_TWO = (*MORE_OF_ONE, "selective", "clipped_parts", "compiled")
MORE_OF_THREE = ("replicated", "clipped")
# A process that ends is noticed by the others within this time.
BOUND_SECONDS = 30.0


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small photos of noise, and one file that is no image."""
    folder = noise_photos(tmp_path_factory.mktemp("images"), 17, (24, 20), digits=2)
    (folder / "broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def runs(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs by one process, by two and by three; the third lot resumes a run of two processes."""
    out = tmp_path_factory.mktemp("runs")
    by_one_and_two(images, out, OF_ONE, OF_TWO)
    for folder in ("one", "three"):
        keep_until(out / "two" / "plain", out / folder / "resumed", step=2)
        keep_until(out / "two" / "queued", out / folder / "queue_resumed", step=2)
        keep_until(out / "two" / "muon", out / folder / "muon_resumed", step=2)
    three = start(3, "-m", "tests.integration.many_driver", str(images), str(out / "three"), *OF_THREE)
    for name in ("resumed", "queue_resumed", "muon_resumed"):
        many_driver.run(name, str(images), out / "one")
    succeeded(three)
    return out


@pytest.fixture(scope="module")
def more_runs(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("more_runs")
    by_one_and_two(images, out, MORE_OF_ONE, MORE_OF_TWO)
    succeeded(start(3, "-m", "tests.integration.many_driver", str(images), str(out / "three"), *MORE_OF_THREE))
    return out


def by_one_and_two(images: Path, out: Path, of_one: Sequence[str], of_two: Sequence[str]) -> None:
    two = start(2, "-m", "tests.integration.many_driver", str(images), str(out / "two"), *of_two)
    (out / "two").mkdir()
    for name in of_one:
        many_driver.run(name, str(images), out / "one")
    succeeded(two)


def keep_until(run: Path, copy: Path, step: int) -> None:
    """A copy of a run, as it was at a checkpoint."""
    shutil.copytree(run, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)


def state(run: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    checkpoints = Checkpoints(run / "checkpoints")
    path = checkpoints.path(step or checkpoints.steps()[-1])
    stored = StoredTensors(path)
    # Numbers of bfloat16 and whole ones are compared as the others.
    return {name: value.float() for name, value in stored.take(stored.weightless).items()}


def metrics(run: Path) -> list[dict[str, Any]]:
    records = read_metrics(run / "metrics.jsonl")
    # Those are of the images that the main process sees.
    local = ("position_share", "position_information", "effective_rank", *WALL_CLOCK)
    return [{key: value for key, value in record.items() if key not in local} for record in records]


@pytest.mark.parametrize(
    ("many", "single", "tolerance"),
    [
        ("two/plain", "one/plain", 1e-5),
        ("two/accumulated", "one/plain", 1e-5),
        ("two/queued", "one/queued", 1e-5),
        ("three/queue_resumed", "one/queued", 1e-5),
        ("one/queue_resumed", "one/queued", 1e-5),
        ("three/replicated", "one/plain", 1e-5),
        ("three/resumed", "one/plain", 1e-5),
        ("one/resumed", "one/plain", 1e-5),
        ("two/skipped", "one/skipped", 2e-5),
        ("two/muon", "one/muon", 1e-5),
        ("two/layered", "one/layered", 1e-5),
        ("three/muon", "one/muon", 1e-5),
        ("three/muon_resumed", "one/muon", 1e-5),
        ("one/muon_resumed", "one/muon", 1e-5),
    ],
)
def test__losses_and_weights_are_those_of_one_process(runs: Path, many: str, single: str, tolerance: float) -> None:
    assert_alike(runs, many, single, tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("many", "single"),
    [
        ("two/selective", "one/plain"),
        ("two/ibot", "one/ibot"),
        ("two/balanced", "one/balanced"),
        ("two/features", "one/features"),
        ("two/standard", "one/standard"),
        ("two/clipped", "one/clipped"),
        ("three/clipped", "one/clipped"),
        ("two/clipped_parts", "one/clipped"),
        ("two/compiled", "one/plain"),
    ],
)
def test__other_losses_and_weights_are_those_of_one_process(more_runs: Path, many: str, single: str) -> None:
    assert_alike(more_runs, many, single, 1e-5)


def assert_alike(runs: Path, many: str, single: str, tolerance: float) -> None:
    ours, theirs = state(runs / many), state(runs / single)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # Of a whole tensor: Adam divides by the size of a gradient, so that the smallest entries say nothing.
        # The queue is kept in bfloat16, where the last digit of a float may decide about the last of three.
        allowed = 1e-3 if name.endswith("queue.tokens") else tolerance
        assert (ours[name] - value).norm() <= allowed * value.norm(), name
    records, expected = metrics(runs / many), metrics(runs / single)
    assert [record["step"] for record in records] == [record["step"] for record in expected]
    for record, wanted in zip(records, expected, strict=True):
        # Lengths of millions of numbers are summed up in float32, in one order or another.
        rough = {key for key in wanted if key.endswith(("_gap", "_gradient"))}
        assert {key: record[key] for key in rough} == pytest.approx({key: wanted[key] for key in rough}, rel=1e-2)
        left = [{**single, **dict.fromkeys(rough, 0.0)} for single in (record, wanted)]
        assert left[0] == pytest.approx(left[1], rel=1e-4, abs=1e-5)
    assert {"teacher", "student", "tokens"} <= records[0].keys()


def test__the_runs_were_worth_comparing(runs: Path) -> None:
    first, last = state(runs / "one/plain", 2), state(runs / "one/plain")
    changed = [name for name in last if (first[name] - last[name]).norm() > 1e-3 * last[name].norm()]
    assert len(changed) > 0.8 * len(last)


@pytest.mark.thorough
def test__the_other_runs_were_worth_comparing(more_runs: Path) -> None:
    last, clipped = state(more_runs / "one/plain"), more_runs / "one/clipped"
    gradients = [record[key] for record in metrics(clipped) for key in record if key.endswith("_gradient")]
    assert min(gradients) > 0.01
    moment = "student_optimizer.encoder.registers.exp_avg"
    assert state(clipped)[moment].norm() < 0.5 * last[moment].norm()
    assert (state(more_runs / "one/standard")["clustering.prototypes"] - last["clustering.prototypes"]).norm() > 1e-2


def test__a_bad_batch_of_one_process_updates_nothing_in_any(runs: Path) -> None:
    for run in (runs / "two/skipped", runs / "one/skipped"):
        before, after = state(run, 2), state(run, 4)
        assert (
            after["student_optimizer.encoder.registers.step"] == before["student_optimizer.encoder.registers.step"] + 1
        )
        assert after["clustering.queue.seen"] == 3
        assert all(torch.isfinite(value).all() for value in after.values())
    replays = [
        sorted(path.name for path in (runs / name / "replay").iterdir()) for name in ("two/skipped", "one/skipped")
    ]
    assert replays[0] == ["step_00000002_process_0.safetensors", "step_00000002_process_1.safetensors"]
    assert replays[1] == ["step_00000002.safetensors"]
    # The batch of a step, made once more from its number: what the processes met is what one meets.
    parts, whole = [
        torch.cat([load_file(runs / name / "replay" / file)["predict_index.0"] for file in files])
        for name, files in zip(("two/skipped", "one/skipped"), replays, strict=True)
    ]
    assert torch.equal(parts, whole)


@pytest.mark.thorough
def test__with_stochastic_depth_and_in_bfloat16_many_processes_train_too(more_runs: Path) -> None:
    names = ("two/stochastic", "one/stochastic", "two/lowered", "one/lowered")
    losses = {
        name: [record["student_loss"] for record in metrics(more_runs / name) if "student_loss" in record]
        for name in names
    }
    assert losses["two/stochastic"] != pytest.approx(losses["one/stochastic"], rel=1e-5)
    for name in losses:
        assert losses[name][-1] < losses[name][0] - 0.05
    assert losses["two/lowered"] == pytest.approx(losses["one/lowered"], rel=0.02)


def test__every_process_says_why_a_run_cannot_begin(runs: Path) -> None:
    for world, folder in ((2, "two"), (3, "three")):
        for rank in range(world):
            message = json.loads((runs / folder / f"told-{world}-{rank}.json").read_text())
            assert f"batch_size = 11 cannot be shared equally by {world} processes" in message["undivided"]
            assert f"distributed.shards is 4, which does not divide the {world} processes" in message["shards"]
            assert not (runs / folder / "undivided").exists()
            assert not (runs / folder / "shards").exists()


def test__the_broken_image_of_any_process_is_known_and_starts_are_noted(runs: Path) -> None:
    checkpoints = Checkpoints(runs / "two/plain/checkpoints")
    assert list(checkpoints.position(6).broken) == ["broken.png"]
    starts = json.loads((runs / "three/resumed/run.json").read_text())["starts"]
    assert [(start["step"], start["processes"]) for start in starts] == [(0, 2), (2, 3)]


def pretrain(images: Path, out: Path, *overrides: str) -> list[str]:
    steps = ["optimization.steps=100000", "checkpoint.every_steps=100000", *overrides]
    return ["-m", "capi", "pretrain", "tiny4", "--data", str(images), "--out", str(out), *many_driver.BASE, *steps]


def wait_for_steps(run: Path, steps: int = 3) -> None:
    start_time = time.monotonic()
    while len(read_metrics(run / "metrics.jsonl")) < steps:
        assert time.monotonic() - start_time < 200
        time.sleep(0.1)


@pytest.mark.long
def test__a_signal_to_any_process_saves_one_step_of_all(images: Path, tmp_path: Path) -> None:
    processes = start(2, *pretrain(images, tmp_path / "run"))
    wait_for_steps(tmp_path / "run")
    processes[1].send_signal(signal.SIGUSR1)
    results = ended(processes)
    assert [code for code, _, _ in results] == [PREEMPTED] * 2, results
    (step,) = Checkpoints(tmp_path / "run/checkpoints").steps()
    assert f"Stopped at step {step}, saved" in results[0][1]
    assert "Stopped" not in results[1][1]
    assert state(tmp_path / "run")


@pytest.mark.long
def test__a_killed_process_ends_the_others_within_the_bound(images: Path, tmp_path: Path) -> None:
    processes = start(3, *pretrain(images, tmp_path / "run", "checkpoint.every_steps=2"))
    wait_for_steps(tmp_path / "run")
    processes[2].kill()
    start_time = time.monotonic()
    results = ended(processes)
    assert time.monotonic() - start_time < BOUND_SECONDS
    assert results[2][0] == -signal.SIGKILL
    for code, _, errors in results[:2]:
        assert code == 2
        assert "another process of the run has ended" in errors
        assert "Traceback" not in errors
    assert state(tmp_path / "run")


@pytest.mark.thorough
def test__a_full_disk_in_one_process_ends_all_with_one_sentence(images: Path, tmp_path: Path) -> None:
    """Files of the second process may grow to some bytes only, from the second checkpoint on."""
    command = ["-m", "tests.integration.full_disk", *pretrain(images, tmp_path / "run", "checkpoint.every_steps=2")[2:]]
    results = ended(start(2, *command))
    assert [code for code, _, _ in results] == [2, 2], results
    assert "the checkpoint of step 4 could not be saved" in results[0][2]
    assert "File too large" in results[0][2]
    assert "the checkpoint of step 2 is whole" in results[0][2]
    assert results[1][2].count("Error") == 0
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [2]
    assert state(tmp_path / "run")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("seed", "0", "1"),
        ("run.compile", "off", "auto"),
        ("clustering.precision", "float32", "bfloat16"),
        ("clustering.chunk_mib", "64", "128"),
    ],
)
def test__other_configs_are_reported_once_before_the_first_step(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, first: str, second: str
) -> None:
    monkeypatch.setenv("OTHER", f"{key}={first},{key}={second}")
    results = ended(start(2, "-m", "tests.integration.other_config", *pretrain(images, tmp_path / "run")[2:]))
    assert [code for code, _, _ in results] == [2, 2], results
    name = key.rpartition(".")[2]
    sentence = f"process 1 was started with another config than process 0 ('{name}: {second}', not '{name}: {first}')"
    # YAML quotes `off`, which would be a boolean.
    assert sentence in " ".join(results[0][2].split()).replace("\"compile: 'off'\"", "'compile: off'")
    assert "Error" not in results[1][2]
    assert not (tmp_path / "run").exists()


def test__each_matrix_is_put_together_once_on_meshes_of_replicas_and_shards() -> None:
    succeeded(start(4, "-m", "tests.integration.matrices_driver"))
