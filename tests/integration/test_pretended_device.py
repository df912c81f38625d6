"""Code for an accelerator on tensors that say they lie on one, backward passes included (scripts/pretend_device.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_SCRIPTS = Path("scripts")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="torch has no backends of Python's before 2.10",
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(path.resolve()) for path in (Path(), _SCRIPTS))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    "case",
    [
        "train: as the paper trains",
        pytest.param("evaluate: folder/knn", marks=pytest.mark.long),
        pytest.param("", marks=pytest.mark.thorough, id="all"),
    ],
)
def test__on_a_pretended_device_everything_gives_what_the_cpu_gives(case: str) -> None:
    done = run(str(_SCRIPTS / "cuda_dry_run.py"), "--device", "standin", "--only", case)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok      " in done.stdout


_MIXED = """
import torch
from pretend_device import WrongDeviceError, pretending, stand_in
device = stand_in()
with pretending(device):
    weight = torch.randn(3, 2, device=device, requires_grad=True)
    (torch.ones(4, 3, device=device) @ weight).sum().backward()
    assert weight.grad.device == device
    assert weight.grad.tolist() == [[4.0, 4.0]] * 3
    try:
        torch.ones(4, 3) @ weight
    except WrongDeviceError as error:
        print(error)
"""


def test__a_tensor_left_on_the_cpu_is_an_error() -> None:
    done = run("-c", _MIXED)
    assert done.returncode == 0, done.stderr
    assert "two devices: cpu (4, 3), standin:0 (3, 2)" in done.stdout
