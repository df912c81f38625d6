import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import capi
from capi.api import as_config, check, choose_device, least_bytes, mask_sampler
from capi.config.loading import parse_config
from capi.config.schema import Config
from capi.method.masking import Grid
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


def test__the_least_memory_is_less_than_a_real_step_takes() -> None:
    config = parse_config({"optimization": {"batch_size": 8}, "model": {"depth": 2}, "clustering": {"prototypes": 512}})
    cost = check(config, device="cpu", rounds=1).cost
    visible, _, _ = mask_sampler(config).counts(Grid(*config.grid))
    assert 1e6 < least_bytes(config, visible) < cost.peak_bytes


def test__a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu").type == "cpu"
    for name in ("cuda:99", "toaster"):
        with pytest.raises(capi.CapiError, match="is not there"):
            choose_device(name)


def test__checking_with_images_looks_at_them_and_writes_nothing(small_config: Config, tmp_path: Path) -> None:
    for number in range(4):
        Image.fromarray(np.full((20 + number, 30, 3), 100, dtype=np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    before = sorted(tmp_path.iterdir())
    found = check(small_config, data=tmp_path, device="cpu", rounds=1)
    assert found.data is not None
    assert (found.data.total, list(found.data.broken)) == (5, ["broken.png"])
    assert (found.data.smallest, found.data.largest) == ((20, 30), (23, 30))
    assert found.cost.batch_size == 6
    assert found.images_per_second_read
    assert sorted(tmp_path.iterdir()) == before


def test__micro_batches_lower_the_least_memory(small_config: Config) -> None:
    optimization = small_config.optimization.model_copy(update={"micro_batches": 3})
    assert least_bytes(small_config.model_copy(update={"optimization": optimization}), 17) < least_bytes(
        small_config, 17
    )


def test__overrides_go_with_a_recipe(small_config: Config) -> None:
    assert as_config("tiny4", ["seed=5"]).seed == 5
    assert as_config(small_config) is small_config
    with pytest.raises(capi.CapiError, match="overrides go with a recipe"):
        as_config(small_config, ["seed=5"])
