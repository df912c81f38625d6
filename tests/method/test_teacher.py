from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from capi.config.schema import Config
from capi.errors import CapiError
from capi.method.teacher import Teacher
from capi.models.positions import register_coordinates
from capi.runtime.devices import as_on_accelerator
from capi.train.build import build_learner
from capi.zoo.build import build_student
from tests.live_tensors import NewTensors
from tests.variants import LAYERS, TARGETS, learner_of, varied


@pytest.fixture(params=["on a CPU", "as on an accelerator"])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    with as_on_accelerator() if request.param == "as on an accelerator" else nullcontext():
        yield


@pytest.mark.usefixtures("_way")
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


@pytest.mark.usefixtures("_way")
def test__a_batch_that_is_skipped_is_not_followed(small_config: Config) -> None:
    teacher, student = Teacher(build_student(small_config)), build_student(small_config)
    before = [parameter.clone() for parameter in teacher.parameters()]
    teacher.follow(student, 0.5, torch.ones(()))
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))
    teacher.follow(student, 0.5, torch.zeros(()))
    assert not any(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True) if a.std() > 0)


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


def block_outputs(teacher: Teacher, images: torch.Tensor) -> list[torch.Tensor]:
    """What each block gives of the patches, computed block by block."""
    encoder = teacher.average.encoder
    everywhere = encoder.coordinates(images)[None]
    coordinates = torch.cat([register_coordinates(everywhere, encoder.num_registers), everywhere], dim=1)
    rotary = encoder.positions.rotary(coordinates)
    x = torch.cat([encoder.registers.expand(len(images), -1, -1), encoder.patch_embedding(images, None)], dim=1)
    outputs = []
    for block in encoder.blocks:
        x = block(x, rotary)
        outputs.append(x[:, encoder.num_registers :])
    return outputs


def per_channel(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens - tokens.mean(1, keepdim=True)) / (tokens.std(1, correction=0, keepdim=True) + 1e-5)


def per_patch(tokens: torch.Tensor) -> torch.Tensor:
    mean, variance = tokens.mean(2, keepdim=True), tokens.var(2, correction=0, keepdim=True)
    return (tokens - mean) / (variance + 1e-5).sqrt()


@pytest.mark.parametrize(("normalize", "by_hand"), [("none", None), ("instance", per_channel), ("layer", per_patch)])
@pytest.mark.parametrize("layers", ["all", [1], [2, 0], "last"])
def test__tokens_are_the_mean_of_the_normalized_layers(
    small_config: Config, layers: str | list[int], normalize: str, by_hand: Any
) -> None:
    student = build_student(varied(small_config, "model.depth=3"))
    images = torch.randn(2, 3, 32, 24)
    with torch.no_grad():
        for block in student.encoder.blocks:
            block.attention_norm.weight.normal_(1.0, 0.3)
        outputs = block_outputs(plain := Teacher(student), images)
    if layers == "last":
        chosen = [plain(images)]
    else:
        chosen = outputs if layers == "all" else [outputs[number] for number in layers]
    expected = torch.stack([layer if by_hand is None else by_hand(layer) for layer in chosen]).mean(0)
    tokens = Teacher(student, layers=layers, normalize=normalize)(images)
    torch.testing.assert_close(tokens, expected, rtol=1e-5, atol=1e-5)
    assert tokens.dtype == torch.float32
    assert not tokens.requires_grad


def test__the_layers_that_a_config_names_are_those_of_the_run(small_config: Config) -> None:
    learner = build_learner(varied(small_config, *LAYERS["some layers, features"]))
    assert (learner.teacher.layers, learner.teacher.normalize) == ([1, 0], "layer")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target.layers=[0,2]"], r"target\.layers names block 2, but model\.depth is 2: choose from 0 to 1"),
        (["target.layers=[1,1]"], r"target\.layers names a block twice"),
        (["target.layers=[]"], r"target\.layers"),
        (["target.layers=every"], r"target\.layers"),
        (["target.layers=[-1]"], r"target\.layers"),
        (["target.normalize=batch"], r"target\.normalize"),
        (["target.layers=all", "target.kind=pixels"], r"target\.layers chooses .* target\.kind=pixels reads none of"),
        (
            ["target.normalize=layer", *TARGETS["frozen"]],
            r"target\.normalize chooses .* target\.kind=frozen reads none of",
        ),
    ],
)
def test__layers_that_cannot_be_are_reported_with_their_key(
    small_config: Config, overrides: list[str], message: str
) -> None:
    with pytest.raises(CapiError, match=message):
        learner_of(varied(small_config, *overrides))


def test__only_the_mean_is_kept_from_layer_to_layer(small_config: Config) -> None:
    teacher = Teacher(build_student(varied(small_config, "model.depth=9")), layers="all", normalize="instance")
    made, held = NewTensors(), list[int]()
    for block in teacher.average.encoder.blocks:
        block.register_forward_pre_hook(lambda *_: held.append(made.bytes()))
    teacher(torch.randn(2, 3, 32, 24))
    a_layer = 4 * 2 * 48 * 32
    assert held[-1] - held[1] < a_layer < held[1] - held[0] + a_layer // 8
