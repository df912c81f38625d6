"""Checkpoints: complete or absent."""

import json
import resource
from pathlib import Path

import pytest
import torch

from capi.config.schema import Config
from capi.errors import CapiError
from capi.train import checkpoint
from capi.train.build import build_learner
from capi.train.checkpoint import CheckpointError, Checkpoints, Position, tensors
from capi.train.step import Learner


def test__everything_that_training_changes_comes_back(learner: Learner, checkpoints: Checkpoints) -> None:
    torch.manual_seed(1)
    for value in tensors(learner).values():
        value.data.copy_(torch.randn_like(value))
    before = {name: value.clone() for name, value in tensors(learner).items()}
    saved = Position(step=7, data_offset=3, skipped=1, rollbacks=2, broken={"a.jpg": "truncated"})
    checkpoints.save(learner, saved)
    for value in tensors(learner).values():
        value.data.zero_()
    assert checkpoints.load(learner) == saved
    assert all(torch.equal(value, before[name]) for name, value in tensors(learner).items())
    assert learner.student_optimizer.state[learner.student.encoder.registers]["exp_avg"].abs().sum() > 0


def test__every_parameter_of_both_optimizers_is_held(learner: Learner) -> None:
    names = tensors(learner).keys()
    for prefix, module in (("student", learner.student), ("clustering", learner.target)):
        for name, _ in module.named_parameters():
            assert {f"{prefix}_optimizer.{name}.{part}" for part in ("step", "exp_avg", "exp_avg_sq")} <= names
            assert f"{prefix}.{name}" in names
    assert sum(name.startswith("teacher.average.") for name in names) == len(learner.student.state_dict())


def test__the_newest_are_kept_and_milestones_for_good(learner: Learner, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, milestone_steps=4)
    for step in range(1, 10):
        checkpoints.save(learner, Position(step=step))
    assert checkpoints.steps() == [4, 8, 9]


def test__a_disk_that_is_full_leaves_the_previous_checkpoint(learner: Learner, checkpoints: Checkpoints) -> None:
    checkpoints.save(learner, Position(step=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(CapiError, match=r"step 2 could not be saved .*File too large.*step 1 is whole"):
            checkpoints.save(learner, Position(step=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoints.steps() == [1]
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_00000001"]
    assert checkpoints.load(learner).step == 1


def test__what_an_interrupted_save_left_is_no_checkpoint(learner: Learner, checkpoints: Checkpoints) -> None:
    checkpoints.save(learner, Position(step=1))
    (checkpoints.folder / ".partial-2").mkdir()
    (checkpoints.folder / ".partial-2" / "process_00000.safetensors").write_bytes(b"half")
    assert checkpoints.steps() == [1]
    checkpoints.remove_partial()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step_00000001"]


def test__a_newer_format_and_missing_checkpoints_are_refused(learner: Learner, checkpoints: Checkpoints) -> None:
    with pytest.raises(CapiError, match="no complete checkpoint"):
        checkpoints.load(learner)
    checkpoints.save(learner, Position(step=1))
    with pytest.raises(CapiError, match="no checkpoint of step 5, but of 1"):
        checkpoints.load(learner, 5)
    state = checkpoints.path(1) / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 99}))
    with pytest.raises(CapiError, match="install a newer capi"):
        checkpoints.load(learner)


def save_without_recent_use(learner: Learner, checkpoints: Checkpoints, version: int) -> None:
    """Write a checkpoint as format 1 did."""

    def without(learner: Learner) -> dict[str, torch.Tensor]:
        return {name: value for name, value in tensors(learner).items() if name != "clustering.recent_use"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "tensors", without)
        checkpoints.save(learner, Position(step=3, skipped=1))
    state = checkpoints.path(3) / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": version}))


def test__a_checkpoint_of_format_1_is_read_and_its_prototypes_use_is_unknown(
    learner: Learner, checkpoints: Checkpoints, small_config: Config
) -> None:
    with torch.no_grad():
        learner.target.prototypes.fill_(2.5)
    save_without_recent_use(learner, checkpoints, version=1)
    other = build_learner(small_config)
    assert checkpoints.load(other) == Position(step=3, skipped=1)
    assert (other.target.prototypes == 2.5).all()
    assert (other.target.recent_use == 0).all()


def test__a_checkpoint_of_format_2_must_hold_the_use_of_prototypes(
    learner: Learner, checkpoints: Checkpoints, small_config: Config
) -> None:
    save_without_recent_use(learner, checkpoints, version=2)
    with pytest.raises(CapiError, match=r'lacks "clustering\.recent_use"'):
        checkpoints.load(build_learner(small_config))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{}",
        '{"format": null}',
        '{"format": "two"}',
        '{"format": 3}',
        '{"format": 3, "step": 2}',
        '{"format": 3, "step": 1, "skipped": null}',
        '{"format": 3, "step": 1, "broken": {"a.png": []}}',
        '{"files": [1], "format": 3, "step": "1"}',
        "[" * 100_000,
    ],
)
def test__a_damaged_state_is_reported(learner: Learner, checkpoints: Checkpoints, text: str) -> None:
    checkpoints.save(learner, Position(step=1))
    (checkpoints.path(1) / "state.json").write_text(text)
    with pytest.raises(CapiError, match="is damaged"):
        checkpoints.load(learner)


@pytest.mark.parametrize("damage", ["cut off", "missing"])
def test__a_checkpoint_that_lost_something_is_passed_over(
    learner: Learner, checkpoints: Checkpoints, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        checkpoints.save(learner, Position(step=step))
    (data,) = checkpoints.path(2).glob("*.safetensors")
    if damage == "missing":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:-1])
    with caplog.at_level("WARNING", "capi"):
        assert checkpoints.load(learner).step == 1
        assert checkpoints.steps() == [1]
    assert caplog.text.count("step_00000002 is passed over") == 1
    # A run that goes on comes to that step again, and its checkpoint takes the place of the damaged one.
    checkpoints.save(learner, Position(step=2))
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.load(learner).step == 2
    assert not list(checkpoints.folder.glob(".partial*"))


def test__in_the_background_the_state_of_the_step_is_saved(learner: Learner, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    before = {name: value.clone() for name, value in tensors(learner).items()}
    checkpoints.save(learner, Position(step=1))
    for value in tensors(learner).values():
        value.data.add_(1.0)
    checkpoints.finish()
    assert checkpoints.steps() == [1]
    checkpoints.load(learner)
    assert all(torch.equal(value, before[name]) for name, value in tensors(learner).items())


def poll_until_it_raises(checkpoints: Checkpoints) -> None:
    while True:
        checkpoints.poll()


def test__what_fails_in_the_background_is_reported_when_it_is_looked_for(learner: Learner, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    checkpoints.save(learner, Position(step=1))
    checkpoints.finish()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        checkpoints.save(learner, Position(step=2))
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved .*File too large.*step 1 is whole"):
            poll_until_it_raises(checkpoints)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    checkpoints.poll()
    checkpoints.finish()
