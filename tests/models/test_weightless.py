"""Building without weights."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from capi.config.files import load_config
from capi.models.heads import MlpHead
from capi.models.weightless import without_weights
from tests.conftest import REFERENCE


def test__modules_have_shapes_and_no_weights() -> None:
    with without_weights():
        module = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(3, 2, 5), MlpHead(width=8, outputs=5))
    expected = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(3, 2, 5), MlpHead(width=8, outputs=5))
    shapes = {name: value.shape for name, value in expected.named_parameters()}
    assert {name: value.shape for name, value in module.named_parameters()} == shapes
    assert all(value.is_meta for value in module.parameters())


def test__no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    with without_weights():
        nn.Linear(30, 40)
        torch.empty(5).normal_()
    assert torch.equal(torch.get_rng_state(), before)


def test__outside_everything_is_as_before() -> None:
    with without_weights():
        pass
    assert not nn.Linear(2, 2).weight.is_meta
    assert torch.empty(100).normal_().std() > 0.5


def test__a_config_s_model_is_built_in_moments() -> None:
    from capi.zoo.build import build_student

    with without_weights():
        student = build_student(load_config("vitl14"))
    assert sum(parameter.numel() for parameter in student.parameters()) > 4e8
    assert all(parameter.is_meta for parameter in student.parameters())


@pytest.mark.skipif(torch.__version__.startswith("2.9."), reason="this torch imports its compiler by itself")
def test__loading_a_checkpoint_does_not_import_the_compiler_of_torch() -> None:
    code = (
        "import sys, pathlib; from capi.zoo.released import load_released; import torch\n"
        "load_released(pathlib.Path(sys.argv[1]))(torch.zeros(1, 3, 16, 16))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(REFERENCE / "student.pth")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
