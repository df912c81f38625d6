import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capi
from tests.conftest import REFERENCE


def test__load_gives_a_vision_encoder(reference_checkpoint: Path) -> None:
    for path in (reference_checkpoint, str(reference_checkpoint)):
        encoder = capi.load(path)
        assert isinstance(encoder, capi.VisionEncoder)
        assert (encoder.width, encoder.patch_size) == (64, 8)
        assert isinstance(encoder(torch.randn(1, 3, 16, 24)), capi.Features)


@pytest.mark.parametrize(
    "images",
    ["torch.randn(3, 16, 24)", "torch.zeros(1, 3, 16, 24, dtype=torch.uint8)", "torch.zeros(1, 3, 16, 24).double()"],
)
def test__images_of_another_kind_are_refused(images: str) -> None:
    """In a process of its own: here the annotations would speak first."""
    code = f"import torch, capi; capi.load('{REFERENCE / 'student.pth'}')({images})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "CapiError: images must be float32 of shape (batch, channels, height, width)" in result.stderr
