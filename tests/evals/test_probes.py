import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capi.errors import CapiError
from capi.evals.probes import AttentiveProbes, LinearProbes, attention_pooling, head_width


def shaken(probes: torch.nn.Module) -> torch.nn.Module:
    """Every setting with numbers of its own, biases too, large enough that attention is far from even."""
    with torch.no_grad():
        for parameter in probes.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return probes


def setting_of(probes: torch.nn.Module, index: int) -> dict[str, Tensor]:
    """The parameters of one setting as leaves of their own."""
    return {name: value[index].clone().requires_grad_() for name, value in probes.state_dict().items()}


def plain_attention(state: dict[str, Tensor], tokens: Tensor, heads: int) -> Tensor:
    """The head by torch's own multi-head attention, whose outward and query maps are set to do nothing."""
    width, identity = tokens.shape[2], torch.eye(tokens.shape[2])
    attended, _ = F.multi_head_attention_forward(
        state["query"].expand(1, len(tokens), width),
        tokens.transpose(0, 1),
        tokens.transpose(0, 1),
        embed_dim_to_check=width,
        num_heads=heads,
        in_proj_weight=None,
        in_proj_bias=torch.cat([torch.zeros(width), state["key.bias"], state["value.bias"]]),
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=identity,
        out_proj_bias=None,
        need_weights=False,
        use_separate_proj_weight=True,
        q_proj_weight=identity,
        k_proj_weight=state["key.weight"],
        v_proj_weight=state["value.weight"],
    )
    return F.linear(attended[0], state["classifier.weight"], state["classifier.bias"])


@pytest.mark.parametrize(
    ("width", "expected"), [(64, 64), (384, 64), (1024, 64), (32, 32), (96, 48), (100, 50), (192, 64), (67, 1), (1, 1)]
)
def test__head_width_is_the_largest_divisor_up_to_64(width: int, expected: int) -> None:
    assert head_width(width) == expected


@pytest.mark.parametrize("width", [32, 128, 96, 7])
def test__equals_plain_multi_head_attention(width: int) -> None:
    probes = shaken(AttentiveProbes(settings=3, width=width, classes=5))
    tokens, wanted = torch.randn(4, 9, width), torch.randn(3, 4, 5)
    logits = probes(tokens)
    (logits * wanted).sum().backward()
    heads = width // head_width(width)
    for index in range(3):
        state = setting_of(probes, index)
        expected = plain_attention(state, tokens, heads)
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(logits[index], expected, rtol=1e-5, atol=1e-5)
        (expected * wanted[index]).sum().backward()
        for name, parameter in probes.named_parameters():
            if name == "key.bias":
                assert parameter.grad is None
                assert state[name].grad.abs().max() < 1e-4
            else:
                torch.testing.assert_close(parameter.grad[index], state[name].grad, rtol=1e-4, atol=1e-5)


def test__the_bias_of_the_key_changes_nothing_in_plain_attention_either() -> None:
    state = setting_of(shaken(AttentiveProbes(settings=1, width=24, classes=5)), 0)
    tokens = torch.randn(4, 9, 24)
    moved = {**state, "key.bias": state["key.bias"] + torch.randn(24)}
    torch.testing.assert_close(plain_attention(moved, tokens, 1), plain_attention(state, tokens, 1))


def test__pooling_is_a_weighted_mean_for_each_direction() -> None:
    tokens, directions = torch.randn(3, 8, 6), torch.randn(4, 6)
    pooled = attention_pooling(tokens, directions)
    for image in range(3):
        for number in range(4):
            scores = torch.stack([torch.dot(token, directions[number]) for token in tokens[image]]).exp()
            expected = sum(score * token for score, token in zip(scores / scores.sum(), tokens[image], strict=True))
            torch.testing.assert_close(pooled[image, number], expected)


def test__autograd_keeps_weights_and_pooled_tokens_and_little_else() -> None:
    settings, images, count, width, heads = 4, 6, 50, 128, 2
    probes, tokens = AttentiveProbes(settings=settings, width=width, classes=3), torch.randn(images, count, width)
    owned = {tensor.untyped_storage().data_ptr() for tensor in (tokens, *probes.parameters())}
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = probes(tokens)
    assert logits.requires_grad
    extra = sum(tensor.numel() for place, tensor in saved.items() if place not in owned)
    weights, pooled = images * count * heads * settings, images * heads * settings * width
    values, directions = settings * images * width, settings * heads * width
    # No copy of the tokens (38400 numbers), and none of their keys and values (as many again for each setting).
    assert weights + pooled <= extra <= weights + pooled + values + 2 * directions


@pytest.mark.parametrize(("width", "classes"), [(32, 10), (64, 1), (96, 7), (128, 1000)])
def test__a_setting_has_as_many_parameters_as_the_paper_counts(width: int, classes: int) -> None:
    attentive = AttentiveProbes(settings=2, width=width, classes=classes)
    linear = LinearProbes(settings=2, width=width, classes=classes)
    assert sum(p.numel() for p in attentive.parameters()) == 2 * (2 * width**2 + (3 + classes) * width + classes)
    assert sum(p.numel() for p in linear.parameters()) == 2 * (width + 1) * classes


def test__linear_probes_are_linear_maps() -> None:
    probes, vectors = shaken(LinearProbes(settings=3, width=6, classes=4)), torch.randn(5, 6)
    logits = probes(vectors)
    for index in range(3):
        state = setting_of(probes, index)
        torch.testing.assert_close(logits[index], vectors @ state["classifier.weight"].T + state["classifier.bias"])


@pytest.mark.parametrize("kind", [AttentiveProbes, LinearProbes])
def test__settings_start_alike_whatever_their_number(kind: type[torch.nn.Module]) -> None:
    three, single, again, other = (
        kind(settings=settings, width=64, classes=40, seed=seed).state_dict()
        for settings, seed in ((3, 5), (1, 5), (3, 5), (3, 6))
    )
    for name, value in three.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, single[name].expand_as(value))
        if name.endswith("bias"):
            assert (value == 0).all()
        else:
            assert not torch.equal(value, other[name])
            assert value.std().item() == pytest.approx(0.02, rel=0.3)
            assert abs(value.mean()) < 0.01


def test__drawing_probes_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    AttentiveProbes(settings=2, width=8, classes=3, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("kind", "shape"), [(AttentiveProbes, (5, 7, 12)), (LinearProbes, (5, 12))])
def test__a_selected_setting_is_a_copy_that_answers_alike(kind: type[torch.nn.Module], shape: tuple[int, ...]) -> None:
    probes, inputs = shaken(kind(settings=3, width=12, classes=4)), torch.randn(shape)
    logits = probes(inputs)
    chosen = probes.select(1)
    assert type(chosen) is kind
    assert chosen.settings == 1
    torch.testing.assert_close(chosen(inputs), logits[1:2])
    shaken(chosen)
    assert torch.equal(probes(inputs), logits)


@pytest.mark.parametrize(("kind", "shape"), [(AttentiveProbes, (2, 3, 10)), (LinearProbes, (2, 10))])
def test__features_of_another_width_are_an_error(kind: type[torch.nn.Module], shape: tuple[int, ...]) -> None:
    with pytest.raises(CapiError, match="features of width 12, but got 10"):
        kind(settings=2, width=12, classes=4)(torch.randn(shape))


def test__probes_of_nothing_are_an_error() -> None:
    with pytest.raises(CapiError, match="classes is 0"):
        LinearProbes(settings=1, width=3, classes=0)
