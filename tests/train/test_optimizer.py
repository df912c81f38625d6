import pytest
import torch

from capi.config.schema import Config
from capi.method.clustering import OnlineClustering
from capi.train.optimizer import clip_gradients, set_learning_rate, student_optimizer, target_optimizer
from capi.zoo.build import build_student


def expected_rule(name: str) -> tuple[float, float]:
    """Rate multiplier and weight decay of a parameter, from its name."""
    rate = 0.2 if name.startswith("encoder.patch_embedding") else 1.0
    if name.endswith(".bias"):
        return rate, 0.0
    if "norm" in name:
        return rate, 0.1 * 0.1
    return rate, 0.1


def test__every_parameter_is_in_exactly_one_group_with_its_rule(small_config: Config) -> None:
    student = build_student(small_config)
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    seen = []
    for group in student_optimizer(student, weight_decay=0.1).param_groups:
        assert group["betas"] == (0.9, 0.95)
        assert group["eps"] == 1e-8
        for parameter in group["params"]:
            name = names[id(parameter)]
            seen.append(name)
            assert (group["rate_multiplier"], group["weight_decay"]) == pytest.approx(expected_rule(name)), name
    assert sorted(seen) == sorted(names.values())
    assert {"encoder.registers", "predictor.mask_token", "head.length"} <= set(seen)


def test__prototypes_and_their_bias_decay_alike() -> None:
    clustering = OnlineClustering(width=8, prototypes=5)
    (group,) = target_optimizer(clustering, weight_decay=0.01).param_groups
    assert len(group["params"]) == 2
    assert (group["rate_multiplier"], group["weight_decay"]) == (0.5, 0.01)


def test__one_step_is_adamw_by_hand(small_config: Config) -> None:
    student = build_student(small_config)
    optimizer = student_optimizer(student, weight_decay=0.1)
    before = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    for parameter in student.parameters():
        parameter.grad = torch.randn_like(parameter)
    set_learning_rate(optimizer, 1e-2)
    optimizer.step()
    for name, parameter in student.named_parameters():
        rate, decay = expected_rule(name)
        # After one step the bias-corrected moments are the gradient and its square.
        gradient = parameter.grad
        expected = before[name] * (1 - 1e-2 * rate * decay) - 1e-2 * rate * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-7)


def test__gradients_are_clipped_to_a_length_and_keep_their_direction(small_config: Config) -> None:
    student = build_student(small_config)
    optimizer = student_optimizer(student, weight_decay=0.1)
    for parameter in student.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradient = torch.cat([parameter.grad.flatten() for parameter in student.parameters()])
    clip_gradients(optimizer, 2.0 * float(gradient.norm()))
    assert torch.equal(torch.cat([parameter.grad.flatten() for parameter in student.parameters()]), gradient)
    clip_gradients(optimizer, 3.0)
    clipped = torch.cat([parameter.grad.flatten() for parameter in student.parameters()])
    torch.testing.assert_close(clipped, 3.0 * gradient / gradient.norm(), rtol=1e-5, atol=1e-7)
