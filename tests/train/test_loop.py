"""The loop with a small learner and noise for images: what it logs, saves, and does when a loss is not finite."""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from capi.config.schema import Config
from capi.data.loader import LoadedBatch
from capi.data.reader import BrokenImages
from capi.errors import CapiError
from capi.method.masking import PatchGrid
from capi.runtime.randomness import sample_keys
from capi.train.build import build_learner, mask_sampler
from capi.train.checkpoint import Checkpoints, Position, tensors
from capi.train.health import RULES, RunFacts, Watchman
from capi.train.loop import Loop, LoopSettings
from capi.types import MaskedBatch

STEPS = 12


class Noise:
    """Batches by number; those in `bad` hold NaN. Notes which numbers were asked for."""

    def __init__(self, config: Config, bad: tuple[int, ...] = ()) -> None:
        self.config, self.bad = config, bad
        self.asked: list[int] = []

    def __call__(self, start: int, stop: int) -> Iterator[list[LoadedBatch]]:
        for number in range(start, stop):
            self.asked.append(number)
            size = self.config.optimization.batch_size
            keys = sample_keys(0, number, torch.arange(size))
            visible, predict = mask_sampler(self.config)(PatchGrid(*self.config.grid), keys)
            shape = (size, 3, *self.config.data.height_and_width)
            images = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            yield [LoadedBatch(images * (torch.nan if number in self.bad else 1), visible, predict, {})]


def make_loop(config: Config, folder: Path, batches: Any, **changes: Any) -> Loop:
    given = {"total_steps": STEPS, "batch_size": 6, "log_steps": 2, "save_steps": 4, "save_minutes": None}
    names = LoopSettings.__dataclass_fields__
    given |= {key: changes.pop(key) for key in list(changes) if key in names}
    return Loop(
        learner=build_learner(config),
        settings=LoopSettings(**given),
        position=Position(),
        batches=batches,
        to_device=lambda loaded: MaskedBatch(*loaded[:3]),
        checkpoints=Checkpoints(folder / "checkpoints", keep=3),
        broken=BrokenImages(100, 0.5),
        replay_folder=folder / "replay",
        **changes,
    )


class CountSteps:
    every_steps = 5

    def run(self, learner: Any, step: int) -> dict[str, float]:
        return {"size": float(learner.student.encoder.registers.detach().abs().sum())}


def test__logs_evaluates_and_saves_when_due(small_config: Config, tmp_path: Path) -> None:
    records: list[Any] = []
    loop = make_loop(small_config, tmp_path, Noise(small_config), loggers=[records.append], evaluations=[CountSteps()])
    assert loop.run()
    assert [record["step"] for record in records if "student_loss" in record] == [2, 4, 6, 8, 10, 12]
    assert [record["step"] for record in records if "size" in record] == [0, 5, 10, 12]
    assert loop.checkpoints.steps() == [4, 8, 12]
    first = next(record for record in records if "student_loss" in record)
    assert first["learning_rate"] == loop.learner.learning_rate(1)
    assert {"clustering_loss", "target_entropy", "prototype_use", "images_per_second", "seconds"} <= first.keys()


def test__minutes_also_make_it_save(small_config: Config, tmp_path: Path) -> None:
    loop = make_loop(small_config, tmp_path, Noise(small_config), save_steps=1000, save_minutes=1e-9, total_steps=3)
    loop.run()
    assert loop.checkpoints.steps() == [1, 2, 3]


def test__a_resumed_run_ends_with_the_same_weights(small_config: Config, tmp_path: Path) -> None:
    straight = make_loop(small_config, tmp_path / "straight", Noise(small_config))
    straight.run()
    first = make_loop(small_config, tmp_path / "parts", Noise(small_config))
    first.settings = replace(first.settings, total_steps=8)
    first.run()
    second = make_loop(small_config, tmp_path / "parts", Noise(small_config))
    torch.manual_seed(12345)
    second.position = second.checkpoints.load(second.learner)
    assert second.position.step == 8
    second.run()
    for name, value in tensors(straight.learner).items():
        assert torch.equal(value, tensors(second.learner)[name]), name


def test__stop_names_the_step_and_keeps_the_batch(small_config: Config, tmp_path: Path) -> None:
    loop = make_loop(small_config, tmp_path, Noise(small_config, bad=(5,)))
    with pytest.raises(CapiError, match=r"the loss of step 5 is not finite .*run\.non_finite to skip"):
        loop.run()
    batch_file = tmp_path / "replay" / "step_00000005.safetensors"
    with safe_open(batch_file, framework="pt") as file:
        assert file.metadata() == {"step": "5", "nearest_checkpoint": "4"}
        assert file.get_tensor("images.0").isnan().all()
        assert torch.equal(file.get_tensor("predict_index.0"), next(Noise(small_config)(5, 6))[0].predict_index)


def test__skip_passes_over_the_batch_and_gives_up_after_too_many(small_config: Config, tmp_path: Path) -> None:
    loop = make_loop(small_config, tmp_path / "a", Noise(small_config, bad=(5, 6)), non_finite="skip")
    assert loop.run()
    assert all(torch.isfinite(value).all() for value in tensors(loop.learner).values())
    # Two of the twelve steps did not happen to the optimiser.
    assert tensors(loop.learner)["student_optimizer.encoder.registers.step"] == STEPS - 2
    loop = make_loop(
        small_config, tmp_path / "b", Noise(small_config, bad=(5, 6, 7)), non_finite="skip", non_finite_limit=2
    )
    with pytest.raises(CapiError, match="after 2 others that were skipped"):
        loop.run()


def test__a_bad_batch_that_is_noticed_late_leaves_the_weights_it_met(small_config: Config, tmp_path: Path) -> None:
    loop = make_loop(small_config, tmp_path / "a", Noise(small_config, bad=(5, 8)), log_steps=12, save_steps=12)
    with pytest.raises(CapiError, match="the loss of step 5"):
        loop.run()
    assert loop.checkpoints.steps() == [5]
    expected = make_loop(small_config, tmp_path / "b", Noise(small_config), log_steps=12, total_steps=5)
    expected.run()
    for name, value in tensors(expected.learner).items():
        if name != "clustering.recent_use":
            assert torch.equal(tensors(loop.learner)[name], value), name


def test__a_run_that_skipped_too_many_may_skip_none_when_resumed(small_config: Config, tmp_path: Path) -> None:
    limits = {"non_finite": "skip", "non_finite_limit": 2, "log_steps": 12, "save_steps": 12}
    with pytest.raises(CapiError, match=r"the loss of step 7 .* after 2 others"):
        make_loop(small_config, tmp_path, Noise(small_config, bad=(5, 6, 7, 9)), **limits).run()
    again = make_loop(small_config, tmp_path, Noise(small_config, bad=(7,)), **limits)
    again.position = again.checkpoints.load(again.learner)
    assert (again.position.step, again.position.skipped) == (7, 2)
    with pytest.raises(CapiError, match=r"the loss of step 7 .* after 2 others"):
        again.run()
    good = make_loop(small_config, tmp_path, Noise(small_config, bad=(8, 9)), **limits)
    good.position = good.checkpoints.load(good.learner)
    good.run()
    # Of twelve steps 5 and 6 were skipped before, 8 and 9 now.
    assert tensors(good.learner)["student_optimizer.encoder.registers.step"] == STEPS - 4


def test__rollback_continues_from_the_checkpoint_with_other_data(small_config: Config, tmp_path: Path) -> None:
    noise, records = Noise(small_config, bad=(6,)), []
    loop = make_loop(small_config, tmp_path, noise, non_finite="rollback", loggers=[records.append])
    assert loop.run()
    assert (loop.position.rollbacks, loop.position.data_offset) == (1, 3)
    # Up to the next log, the bad batch once more to keep it, then from step 4 on with the data that follows it.
    assert noise.asked == [*range(8), 6, *range(7, 15)]
    assert tensors(loop.learner)["student_optimizer.encoder.registers.step"] == STEPS
    assert loop.checkpoints.position(12).data_offset == 3


def test__rollback_without_a_checkpoint_or_too_often_is_refused(small_config: Config, tmp_path: Path) -> None:
    loop = make_loop(small_config, tmp_path / "a", Noise(small_config, bad=(1,)), non_finite="rollback")
    with pytest.raises(CapiError, match="no checkpoint to go back to"):
        loop.run()
    bad = tuple(range(5, 100))
    loop = make_loop(
        small_config, tmp_path / "b", Noise(small_config, bad=bad), non_finite="rollback", non_finite_limit=3
    )
    with pytest.raises(CapiError, match="after 3 others"):
        loop.run()


def test__a_data_set_that_cannot_be_read_stops_the_run(small_config: Config, tmp_path: Path) -> None:
    def failing(_: int, __: int) -> Iterator[list[LoadedBatch]]:
        empty = torch.empty(0)
        yield [LoadedBatch(empty, empty.long(), empty.long(), {}, failure="21 images in a row could not be read")]

    with pytest.raises(CapiError, match="21 images in a row"):
        make_loop(small_config, tmp_path, failing).run()


def test__milestones_are_saved_and_kept_whatever_the_interval(small_config: Config, tmp_path: Path) -> None:
    loop = make_loop(small_config, tmp_path, Noise(small_config), save_steps=5)
    loop.checkpoints = Checkpoints(tmp_path, keep=1, milestone_steps=3)
    loop.run()
    assert loop.checkpoints.steps() == [3, 6, 9, 12]


def test__a_run_that_stops_itself_keeps_what_it_reached(small_config: Config, tmp_path: Path) -> None:
    loop = make_loop(small_config, tmp_path, Noise(small_config, bad=(6,)))
    with pytest.raises(CapiError, match="step 6"):
        loop.run()
    assert loop.checkpoints.steps() == [4, 6]


def test__every_record_of_a_step_says_how_well_the_run_is(small_config: Config, tmp_path: Path) -> None:
    records: list[Any] = []
    make_loop(small_config, tmp_path, Noise(small_config), loggers=[records.append], evaluations=[CountSteps()]).run()
    of_steps = [record for record in records if "student_loss" in record]
    assert all({rule.key for rule in RULES} <= record.keys() for record in of_steps)
    assert all(math.isfinite(value) for record in of_steps for value in record.values() if value is not None)
    # 6 images of 48 patches an entry: known from the first record on, with 24 prototypes.
    assert of_steps[0]["prototype_perplexity"] > 0
    assert all("position_share" not in record for record in records if "size" in record)


def test__an_alarm_is_logged_once_while_it_lasts(
    small_config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # So wide a model should have features of a higher rank.
    watchman = Watchman(RunFacts(prototypes=24, width=32_000, total_steps=STEPS))
    loop = make_loop(small_config, tmp_path, Noise(small_config), watchman=watchman, log_steps=1)
    with caplog.at_level(logging.WARNING, "capi"):
        loop.run()
    alarms = [message for message in caplog.messages if "Effective rank of the features" in message]
    assert len(alarms) == 1
    assert alarms[0].startswith("step 3: ")
    assert "optimization.learning_rate" in alarms[0]
    assert "effective_rank" in watchman.raised


def test__a_batch_of_nan_at_a_logged_step_is_reported_as_any_other(small_config: Config, tmp_path: Path) -> None:
    records: list[Any] = []
    noise = Noise(small_config, bad=(5,))
    loop = make_loop(small_config, tmp_path, noise, non_finite="skip", log_steps=1, loggers=[records.append])
    assert loop.run()
    assert [record["step"] for record in records if math.isnan(record["effective_rank"])] == [6]
    assert math.isfinite(records[-1]["prototype_perplexity"])


class Slow(Noise):
    """Batches that take a while."""

    def __call__(self, start: int, stop: int) -> Iterator[list[LoadedBatch]]:
        for batch in super().__call__(start, stop):
            time.sleep(self.seconds)
            yield batch


def test__a_record_tells_the_wait_for_data_the_share_of_the_peak_and_the_memory(
    small_config: Config, tmp_path: Path
) -> None:
    records: list[Any] = []
    slow = Slow(small_config)
    slow.seconds = 1.0
    loop = make_loop(small_config, tmp_path, slow, total_steps=4, loggers=[records.append])
    loop.peak_images_per_second = 1000.0
    loop.run()
    first, second = (record for record in records if "student_loss" in record)
    # The first batch of a start is not waited for, but made; the other three are.
    assert first["data_wait"] * first["seconds"] >= 1.0
    assert 2.0 <= second["data_wait"] * (second["seconds"] - first["seconds"]) <= 3.0
    taken = second["seconds"] - first["seconds"]
    assert second["mfu"] == pytest.approx(2 * 6 / taken / 1000, rel=0.1)
    assert 0.01 < first["peak_memory"] <= second["peak_memory"]
    quick: list[Any] = []
    make_loop(small_config, tmp_path / "quick", Noise(small_config), total_steps=4, loggers=[quick.append]).run()
    assert quick[-1]["data_wait"] < second["data_wait"]
    assert "mfu" not in quick[-1]


def test__a_loader_that_starves_the_device_is_worth_a_look() -> None:
    for wait, state in ((0.05, "well"), (0.6, "look")):
        watchman = Watchman(RunFacts(prototypes=24, width=32, total_steps=STEPS))
        for step in range(1, 8):
            assert watchman.see({"step": step, "data_wait": wait}) == []
        (finding,) = (finding for finding in watchman.findings() if finding.key == "data_wait")
        assert finding.state == state
        assert ("Raise data.workers" in finding.sentence) == (state == "look")
