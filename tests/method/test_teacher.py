import torch

from capi.config.schema import Config
from capi.method.teacher import Teacher
from capi.zoo.build import build_student


def test__follows_as_an_exponential_moving_average(small_config: Config) -> None:
    student = build_student(small_config)
    teacher = Teacher(student)
    expected = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    for _ in range(3):
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.add_(torch.randn_like(parameter))
        teacher.follow(student, 0.9)
        for name, parameter in student.named_parameters():
            expected[name] = 0.9 * expected[name] + 0.1 * parameter.detach()
    averaged = dict(teacher.average.named_parameters())
    assert averaged.keys() == expected.keys()
    assert any(name.startswith("predictor") for name in averaged)
    assert any(name.startswith("head") for name in averaged)
    for name, value in expected.items():
        torch.testing.assert_close(averaged[name], value)


def test__momentum_one_stands_still_and_zero_copies(small_config: Config) -> None:
    teacher, student = Teacher(build_student(small_config)), build_student(small_config)
    before = [parameter.clone() for parameter in teacher.parameters()]
    teacher.follow(student, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))
    teacher.follow(student, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(student.parameters(), teacher.parameters(), strict=True))


def test__never_drops_a_branch_nor_needs_a_gradient(small_config: Config) -> None:
    teacher = Teacher(build_student(small_config))
    teacher.train()
    images = torch.randn(4, 3, 32, 24)
    tokens = teacher(images)
    assert tokens.shape == (4, 48, 32)
    assert torch.equal(tokens, teacher(images))
    assert not tokens.requires_grad
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert not any(module.training for module in teacher.modules())


def test__changing_the_student_does_not_change_the_teacher(small_config: Config) -> None:
    student = build_student(small_config)
    teacher = Teacher(student)
    images = torch.randn(2, 3, 32, 24)
    before = teacher(images)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    assert torch.equal(before, teacher(images))
