import subprocess
import sys

import pytest
import torch

from capi.method.losses import soft_cross_entropy


def test__the_test_run_enforces_shapes() -> None:
    from jaxtyping import TypeCheckError

    with pytest.raises(TypeCheckError):
        soft_cross_entropy(torch.randn(2, 3, 4), torch.randn(2, 3, 5), temperature=0.12)


def test__the_networks_work_with_nothing_but_torch() -> None:
    """A stranger to the package manager loads them: no jaxtyping, numpy, pydantic, yaml, rich or typer."""
    code = """
import sys
for name in ("jaxtyping", "numpy", "pydantic", "yaml", "rich", "typer", "safetensors"):
    sys.modules[name] = None
import torch
from capi.models.pretrained import load_released
features = load_released(__import__("pathlib").Path(sys.argv[1]))(torch.randn(1, 3, 16, 16))
print(tuple(features.feature_map.shape))
"""
    from tests.conftest import REFERENCE

    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(REFERENCE / "student.pth")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout.strip() == "(1, 2, 2, 64)"
