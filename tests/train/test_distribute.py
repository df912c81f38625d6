"""What needs no second process; tests/integration/test_many_processes.py has several."""

import torch

from capi.config.schema import Config
from capi.runtime.devices import as_on_accelerator
from capi.runtime.processes import Processes
from capi.train.build import build_learner
from capi.train.checkpoint import tensors
from capi.train.distribute import distribute, whole_view

CPU = torch.device("cpu")


def test__a_distributed_learner_has_the_weights_of_the_whole_one(group: Processes, small_config: Config) -> None:
    whole = build_learner(small_config)
    learner = distribute(small_config, whole, group, CPU)
    before = {name: value.clone() for name, value in tensors(whole).items()}
    assert tensors(learner).keys() == before.keys()
    for name, value in tensors(learner).items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(full, before[name]), name
    assert learner.target.reduction is group
    view = whole_view(small_config, group, CPU)(learner)
    assert view is not None
    images = torch.randn(2, 3, *small_config.data.height_and_width)
    assert torch.equal(view.teacher(images), whole.teacher(images))
    for ours, theirs in zip(view.student.parameters(), whole.student.parameters(), strict=True):
        assert type(ours.data) is torch.Tensor
        assert torch.equal(ours, theirs)


def test__a_sharded_teacher_follows_on_an_accelerator_as_on_a_cpu(group: Processes, small_config: Config) -> None:
    learner = distribute(small_config, build_learner(small_config), group, CPU)
    for parameter in learner.student.parameters():
        parameter.data.add_(1.0)
    before = [parameter.detach().clone() for parameter in learner.teacher.parameters()]
    learner.teacher.follow(learner.student, 0.75)
    expected = [parameter.full_tensor().detach() for parameter in learner.teacher.parameters()]
    for parameter, value in zip(learner.teacher.parameters(), before, strict=True):
        parameter.data.copy_(value)
    with as_on_accelerator():
        learner.teacher.follow(learner.student, 0.75)
    for parameter, value in zip(learner.teacher.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.full_tensor().detach(), value)


def test__only_the_main_process_sees_the_whole(group: Processes, small_config: Config) -> None:
    learner = distribute(small_config, build_learner(small_config), group, CPU)
    assert whole_view(small_config, Processes(rank=1, size=1), CPU)(learner) is None
