import torch

from capi.config.schema import Config
from capi.method.pixel_targets import PixelTargets
from capi.method.teacher import Teacher
from tests.train.test_step import batch_of
from tests.variants import TARGETS, learner_of, varied


def slow_target(image: torch.Tensor, patch: int, size: int, columns: int) -> torch.Tensor:
    """The pixels of one patch, channel by channel and row by row, less their mean and over their std."""
    top, left = patch // columns * size, patch % columns * size
    values = [
        float(image[channel, row, column])
        for channel in range(image.shape[0])
        for row in range(top, top + size)
        for column in range(left, left + size)
    ]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return torch.tensor([(value - mean) / (variance + 1e-6) ** 0.5 for value in values])


def test__targets_are_the_patch_s_own_pixels_normalized(teacher: Teacher) -> None:
    target, images = PixelTargets(patch_size=4), 2 * torch.randn(2, 3, 12, 20) + 1
    index = torch.tensor([[0, 14, 7], [3, 5, 9]])
    _, (targets,) = target([target.tokens(teacher, images)], [index])
    assert targets.shape == (2, 3, 48)
    for image in range(2):
        for number, patch in enumerate(index[image].tolist()):
            expected = slow_target(images[image], patch, 4, 5)
            torch.testing.assert_close(targets[image, number], expected, rtol=1e-4, atol=1e-5)


def test__a_patch_of_one_color_has_zeros_as_target(teacher: Teacher) -> None:
    target = PixelTargets(patch_size=4)
    _, (targets,) = target([target.tokens(teacher, torch.full((1, 1, 8, 8), 0.3))], [torch.tensor([[1]])])
    torch.testing.assert_close(targets, torch.zeros(1, 1, 16))


def test__the_loss_is_the_mean_squared_error() -> None:
    outputs, targets = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    expected = sum(float(error) ** 2 for error in (outputs - targets).flatten()) / 24
    torch.testing.assert_close(PixelTargets(patch_size=2).student_loss(outputs, targets), torch.tensor(expected))


def test__no_teacher_is_asked(small_config: Config) -> None:
    learner = learner_of(varied(small_config, *TARGETS["pixels"]))
    calls = []
    learner.teacher.register_forward_hook(lambda *_: calls.append(1))
    batch = batch_of(small_config)
    assert learner.target.tokens(learner.teacher, batch.images).shape == (6, 48, 48)
    assert calls == []
    assert learner.student.head.weight.shape == (48, 32)
