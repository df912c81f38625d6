"""Every other method's encoder as a student's: it sees the visible patches as it sees them within the whole image."""

import pytest
import torch
from torch import Tensor

from capi.errors import CapiError
from capi.models.encoder import MaskTokens, PatchEncoder
from capi.models.plain_vit import PlainEncoder, rotary_angles
from capi.zoo.baselines.registry import BASELINES
from tests.zoo.baseline_checkpoints import images, randomize, small

# One of each layout and of each variant of it; and of each way to other grids.
MASKABLE = {
    **{each.layout.method + " " + name: name for name, each in BASELINES.items() if "vits" in name or "vitl" in name},
    "BEiT": "beit_vitl16",
    "I-JEPA": "ijepa_vith14_in1k",
    "gated": "dinov2_reg_vitg14",
}
OWN_SIZE_ONLY = {name for name, each in BASELINES.items() if each.architecture.relative_bias != "none"}
VISIBLE = torch.tensor([[7, 2, 11, 5], [0, 15, 3, 8]])


def encoder(name: str, **changes: str) -> PlainEncoder:
    model = PlainEncoder(small(name, **changes).architecture).eval()
    randomize(model)
    return model


def slowly(model: PlainEncoder, x: Tensor, visible: Tensor) -> Tensor:
    """All patches in the sequence, the hidden ones as keys that nobody may attend to; the tokens that are visible."""
    of, rows, columns = model.architecture, x.shape[2] // 4, x.shape[3] // 4
    tokens = model._embed(x, rows, columns)
    shown = torch.zeros(len(x), rows * columns, dtype=torch.bool).scatter(1, visible, value=True)
    shown = torch.cat([torch.ones(len(x), model.prefix, dtype=torch.bool), shown], dim=1)
    count = tokens.shape[1]
    hidden = torch.where(shown, 0.0, -torch.inf)[:, None, None, :].expand(-1, of.heads, count, count)
    angles = None if model.rotary_periods is None else rotary_angles(rows, columns, model.rotary_periods)[None]
    for block in model.blocks:
        table = model.relative_bias or block.relative_bias
        bias = hidden if table is None else table() + hidden
        own, block.relative_bias = block.relative_bias, None
        tokens = block(tokens, bias, angles)
        block.relative_bias = own
    if model.final_norm is not None:
        tokens = model.final_norm(tokens)
    patches = tokens[:, model.prefix :].gather(1, visible[..., None].expand(-1, -1, of.width))
    return torch.cat([tokens[:, : model.prefix], patches], dim=1)


@pytest.mark.parametrize("name", MASKABLE.values(), ids=MASKABLE.keys())
def test__hidden_patches_are_as_if_nobody_attended_to_them(name: str) -> None:
    model, side = encoder(name), 5 if name in OWN_SIZE_ONLY else 4
    x = images(side, side)
    assert isinstance(model, PatchEncoder)
    torch.testing.assert_close(model(x, VISIBLE).tokens, slowly(model, x, VISIBLE), atol=1e-4, rtol=1e-4)


def test__biases_in_each_block_are_those_of_the_visible_patches() -> None:
    model, x = encoder("beit_vitl16", relative_bias="block"), images()
    torch.testing.assert_close(model(x, VISIBLE).tokens, slowly(model, x, VISIBLE), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MASKABLE.values(), ids=MASKABLE.keys())
def test__all_patches_visible_are_the_whole_image_in_any_order(name: str) -> None:
    model, x = encoder(name), images()
    order = torch.randperm(25)
    whole, listed = model(x), model(x, order.expand(2, -1))
    torch.testing.assert_close(listed.tokens[:, : model.prefix], whole.tokens[:, : model.prefix], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.patches(listed), model.patches(whole)[:, order], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        listed.coordinates[:, model.prefix :], whole.coordinates[0, model.prefix :][None, order].expand(2, -1, -1)
    )


@pytest.mark.parametrize("name", ["dinov2_reg_vitl14", "beit_vitl16", "dinov3_vitl16"])
def test__mask_tokens_stand_at_their_places(name: str) -> None:
    """A mask token that is what the patch embedding gives for a patch is that patch."""
    model, x = encoder(name), images()
    visible, hidden = torch.randperm(25).expand(2, -1).split([16, 9], dim=1)
    masked = MaskTokens(model.patch_embedding(x, hidden), hidden)
    expected = model(x, torch.cat([visible, hidden], dim=1))
    torch.testing.assert_close(model(x, visible, masked).tokens, expected.tokens, atol=1e-5, rtol=1e-5)


def test__an_encoder_with_causal_attention_is_refused_with_the_reason() -> None:
    with pytest.raises(CapiError, match="attention from each patch to earlier ones alone, so it cannot leave out"):
        encoder("aim_600m")
