import torch

from capi import api
from capi.config.schema import Config
from capi.train.build import build_learner
from capi.train.cost.step import measure_step
from capi.zoo.build import build_student
from tests.train.test_step import batch_of
from tests.variants import varied


def test__the_cost_of_a_step_is_measured_and_reported(small_config: Config) -> None:
    rounds = []
    cost = api.check(small_config, device="cpu", rounds=2, progress=lambda: rounds.append(1)).cost
    assert len(rounds) == 3
    assert cost.batch_size == 6
    assert cost.seconds > 0
    assert cost.images_per_second == 6 / cost.seconds
    assert cost.flop_per_second == sum(cost.flop_an_image) * cost.images_per_second
    assert cost.peak_bytes > 50e6
    student = build_student(small_config)
    assert cost.encoder_parameters == sum(parameter.numel() for parameter in student.encoder.parameters())
    expected = sum(parameter.numel() for parameter in student.parameters()) + 24 * 32 + 24
    assert cost.trained_parameters == expected


def test__a_queue_is_measured_full(small_config: Config) -> None:
    config = varied(small_config, "clustering.queue=18")
    learner = build_learner(config)
    measure_step(learner, [batch_of(config)], 48, 1, lambda: None)
    # Three batches of noise were there, and two steps have followed.
    assert learner.target.queue.seen == 5
    assert (learner.target.queue.tokens.float().abs().amax((1, 2)) > 0).all()
    assert torch.equal(learner.target.queue.tokens[:6], learner.target.queue.tokens[6:12])
