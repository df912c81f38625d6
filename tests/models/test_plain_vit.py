"""The plain vision transformer: what goes where in its features."""

import pytest
import torch

from capi.errors import CapiError
from capi.types import VisionEncoder
from capi.zoo.baselines.registry import PAPER_BASELINES
from tests.zoo.baseline_checkpoints import images, random_model, small


@pytest.mark.parametrize("name", PAPER_BASELINES)
def test__every_kind_keeps_the_contract_of_an_encoder(name: str) -> None:
    model = random_model(small(name))
    assert isinstance(model, VisionEncoder)
    features = model(images())
    assert features.feature_map.shape == (2, 5, 5, 24)
    assert features.registers.shape == (2, model.architecture.registers, 24)
    assert features.pooled is not None
    assert features.pooled.shape == (2, 24)
    assert model(images(), pooled=False).pooled is None


@pytest.mark.parametrize("name", ["dino_vitb16", "dinov2_reg_vitl14", "aim_600m", "data2vec2_vitl16"])
def test__patches_stand_in_the_order_of_the_image(name: str) -> None:
    """A patch that changes changes most at its own place, once there is no attention to speak of."""
    model = random_model(small(name))
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.output.weight)
    x = images(count=1)
    changed = x.clone()
    changed[:, :, 8:12, 4:8] += 1
    moved = (model(changed).feature_map - model(x).feature_map).norm(dim=-1)[0] > 1e-4
    assert moved.nonzero().tolist() == [[2, 1]]


def test__sizes_that_no_patch_divides_and_other_channels_are_refused() -> None:
    model = random_model(small("dino_vitb16"))
    with pytest.raises(CapiError, match="cannot be cut into patches of 4"):
        model(torch.zeros(1, 3, 20, 22))
    with pytest.raises(CapiError, match="takes images of 3 channels, but these have 1"):
        model(torch.zeros(1, 1, 20, 20))
