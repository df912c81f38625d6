import copy
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import capi
from capi.config.schema import Config
from capi.config.trust import trusting
from capi.errors import CapiError
from capi.method.clustering import OnlineClustering
from capi.method.student import Student
from capi.train import build
from capi.train.muon import Muon, orthogonal
from capi.train.optimizer import (
    AdamW,
    Optimizer,
    clip_gradients,
    set_learning_rate,
    student_optimizer,
    target_optimizer,
)
from capi.zoo.build import build_student, target_record
from tests.variants import varied


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
    expected = copy.deepcopy(student)
    for ours, theirs in zip(expected.parameters(), student.parameters(), strict=True):
        ours.grad = theirs.grad.clone()
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 3.0)
    clip_gradients(optimizer, 3.0)
    for ours, theirs in zip(expected.parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=0)
    clipped = torch.cat([parameter.grad.flatten() for parameter in student.parameters()])
    torch.testing.assert_close(clipped, 3.0 * gradient / gradient.norm(), rtol=1e-5, atol=1e-7)


def muon_of(config: Config, **overrides: float) -> tuple[Student, Muon]:
    student = build_student(config)
    optimizer = student_optimizer(student, optimizer=Muon, weight_decay=0.1, **overrides)
    assert isinstance(optimizer, Muon)
    return student, optimizer


def draw_gradients(student: Student, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in student.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test__muon_is_torchs_on_matrices_of_blocks_and_adamw_on_the_rest(small_config: Config) -> None:
    student, optimizer = muon_of(small_config, matrix_rate_multiplier=3.0)
    twin, before = copy.deepcopy(student), {name: parameter.clone() for name, parameter in student.named_parameters()}
    matrices = {name for name, parameter in twin.named_parameters() if ".blocks." in name and parameter.ndim == 2}
    assert len(matrices) == 6 * 3
    in_blocks = [parameter for name, parameter in twin.named_parameters() if name in matrices]
    theirs = torch.optim.Muon(
        in_blocks, lr=3e-2, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", ns_steps=5
    )
    rest = student_optimizer(twin, weight_decay=0.1)
    for seed in range(3):
        draw_gradients(student, seed)
        draw_gradients(twin, seed)
        set_learning_rate(optimizer, 1e-2)
        set_learning_rate(rest, 1e-2)
        optimizer.step()
        theirs.step()
        for matrix in in_blocks:
            matrix.grad = None
        rest.step()
    for (name, ours), expected in zip(student.named_parameters(), twin.parameters(), strict=True):
        if name in matrices:
            # torch's own rounds to bfloat16.
            change = expected - before[name]
            assert (ours - expected).norm() < 0.02 * change.norm(), name
        else:
            assert torch.equal(ours, expected), name


def test__orthogonalized_matrices_have_singular_values_near_one_and_keep_their_directions() -> None:
    matrices = torch.randn(3, 20, 48, generator=torch.Generator().manual_seed(0))
    for value in (matrices, matrices.mT):
        u, _, v = torch.linalg.svd(value, full_matrices=False)
        rotated = u.mT @ orthogonal(value) @ v.mT
        on_diagonal = rotated.diagonal(dim1=1, dim2=2)
        assert 0.6 < on_diagonal.min() < on_diagonal.max() < 1.3
        torch.testing.assert_close(rotated, torch.diag_embed(on_diagonal), rtol=0, atol=1e-4)


@pytest.mark.parametrize("optimizer", [AdamW, Muon])
def test__a_step_that_is_to_be_skipped_changes_nothing(small_config: Config, optimizer: type[Optimizer]) -> None:
    student = build_student(small_config)
    ours = student_optimizer(student, optimizer=optimizer, weight_decay=0.1)
    draw_gradients(student, 0)
    set_learning_rate(ours, 1e-2)
    ours.found_inf = torch.zeros(())
    ours.step()
    before = [value.clone() for value in (*student.parameters(), *states(ours))]
    for parameter in student.parameters():
        parameter.grad.fill_(torch.nan)
    ours.found_inf = torch.ones(())
    ours.step()
    assert all(torch.equal(old, new) for old, new in zip(before, (*student.parameters(), *states(ours)), strict=True))


def states(optimizer: Optimizer) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [value for parameter in parameters for value in optimizer.state[parameter].values()]


@pytest.mark.parametrize("optimizer", [AdamW, Muon])
def test__a_step_starts_from_the_state_that_is_declared(small_config: Config, optimizer: type[Optimizer]) -> None:
    states = []
    for declared in (False, True):
        torch.manual_seed(0)
        student = build_student(small_config)
        ours = student_optimizer(student, optimizer=optimizer, weight_decay=0.1)
        for parameter in student.parameters() if declared else ():
            ours.state[parameter].update(ours.initial_state(parameter))
        draw_gradients(student, 0)
        set_learning_rate(ours, 1e-2)
        ours.step()
        assert all(
            ours.state[parameter].keys() == ours.initial_state(parameter).keys() for parameter in student.parameters()
        )
        states.append([*student.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test__muon_needs_the_flop_that_torch_counts(small_config: Config) -> None:
    student, optimizer = muon_of(small_config)
    draw_gradients(student, 0)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert optimizer.flop() == counter.get_total_flops() > 0


def test__muon_without_matrices_is_refused(small_config: Config) -> None:
    student = build_student(small_config)
    student.encoder.blocks, student.predictor.blocks = nn.ModuleList(), nn.ModuleList()
    with pytest.raises(CapiError, match=r"optimization\.optimizer=muon .* this student has none: set"):
        student_optimizer(student, optimizer=Muon, weight_decay=0.1)


class Still(AdamW):
    """Moves nothing."""

    def step(self, closure: object = None) -> None: ...


@pytest.fixture
def _own_table() -> Iterator[None]:
    """What a test adds to the table is gone after it."""
    before = dict(build.OPTIMIZERS)
    yield
    build.OPTIMIZERS.clear()
    build.OPTIMIZERS.update(before)


@pytest.mark.usefixtures("_own_table")
def test__an_optimizer_of_ones_own_is_found_by_its_name(small_config: Config) -> None:
    capi.register_optimizer("still", Still)
    learner = build.build_learner(varied(small_config, "optimization.optimizer=still"))
    assert isinstance(learner.student_optimizer, Still)
    with pytest.raises(CapiError, match=r"optimization\.optimizer=moun is none of adamw, muon, still, nor FILE.*muon"):
        build.build_learner(varied(small_config, "optimization.optimizer=moun"))


@pytest.mark.usefixtures("_own_table")
def test__an_optimizer_of_a_trusted_file_is_imported(small_config: Config, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("from capi.train.optimizer import AdamW\n\n\nclass Still(AdamW):\n    def step(self): ...\n")
    override = f"optimization.optimizer={file}:Still"
    config = varied(small_config, override)
    with pytest.raises(CapiError, match=r"`trust` .*own\.py"):
        build.build_learner(config)
    with trusting(overrides=[override]):
        assert type(build.build_learner(config).student_optimizer).__name__ == "Still"
        recorded = target_record(config)["code"]["optimization.optimizer"]
        assert recorded == {"file": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def test__options_of_the_optimizer_are_its_keyword_arguments(small_config: Config) -> None:
    config = varied(small_config, "optimization.options.betas=[0.8,0.9]", "optimization.options.eps=1e-6")
    optimizer = build.build_learner(config).student_optimizer
    assert {(tuple(group["betas"]), group["eps"]) for group in optimizer.param_groups} == {((0.8, 0.9), 1e-6)}
    with pytest.raises(CapiError, match=r'optimization.options.beta is no option of adamw.*"betas"'):
        build.build_learner(varied(small_config, "optimization.options.beta=1"))
