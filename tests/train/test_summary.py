import pytest
import torch

from capi.config.files import load_config
from capi.method.masking import PatchGrid
from capi.train.build import build_learner, mask_sampler
from capi.train.cost.flop import iteration_flop
from capi.train.cost.plan import planned_cost


def test__the_plan_is_that_of_the_networks_as_they_are_built() -> None:
    config = load_config("demo")
    cost, learner = planned_cost(config), build_learner(config)
    visible, _, predicted = mask_sampler(config).counts(PatchGrid(*config.grid))
    flop = iteration_flop(
        learner.student, learner.target, batch_size=64, patches=36, visible=visible, predicted=predicted
    )
    assert cost.flop_an_image == sum(flop)
    assert cost.encoder_parameters == sum(weight.numel() for weight in learner.student.encoder.parameters())
    trained = (*learner.student.parameters(), *learner.target.parameters())
    assert cost.trained_parameters == sum(weight.numel() for weight in trained)


def test__a_run_sees_its_batches_and_costs_what_they_cost() -> None:
    cost = planned_cost(load_config("demo", ["optimization.steps=10"]))
    assert cost.images_seen == 640
    assert cost.flop == pytest.approx(640 * cost.flop_an_image)


def test__the_time_that_the_paper_measured_fits_the_plan_of_its_main_model() -> None:
    """5763 hours of a GPU whose peak is 312 TFLOP/s in bfloat16: a third to a half of it is what one can expect."""
    share = planned_cost(load_config("Meb2b")).flop / (5763 * 3600) / 312e12
    assert 0.3 < share < 0.55


def test__planning_leaves_the_default_device_alone() -> None:
    planned_cost(load_config("demo"))
    assert torch.zeros(1).device.type == "cpu"
