import math

import pytest
import torch

from capi.config.files import parse_config
from capi.config.schema import Config
from capi.method.clustering import OnlineClustering
from capi.method.health import HealthMonitor
from capi.method.masking import PatchGrid
from capi.runtime.randomness import sample_keys
from capi.train.build import build_learner, mask_sampler
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch
from tests.live_tensors import NewTensors
from tests.variants import varied


def batch_of(config: Config, step: int = 0) -> MaskedBatch:
    keys = sample_keys(config.seed, step, torch.arange(config.optimization.batch_size))
    visible, predict = mask_sampler(config)(PatchGrid(*config.grid), keys)
    generator = torch.Generator().manual_seed(step)
    shape = (config.optimization.batch_size, config.model.channels, *config.data.height_and_width)
    return MaskedBatch(torch.randn(shape, generator=generator), visible, predict)


def states(learner: Learner) -> list[torch.Tensor]:
    modules = (learner.student, learner.teacher, learner.target)
    return [value.clone() for module in modules for value in module.state_dict().values()]


def test__the_first_step_of_a_warm_up_changes_nothing(small_config: Config) -> None:
    learner = build_learner(small_config)
    before = states(learner)
    train_step(learner, [batch_of(small_config)], 0)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(before, states(learner), strict=True))


def test__a_step_moves_student_prototypes_and_teacher(small_config: Config) -> None:
    learner = build_learner(small_config)
    before = states(learner)
    # What counts the use of prototypes moves where a monitor looks.
    train_step(learner, [batch_of(small_config)], 5, HealthMonitor())
    unmoved = [i for i, (a, b) in enumerate(zip(before, states(learner), strict=True)) if torch.equal(a, b)]
    assert unmoved == []


def test__rate_and_momentum_are_those_of_the_step(small_config: Config) -> None:
    learner, asked = build_learner(small_config), []
    learner.learning_rate = lambda step: asked.append(("rate", step)) or 1e-3
    learner.teacher_momentum = lambda step: asked.append(("momentum", step)) or 0.9
    train_step(learner, [batch_of(small_config)], 7)
    assert asked == [("rate", 7), ("rate", 7), ("momentum", 7)]


def test__same_seed_same_run(small_config: Config) -> None:
    runs = []
    for _ in range(2):
        learner = build_learner(small_config)
        losses = [train_step(learner, [batch_of(small_config, step)], step).student_loss for step in range(4)]
        runs.append((torch.stack(losses), states(learner)))
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test__no_gradient_is_left_over(small_config: Config) -> None:
    learner = build_learner(small_config)
    train_step(learner, [batch_of(small_config)], 5)
    modules = (learner.student, learner.target, learner.teacher)
    assert all(parameter.grad is None for module in modules for parameter in module.parameters())


def test__a_step_runs_under_autocast(small_config: Config) -> None:
    learner = build_learner(small_config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        metrics = train_step(learner, [batch_of(small_config)], 5)
    assert all(math.isfinite(value) for value in metrics.values().values())
    assert metrics.student_loss.dtype == metrics.target_loss.dtype == torch.float32


def test__learning_on_one_batch_lowers_both_losses(small_config: Config) -> None:
    learner = build_learner(small_config)
    learner.learning_rate = lambda _: 3e-3
    learner.teacher_momentum = lambda _: 1.0
    batch = batch_of(small_config)
    metrics = [train_step(learner, [batch], step) for step in range(60)]
    assert metrics[-1].student_loss < metrics[0].student_loss - 0.5
    assert metrics[-1].target_loss < metrics[0].target_loss - 0.1
    assert 0 <= metrics[-1].described["target_entropy"] <= torch.tensor(24.0).log()


@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__micro_batches_make_the_step_of_the_whole_batch(small_config: Config, sinkhorn: str) -> None:
    tree = small_config.model_dump(mode="json")
    tree["clustering"]["sinkhorn"] = sinkhorn
    tree["model"]["stochastic_depth"] = 0.0
    config = parse_config(tree)
    whole, parts = build_learner(config), build_learner(config)
    for step in range(2, 5):
        batch = batch_of(config, step)
        split = [MaskedBatch(*(value[start : start + 2] for value in batch[:3])) for start in (0, 2, 4)]
        expected, losses = train_step(whole, [batch], step), train_step(parts, split, step)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(states(parts), states(whole), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test__the_memory_of_micro_batches_does_not_grow_with_their_targets() -> None:
    """Four times the micro-batches hold four times the tokens, but the targets of one micro-batch alone."""
    clustering = OnlineClustering(width=8, prototypes=4096)

    def peak(parts: int) -> int:
        tokens = [torch.randn(4, 6, 8) for _ in range(parts)]
        predict = [torch.zeros(4, 5, dtype=torch.int64) for _ in range(parts)]
        made = NewTensors()
        _, targets = clustering(tokens, predict)
        return max(made.bytes() for _ in targets)

    of_one_part = 4 * 5 * 4096 * 4
    peak(2)
    assert abs(peak(8) - peak(2)) < of_one_part


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test__a_loss_that_is_not_finite_updates_nothing(small_config: Config, optimizer: str) -> None:
    config = varied(small_config, f"optimization.optimizer={optimizer}", "optimization.clip=1.0")
    learner = build_learner(config)
    batch = batch_of(config)
    before = states(learner)
    metrics = train_step(learner, [batch._replace(images=batch.images * torch.nan)], 5)
    assert not torch.isfinite(metrics.student_loss)
    assert all(torch.equal(old, new) for old, new in zip(before, states(learner), strict=True))
    train_step(learner, [batch], 5)
    assert all(torch.isfinite(value).all() for value in states(learner))


def test__bfloat16_trains_and_weights_stay_float32(small_config: Config) -> None:
    learner = build_learner(small_config)
    learner.precision = torch.bfloat16
    half = train_step(learner, [batch_of(small_config)], 5)
    full = train_step(build_learner(small_config), [batch_of(small_config)], 5)
    assert {value.dtype for value in states(learner)} == {torch.float32}
    assert half.student_loss.dtype == torch.float32
    torch.testing.assert_close(half.student_loss, full.student_loss, rtol=2e-2, atol=2e-2)
