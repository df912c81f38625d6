import sys

import pytest
import torch

from capi.config.files import load_config
from capi.train.cost.hardware import Gpu
from capi.train.cost.measure import Measured, measure, measured_config
from capi.train.cost.plan import plan_run

CPU = Gpu("this", "a processor", 16e9, None, 1e11, None, accelerator=False, measured=True)


def test__a_batch_that_can_be_tried_is_that_of_a_micro_batch() -> None:
    config = load_config("vitl14", ["optimization.micro_batches=1024"])
    assert measured_config(config).optimization.batch_size == 16
    assert measured_config(load_config("vitl14")).optimization.batch_size == 32
    assert measured_config(config, 7).optimization.batch_size == 7
    assert measured_config(config).optimization.micro_batches == 1


def test__ratios_are_those_of_plan_and_measurement() -> None:
    plan = plan_run(load_config("demo"), CPU)
    measured = Measured(plan, seconds=2 * plan.effort.seconds_a_step, peak_bytes=int(plan.memory.peak))
    assert [row.error for row in measured.comparisons] == pytest.approx([-0.5, 0], abs=1e-6)
    assert measured.mfu == pytest.approx(0.3)
    assert len(Measured(plan, 1.0, None).comparisons) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test__the_memory_of_real_steps_is_near_the_plan() -> None:
    """At a size where what a process holds besides is small."""
    overrides = ["optimization.batch_size=48", "model.width=192", "model.heads=3", "model.depth=6"]
    measured = measure(load_config("mini", overrides), lambda: CPU, torch.device("cpu"), rounds=1)
    _, memory = measured.comparisons
    assert memory.planned > 2e8
    assert 0.7 < memory.planned / memory.measured < 1.25
    assert measured.seconds > 0
