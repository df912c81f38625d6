import torch

from capi.models.heads import LinearHead


def test__logits_are_cosines_times_a_learned_length() -> None:
    head, predictions = LinearHead(width=8, prototypes=5), torch.randn(2, 3, 8)
    torch.nn.init.uniform_(head.length, 0.5, 2)
    cosine = torch.cosine_similarity(predictions[:, :, None], head.direction[None, None], dim=-1)
    torch.testing.assert_close(head(predictions), cosine * head.length.squeeze(), rtol=1e-4, atol=1e-5)


def test__lengths_start_at_one_and_directions_truncated_normal() -> None:
    head = LinearHead(width=64, prototypes=500)
    assert (head.length == 1).all()
    assert abs(head.direction.std() - 0.02) < 0.0005


def test__a_zero_prediction_gives_zero_logits() -> None:
    assert (LinearHead(width=8, prototypes=5)(torch.zeros(1, 1, 8)) == 0).all()
