import pytest
import torch

from capi.errors import CapiError
from capi.models.layers import MLP, Attention, Block
from capi.models.positions import rotary_table, rotate


def table(images: int, tokens: int, head_width: int = 8):
    return rotary_table(torch.rand(images, tokens, 2), head_width, "axial")


def test__attention_equals_softmax_of_scaled_products() -> None:
    attention = Attention(width=16, heads=2, context_width=12)
    x, context = torch.randn(2, 3, 16), torch.randn(2, 5, 12)
    query_table, key_table = table(2, 3), table(2, 5)
    query = rotate(attention.query(x).view(2, 3, 2, 8), query_table)
    key = rotate(attention.key(context).view(2, 5, 2, 8), key_table)
    weights = torch.softmax(torch.einsum("bqhw,bkhw->bhqk", query, key) / 8**0.5, -1)
    mixed = torch.einsum("bhqk,bkhw->bqhw", weights, attention.value(context).view(2, 5, 2, 8))
    expected = attention.output(mixed.reshape(2, 3, 16))
    torch.testing.assert_close(attention(x, context, query_table, key_table), expected)


def test__mlp_is_two_maps_with_an_exact_gelu() -> None:
    mlp, x = MLP(width=8, hidden=20), torch.randn(3, 8)
    hidden = mlp.expand(x)
    gelu = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    torch.testing.assert_close(mlp(x), mlp.contract(gelu))


def test__blocks_have_no_biases() -> None:
    block = Block(width=16, heads=2, mlp_width=64, drop_rate=0.0)
    assert not [name for name, _ in block.named_parameters() if "bias" in name]


def test__linear_weights_are_xavier_uniform() -> None:
    weight = MLP(width=64, hidden=256).expand.weight
    bound = (6 / (64 + 256)) ** 0.5
    assert weight.abs().max() <= bound
    assert abs(weight.std() - bound / 3**0.5) < 0.02 * bound


def test__a_block_adds_its_two_branches() -> None:
    block = Block(width=16, heads=2, mlp_width=64, drop_rate=0.2).eval()
    x, rotary = torch.randn(3, 5, 16), table(3, 5)
    middle = x + block.attention(block.attention_norm(x), block.attention_norm(x), rotary, rotary)
    torch.testing.assert_close(block(x, rotary), middle + block.mlp(block.mlp_norm(middle)))


def test__cross_attention_norms_the_queries_only() -> None:
    block = Block(width=16, heads=2, mlp_width=64, drop_rate=0.0, context_width=12)
    x, context, query_table, key_table = torch.randn(3, 2, 16), torch.randn(3, 5, 12), table(3, 2), table(3, 5)
    middle = x + block.attention(block.attention_norm(x), context, query_table, key_table)
    expected = middle + block.mlp(block.mlp_norm(middle))
    torch.testing.assert_close(block(x, query_table, context, key_table), expected)


@pytest.mark.parametrize(("images", "rows"), [(1, 1), (2, 1), (10, 8), (64, 51)])
def test__stochastic_depth_runs_each_branch_for_the_same_number_of_images(images: int, rows: int) -> None:
    block = Block(width=16, heads=2, mlp_width=64, drop_rate=0.2)
    seen = []
    block.attention.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    block.mlp.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    block(torch.randn(images, 5, 16), table(images, 5))
    assert seen == [rows, rows]
    assert block.images_kept(images) == rows


def test__stochastic_depth_draws_again_for_each_branch() -> None:
    block, x = Block(width=16, heads=2, mlp_width=64, drop_rate=0.5), torch.randn(64, 5, 16)
    torch.nn.init.zeros_(block.attention.output.weight)
    attended, mapped = [], []
    block.attention.register_forward_hook(lambda _, inputs, __: attended.append(inputs[0]))
    block.mlp.register_forward_hook(lambda _, inputs, __: mapped.append(inputs[0]))
    block(x, table(64, 5))
    # The attention adds nothing here, so both branches see the same rows of the same images.
    same = (attended[0][:, None] == mapped[0][None]).flatten(2).all(2).sum()
    assert 4 < same < 28


def test__stochastic_depth_scales_what_it_keeps() -> None:
    block = Block(width=16, heads=2, mlp_width=64, drop_rate=0.5)
    torch.nn.init.zeros_(block.mlp.contract.weight)
    x, rotary = torch.randn(4, 5, 16), table(4, 5)
    branch = block.eval()(x, rotary) - x
    dropped = block.train()(x, rotary) - x
    has_value = dropped.flatten(1).abs().sum(1) > 0
    assert has_value.sum() == 2
    torch.testing.assert_close(dropped[has_value], 2 * branch[has_value])


def test__stochastic_depth_keeps_the_expectation() -> None:
    block = Block(width=8, heads=1, mlp_width=16, drop_rate=0.2)
    torch.nn.init.zeros_(block.mlp.contract.weight)
    x, rotary = torch.randn(5, 3, 8), table(5, 3)
    branch = (block.eval()(x, rotary) - x).flatten(1)
    block.train()
    mean = torch.stack([block(x, rotary) - x for _ in range(400)]).mean(0).flatten(1)
    share = (mean * branch).sum(1) / branch.square().sum(1)
    # Kept with probability 0.8 and then scaled by 1.25: a deviation of 0.025 over 400 draws.
    torch.testing.assert_close(share, torch.ones(5), rtol=0, atol=0.125)


def test__a_shared_table_serves_every_image_under_stochastic_depth() -> None:
    block = Block(width=16, heads=2, mlp_width=64, drop_rate=0.5)
    shared = table(1, 5)
    assert shared.select(torch.tensor([2, 0])) is shared
    assert block(torch.randn(4, 5, 16), shared).shape == (4, 5, 16)


def test__a_head_width_that_rotary_positions_cannot_split_is_refused() -> None:
    with pytest.raises(CapiError, match="multiple of 4"):
        Attention(width=18, heads=3, context_width=18)
    with pytest.raises(CapiError, match="multiple of 4"):
        Attention(width=16, heads=3, context_width=16)
