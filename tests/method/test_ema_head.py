import pytest
import torch
from torch import Tensor

from capi.config.schema import Config
from capi.method.ema_head import EmaHead, rising_temperature, sinkhorn_targets
from capi.models.heads import LinearHead
from capi.train.step import train_step
from capi.types import OneProcess
from tests.train.test_step import batch_of
from tests.variants import TARGETS, learner_of, varied

TEMPERATURE = 0.05
INDEX = torch.tensor([[0, 3, 4], [1, 2, 0]])


def target_of(**changes) -> tuple[EmaHead, LinearHead]:
    head = LinearHead(width=6, outputs=5)
    given = {"head": head, "prototypes": 5, "teacher_temperature": lambda _: TEMPERATURE}
    return EmaHead(**(given | changes)), head


def slow_sinkhorn(logits: Tensor, temperature: float, iterations: int) -> Tensor:
    """Rows of samples, columns of prototypes, divided by their sums in turn."""
    matrix = ((logits - logits.amax(0)) / temperature).exp()
    for _ in range(iterations):
        matrix = matrix / (matrix.sum(0) + 1e-8)
        matrix = matrix / (matrix.sum(1, keepdim=True) + 1e-8)
    return matrix


def test__centerd_targets_by_hand_over_several_batches() -> None:
    target, head = target_of(center_momentum=0.8)
    centre = [0.0] * 5
    for _ in range(3):
        tokens = torch.randn(2, 7, 6)
        _, (targets,) = target([tokens], [INDEX])
        rows = [
            head(tokens[image : image + 1, patch : patch + 1])[0, 0].detach()
            for image in range(2)
            for patch in INDEX[image]
        ]
        for number, logits in enumerate(rows):
            exponentials = [((float(value) - shift) / TEMPERATURE) for value, shift in zip(logits, centre, strict=True)]
            expected = torch.softmax(torch.tensor(exponentials), 0)
            torch.testing.assert_close(targets.flatten(0, 1)[number], expected, rtol=1e-4, atol=1e-6)
        target.follow()
        means = [sum(float(row[k]) for row in rows) / len(rows) for k in range(5)]
        centre = [0.8 * old + 0.2 * new for old, new in zip(centre, means, strict=True)]
        torch.testing.assert_close(target.centre, torch.tensor(centre), rtol=1e-4, atol=1e-6)


def test__the_center_keeps_out_what_was_not_followed() -> None:
    target, _ = target_of()
    list(target([torch.randn(2, 7, 6)], [INDEX]).targets)
    list(target([torch.full((2, 7, 6), torch.nan)], [INDEX]).targets)
    assert (target.centre == 0).all()
    list(target([torch.randn(2, 7, 6)], [INDEX]).targets)
    target.follow()
    assert torch.isfinite(target.centre).all()
    before = target.centre.clone()
    target.follow()
    assert torch.equal(target.centre, before)


@pytest.mark.parametrize("iterations", [1, 3])
def test__balanced_targets_are_sinkhorn_s_over_all_predicted_patches(iterations: int) -> None:
    target, head = target_of(balance="sinkhorn", iterations=iterations)
    tokens = torch.randn(2, 7, 6)
    _, parts = target([tokens[:1], tokens[1:]], [INDEX[:1], INDEX[1:]])
    rows = torch.stack([tokens[image, patch] for image in range(2) for patch in INDEX[image]])
    expected = slow_sinkhorn(head(rows[None])[0].detach(), TEMPERATURE, iterations)
    torch.testing.assert_close(torch.cat(list(parts)).flatten(0, 1), expected, rtol=1e-4, atol=1e-6)
    target.follow()
    assert (target.centre == 0).all()


def test__collapsed_logits_give_finite_targets() -> None:
    for name in ("centering", "sinkhorn"):
        target, _ = target_of(balance=name)
        _, (targets,) = target([torch.ones(2, 7, 6)], [INDEX])
        assert torch.isfinite(targets).all()
        torch.testing.assert_close(targets.sum(-1), torch.ones(2, 3), rtol=1e-3, atol=1e-3)
    assert torch.isfinite(sinkhorn_targets(torch.full((2, 3, 4), 50.0), 0.01, 3, OneProcess())).all()


def test__the_teacher_s_temperature_rises_over_the_warm_up_and_stays(small_config: Config) -> None:
    temperatures = [rising_temperature(step, start=0.04, end=0.07, steps=7) for step in range(20)]
    assert temperatures[:7] == pytest.approx(torch.linspace(0.04, 0.07, 7).tolist())
    assert temperatures[7:] == pytest.approx([0.07] * 13)
    assert rising_temperature(0, start=0.04, end=0.07, steps=0) == 0.04
    overrides = [*TARGETS["ema_head"], "optimization.steps=50", "optimization.warmup_share=0.2"]
    target = learner_of(varied(small_config, *overrides)).target
    assert [target.teacher_temperature(step) for step in (0, 9, 30)] == pytest.approx([0.04, 0.07, 0.07])
    assert target.student_temperature == 0.1


def test__the_head_is_the_teacher_s_and_no_part_of_the_target(small_config: Config) -> None:
    learner = learner_of(varied(small_config, *TARGETS["ema_head"]))
    assert list(learner.target.state_dict()) == ["centre"]
    assert list(learner.target.parameters()) == []
    batch = batch_of(small_config)
    tokens = learner.target.tokens(learner.teacher, batch.images)
    _, (targets,) = learner.target([tokens], [batch.predict_index])
    chosen = tokens.gather(1, batch.predict_index[..., None].expand(-1, -1, 32))
    expected = torch.softmax(learner.teacher.average.head(chosen) / 0.04, -1)
    torch.testing.assert_close(targets, expected)
    # It follows: another average gives other targets.
    train_step(learner, [batch], 10)
    learner.target.centre.zero_()
    _, (later,) = learner.target([tokens], [batch.predict_index])
    assert not torch.allclose(later, targets)
