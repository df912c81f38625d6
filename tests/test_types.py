import subprocess
import sys
from typing import Any

import pytest
import torch

from capi.data.crops import image_size_of
from capi.method.losses import soft_cross_entropy
from capi.types import IMAGENET, Features, Statistics, VisionEncoder, statistics_of


class Means:
    """The least that an encoder needs."""

    width, patch_size = 3, 4

    def __call__(self, images: torch.Tensor, *, pooled: bool = True) -> Features:
        means = torch.nn.functional.avg_pool2d(images, 4).permute(0, 2, 3, 1)
        return Features(None, images.new_zeros(len(images), 0, 3), means)


def test__anything_with_a_width_a_patch_size_and_a_call_is_an_encoder() -> None:
    assert isinstance(Means(), VisionEncoder)
    assert not isinstance(torch.nn.Linear(3, 3), VisionEncoder)
    assert Means()(torch.zeros(2, 3, 8, 12)).feature_map.shape == (2, 2, 3, 3)


def test__statistics_are_the_encoder_s_or_imagenet_s() -> None:
    encoder = Means()
    assert statistics_of(encoder) == IMAGENET == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    encoder.statistics = Statistics((0.5,), (0.1,))
    assert statistics_of(encoder) == ((0.5,), (0.1,))


@pytest.mark.parametrize(("own", "size"), [(None, (224, 224)), (48, (48, 48)), ((32, 48), (32, 48)), ([8, 4], (8, 4))])
def test__the_size_of_images_is_the_encoder_s_or_the_paper_s(own: Any, size: tuple[int, int]) -> None:
    encoder = Means()
    assert image_size_of(encoder) == (224, 224)
    encoder.image_size = own
    assert image_size_of(encoder) == size


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
from capi.zoo.released import load_released
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
