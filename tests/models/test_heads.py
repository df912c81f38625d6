import pytest
import torch

from capi.models.heads import HEADS, LinearHead, LinearMap, MlpHead


def test__logits_are_cosines_times_a_learned_length() -> None:
    head, predictions = LinearHead(width=8, outputs=5), torch.randn(2, 3, 8)
    torch.nn.init.uniform_(head.length, 0.5, 2)
    cosine = torch.cosine_similarity(predictions[:, :, None], head.direction[None, None], dim=-1)
    torch.testing.assert_close(head(predictions), cosine * head.length.squeeze(), rtol=1e-4, atol=1e-5)


def test__lengths_start_at_one_and_directions_truncated_normal() -> None:
    head = LinearHead(width=64, outputs=500)
    assert (head.length == 1).all()
    assert abs(head.direction.std() - 0.02) < 0.0005


def test__a_zero_prediction_gives_zero_logits() -> None:
    assert (LinearHead(width=8, outputs=5)(torch.zeros(1, 1, 8)) == 0).all()


def test__the_mlp_head_is_three_layers_and_the_normalized_map_by_hand() -> None:
    head, predictions = MlpHead(width=8, outputs=5, hidden=12, bottleneck=6), torch.randn(2, 3, 8)
    weights = [layer for layer in head.layers if isinstance(layer, torch.nn.Linear)]
    x = predictions
    for number, layer in enumerate(weights):
        x = x @ layer.weight.T + layer.bias
        x = x if number == 2 else x * 0.5 * (1 + torch.erf(x / 2**0.5))
    x = x / x.norm(dim=-1, keepdim=True)
    rows = head.last.direction / head.last.direction.norm(dim=1, keepdim=True)
    torch.testing.assert_close(head(predictions), x @ rows.T, rtol=1e-4, atol=1e-6)


def test__the_mlp_head_has_the_parameters_of_ibot_s() -> None:
    head = MlpHead(width=384, outputs=100)
    expected = 384 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * 256 + 256 + 100 * 256 + 100
    assert sum(parameter.numel() for parameter in head.parameters()) == expected


def test__a_linear_map_keeps_the_scale_of_predictions() -> None:
    layer, predictions = LinearMap(width=8, outputs=5), torch.randn(2, 3, 8)
    torch.testing.assert_close(layer(2 * predictions), 2 * predictions @ layer.weight.T)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


@pytest.mark.parametrize("kind", HEADS)
def test__every_head_gives_logits_and_gradients_to_all_its_parameters(kind) -> None:
    head = HEADS[kind](width=8, outputs=7)
    logits = head(torch.randn(2, 3, 8))
    assert logits.shape == (2, 3, 7)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
