import torch

from capi.config.schema import Config
from capi.train.build import build_learner
from capi.zoo.build import build_student


def test__the_student_sees_only_visible_patches(small_config: Config) -> None:
    student = build_student(small_config).eval()
    images = torch.randn(2, 3, 32, 24)
    visible, predict = torch.tensor([[0, 7, 9]] * 2), torch.tensor([[3, 20]] * 2)
    logits = student(images, visible, predict)
    hidden = torch.ones(8, 6, dtype=torch.bool)
    hidden.view(-1)[[0, 7, 9]] = False
    hidden = hidden.repeat_interleave(4, 0).repeat_interleave(4, 1)
    scrambled = torch.where(hidden, torch.randn_like(images), images)
    torch.testing.assert_close(student(scrambled, visible, predict), logits)
    assert not torch.allclose(student(images.flip(-1), visible, predict), logits)


def test__a_prediction_does_not_depend_on_the_others_asked_for(small_config: Config) -> None:
    student = build_student(small_config).eval()
    images, visible = torch.randn(2, 3, 32, 24), torch.tensor([[0, 7, 9]] * 2)
    together = student(images, visible, torch.tensor([[3, 20, 41]] * 2))
    alone = student(images, visible, torch.tensor([[20]] * 2))
    torch.testing.assert_close(together[:, 1:2], alone)


def test__gradients_reach_every_parameter(small_config: Config) -> None:
    student = build_learner(small_config).student
    logits = student(torch.randn(6, 3, 32, 24), torch.arange(12).expand(6, 12), torch.arange(20, 25).expand(6, 5))
    logits.square().mean().backward()
    without = [name for name, parameter in student.named_parameters() if parameter.grad is None]
    assert without == []
