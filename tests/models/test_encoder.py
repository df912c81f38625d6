import pytest
import torch

from capi.errors import CapiError
from capi.models.encoder import Encoder, PatchEmbedding
from capi.models.layers import final_norm


def encoder(**changes) -> Encoder:
    sizes = {"width": 32, "depth": 2, "heads": 2, "patch_size": 4, "registers": 4, "mlp_width": 64}
    return Encoder(**(sizes | changes)).eval()


def test__patch_embedding_is_a_convolution() -> None:
    embedding, images = PatchEmbedding(width=8, channels=3, patch_size=4), torch.randn(2, 3, 12, 20)
    convolved = torch.nn.functional.conv2d(images, embedding.weight, embedding.bias, stride=4)
    torch.testing.assert_close(embedding(images, None), convolved.flatten(2).transpose(1, 2))


def test__patch_embedding_of_visible_patches_is_a_selection() -> None:
    embedding, images = PatchEmbedding(width=8, channels=3, patch_size=4), torch.randn(2, 3, 12, 20)
    index = torch.tensor([[0, 7, 14], [3, 4, 5]])
    everything = embedding(images, None)
    expected = torch.stack([everything[0, index[0]], everything[1, index[1]]])
    torch.testing.assert_close(embedding(images, index), expected)


def test__patch_embedding_is_xavier_as_a_matrix() -> None:
    weight = PatchEmbedding(width=64, channels=3, patch_size=8).weight
    bound = (6 / (64 + 3 * 8 * 8)) ** 0.5
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.98 * bound


def test__registers_start_small() -> None:
    assert abs(encoder(width=256, registers=64).registers.std() - 0.02) < 0.001


@pytest.mark.parametrize("registers", [0, 3, 4, 16])
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [(16, 16), (8, 20), (4, 4)])
def test__any_shape_channels_and_registers(size: tuple[int, int], channels: int, registers: int) -> None:
    model = encoder(channels=channels, registers=registers)
    encoded = model(torch.randn(2, channels, *size))
    patches = size[0] * size[1] // 16
    assert encoded.tokens.shape == (2, registers + patches, 32)
    assert encoded.coordinates.shape == (1, registers + patches, 2)
    assert model.patches(encoded).shape == (2, patches, 32)


def test__all_patches_visible_equals_the_whole_image() -> None:
    model, images = encoder(), torch.randn(2, 3, 16, 24)
    whole = model(images)
    listed = model(images, torch.arange(24).expand(2, 24))
    torch.testing.assert_close(whole.tokens, listed.tokens, rtol=1e-4, atol=1e-5)


def test__the_order_of_visible_patches_does_not_matter() -> None:
    model, images = encoder(), torch.randn(1, 3, 16, 16)
    forward = model.patches(model(images, torch.tensor([[1, 5, 9]])))
    backward = model.patches(model(images, torch.tensor([[9, 5, 1]])))
    torch.testing.assert_close(forward, backward.flip(1), rtol=1e-4, atol=1e-5)


def test__registers_stand_around_the_visible_patches_of_each_image() -> None:
    model = encoder()
    encoded = model(torch.randn(2, 3, 20, 20), torch.tensor([[0, 1, 5, 6], [18, 19, 23, 24]]))
    registers = encoded.coordinates[:, :4]
    torch.testing.assert_close(registers.amax(1), torch.tensor([[0.25, 0.25], [1, 1]]))
    torch.testing.assert_close(registers.amin(1), torch.tensor([[0, 0], [0.75, 0.75]]))


def test__tokens_leave_through_a_norm_without_scale() -> None:
    tokens = encoder()(torch.randn(2, 3, 16, 16)).tokens
    torch.testing.assert_close(tokens, final_norm(tokens), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 15, 16), "multiples of the patch"),
        ((1, 3, 0, 16), "multiples"),
        ((1, 1, 16, 16), "with 3 channels"),
    ],
)
def test__images_the_model_cannot_take_are_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(CapiError, match=message):
        encoder()(torch.randn(shape))


@pytest.mark.parametrize(
    ("width", "depth", "heads", "millions"), [(384, 12, 6, 21), (768, 12, 12, 85), (1024, 24, 16, 302)]
)
def test__paper_sizes_have_the_paper_s_parameters(width: int, depth: int, heads: int, millions: int) -> None:
    with torch.device("meta"):
        model = encoder(width=width, depth=depth, heads=heads, patch_size=14, registers=16, mlp_width=4 * width)
    assert abs(sum(parameter.numel() for parameter in model.parameters()) / 1e6 - millions) < 1
