import ast
import inspect

import torch

from capi.api import build_learner, mask_sampler
from capi.config.schema import Config
from capi.method.masking import Grid
from capi.randomness import sample_keys
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch


def batch_of(config: Config, step: int = 0) -> MaskedBatch:
    keys = sample_keys(config.seed, step, torch.arange(config.optimization.batch_size))
    visible, predict = mask_sampler(config)(Grid(*config.grid), keys)
    generator = torch.Generator().manual_seed(step)
    shape = (config.optimization.batch_size, config.model.channels, *config.data.height_and_width)
    return MaskedBatch(torch.randn(shape, generator=generator), visible, predict)


def states(learner: Learner) -> list[torch.Tensor]:
    modules = (learner.student, learner.teacher, learner.clustering)
    return [value.clone() for module in modules for value in module.state_dict().values()]


def test__the_first_step_of_a_warm_up_changes_nothing(small_config: Config) -> None:
    learner = build_learner(small_config)
    before = states(learner)
    train_step(learner, [batch_of(small_config)], 0)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(before, states(learner), strict=True))


def test__a_step_moves_student_prototypes_and_teacher(small_config: Config) -> None:
    learner = build_learner(small_config)
    before = states(learner)
    train_step(learner, [batch_of(small_config)], 5)
    unmoved = [i for i, (a, b) in enumerate(zip(before, states(learner), strict=True)) if torch.equal(a, b)]
    assert unmoved == []


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
    modules = (learner.student, learner.clustering, learner.teacher)
    assert all(parameter.grad is None for module in modules for parameter in module.parameters())


def test__a_step_runs_under_autocast(small_config: Config) -> None:
    learner = build_learner(small_config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        metrics = train_step(learner, [batch_of(small_config)], 5)
    assert all(torch.isfinite(metric) for metric in metrics)
    assert metrics.student_loss.dtype == metrics.clustering_loss.dtype == torch.float32


def test__learning_on_one_batch_lowers_both_losses(small_config: Config) -> None:
    learner = build_learner(small_config)
    learner.learning_rate = lambda _: 3e-3
    learner.teacher_momentum = lambda _: 1.0
    batch = batch_of(small_config)
    metrics = [train_step(learner, [batch], step) for step in range(60)]
    assert metrics[-1].student_loss < metrics[0].student_loss - 0.5
    assert metrics[-1].clustering_loss < metrics[0].clustering_loss - 0.1
    assert 0 <= metrics[-1].target_entropy <= torch.tensor(24.0).log()


def test__the_step_reads_as_the_algorithm() -> None:
    """About 40 lines, and no branches: what varies lives behind the names it calls."""
    source = inspect.getsource(train_step)
    assert len(source.splitlines()) <= 40
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If | ast.IfExp)]
