"""What every target must keep, whichever it is."""

import math

import pytest
import torch

from capi.config.schema import Config
from capi.method.health import HealthMonitor
from capi.method.targets import Target, at_predicted, no_own_loss, value_metrics, value_summary
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch
from tests.train.test_step import batch_of, states
from tests.variants import TARGETS, learner_of, varied

KINDS = {"clustering": [], "clustering with a queue": ["clustering.queue=12"], **TARGETS}


def build(config: Config, name: str, *overrides: str) -> tuple[Config, Learner]:
    config = varied(config, *KINDS[name], *overrides)
    return config, learner_of(config)


@pytest.mark.parametrize("name", KINDS)
def test__targets_are_those_of_the_predicted_patches_and_have_the_student_s_shape(
    small_config: Config, name: str
) -> None:
    config, learner = build(small_config, name)
    target, batch = learner.target, batch_of(config)
    assert isinstance(target, Target)
    assert target.name == config.target.kind
    tokens = target.tokens(learner.teacher, batch.images)
    assert tokens.shape[:2] == (6, 48)
    _, (targets,) = target([tokens], [batch.predict_index], 3)
    outputs = learner.student(*batch[:3])
    assert outputs.shape == targets.shape
    assert targets.dtype == torch.float32
    assert not targets.requires_grad
    # What other patches are like does not matter where targets are not balanced together.
    if target.name != "clustering" and name != "ema_head with sinkhorn":
        _, (fewer,) = target([tokens], [batch.predict_index[:, 2:3]], 3)
        torch.testing.assert_close(fewer, targets[:, 2:3])


@pytest.mark.parametrize("name", KINDS)
def test__the_student_s_loss_reaches_the_student_and_the_own_loss_the_target_alone(
    small_config: Config, name: str
) -> None:
    config, learner = build(small_config, name)
    batch, target = batch_of(config), learner.target
    own_loss, (targets,) = target([target.tokens(learner.teacher, batch.images)], [batch.predict_index], 3)
    own_loss.backward()
    assert all(weight.grad is not None for weight in target.parameters())
    assert all(weight.grad is None for weight in (*learner.student.parameters(), *learner.teacher.parameters()))
    gradients = [weight.grad.clone() for weight in target.parameters()]
    target.student_loss(learner.student(*batch[:3]), targets).backward()
    assert all(weight.grad is not None for weight in learner.student.parameters())
    assert all(weight.grad is None for weight in learner.teacher.parameters())
    assert all(torch.equal(weight.grad, before) for weight, before in zip(target.parameters(), gradients, strict=True))
    assert (learner.target_optimizer is None) == (not gradients)


@pytest.mark.parametrize("name", KINDS)
def test__micro_batches_make_the_step_of_the_whole_batch(small_config: Config, name: str) -> None:
    config, whole = build(small_config, name, "model.stochastic_depth=0.0")
    parts = learner_of(config)
    for step in range(2, 5):
        batch = batch_of(config, step)
        split = [MaskedBatch(*(value[start : start + 2] for value in batch[:3])) for start in (0, 2, 4)]
        expected, losses = train_step(whole, [batch], step), train_step(parts, split, step)
        torch.testing.assert_close(losses.student_loss, expected.student_loss, rtol=1e-5, atol=1e-6)
        assert losses.values() == pytest.approx(expected.values(), rel=1e-4, abs=1e-5)
        for ours, theirs in zip(states(parts), states(whole), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test__a_loss_that_is_not_finite_updates_nothing(small_config: Config, name: str) -> None:
    config, learner = build(small_config, name)
    batch, before = batch_of(config), states(learner)
    metrics = train_step(learner, [batch._replace(images=batch.images * torch.nan)], 5, HealthMonitor())
    assert not torch.isfinite(metrics.student_loss)
    assert all(torch.equal(old, new) for old, new in zip(before, states(learner), strict=True))
    assert torch.isfinite(train_step(learner, [batch], 5).student_loss)


@pytest.mark.parametrize("name", KINDS)
def test__a_step_learns_and_runs_under_autocast(small_config: Config, name: str) -> None:
    config, learner = build(small_config, name)
    learner.learning_rate, learner.teacher_momentum = lambda _: 3e-3, lambda _: 1.0
    batch = batch_of(config)
    losses = [float(train_step(learner, [batch], 9).student_loss) for _ in range(25)]
    assert losses[-1] < 0.97 * losses[0]
    learner.precision = torch.bfloat16
    metrics = train_step(learner, [batch], 9)
    assert metrics.student_loss.dtype == torch.float32
    assert all(math.isfinite(value) for value in metrics.values().values())


@pytest.mark.parametrize("name", KINDS)
def test__a_monitor_changes_nothing(small_config: Config, name: str) -> None:
    results = []
    for observer in (None, HealthMonitor()):
        config, learner = build(small_config, name)
        torch.manual_seed(3)
        for step in range(4, 6):
            train_step(learner, [batch_of(config)], step, observer)
        modules = (learner.student, learner.teacher, learner.target)
        results.append([weight.clone() for module in modules for weight in module.parameters()])
    assert all(torch.equal(without, watched) for without, watched in zip(*results, strict=True))
    assert ("effective_rank" in observer.values()) == learner.target.reads_teacher


def test__deviation_is_that_over_patches_averaged_over_channels() -> None:
    targets = torch.randn(4, 5, 3) * torch.tensor([0.5, 1.0, 2.0])
    parts = [value_summary(part) for part in targets.split(2)]
    means = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
    expected = targets.flatten(0, 1).std(0, correction=0).mean()
    torch.testing.assert_close(value_metrics(means)["target_deviation"], expected)
    constant = value_metrics(value_summary(torch.full((2, 3, 4), 0.7)))
    assert float(constant["target_deviation"]) == pytest.approx(0, abs=1e-3)


def test__rows_are_those_asked_for_and_no_loss_leads_nowhere() -> None:
    tokens, index = torch.randn(2, 6, 3, dtype=torch.bfloat16), torch.tensor([[5, 0], [1, 1]])
    expected = torch.stack([tokens[image, index[image]] for image in range(2)]).float()
    assert torch.equal(at_predicted(tokens, index), expected)
    loss = no_own_loss()
    loss.backward()
    assert loss == 0
