import pytest
import torch

from capi.models.encoder import Encoded
from capi.models.layers import final_norm
from capi.models.predictor import Predictor


def predictor(**changes) -> Predictor:
    sizes = {"width": 32, "depth": 3, "heads": 2, "context_width": 32, "mlp_width": 64}
    return Predictor(**(sizes | changes)).eval()


def encoded(width: int = 32) -> Encoded:
    return Encoded(torch.randn(2, 7, width), torch.rand(2, 7, 2))


def test__predictions_never_see_each_other() -> None:
    model, context, positions = predictor(), encoded(), torch.rand(2, 5, 2)
    together = model(context, positions)
    moved = positions.clone()
    moved[:, 1:] = torch.rand(2, 4, 2)
    torch.testing.assert_close(model(context, moved)[:, :1], together[:, :1])
    assert not torch.allclose(model(context, moved)[:, 1:], together[:, 1:])


def test__predictions_depend_on_their_position_and_on_the_context() -> None:
    model, context = predictor(), encoded()
    predictions = model(context, torch.rand(2, 4, 2))
    assert predictions.std(dim=1).min() > 1e-4
    assert not torch.allclose(model(encoded(), torch.zeros(2, 1, 2)), model(context, torch.zeros(2, 1, 2)))


@pytest.mark.parametrize("variant", ["axial", "released"])
def test__the_order_of_the_context_does_not_matter(variant) -> None:
    model, context, positions = predictor(rope=variant), encoded(), torch.rand(2, 4, 2)
    shuffled = Encoded(context.tokens.flip(1), context.coordinates.flip(1))
    torch.testing.assert_close(model(context, positions), model(shuffled, positions), rtol=1e-4, atol=1e-5)


def test__another_width_than_the_encoder_s() -> None:
    model = predictor(width=48, heads=4, mlp_width=100, context_width=20)
    assert model(encoded(20), torch.rand(2, 4, 2)).shape == (2, 4, 48)


def test__depth_stops_after_so_many_blocks() -> None:
    deep, context, positions = predictor(), encoded(), torch.rand(2, 4, 2)
    shallow = predictor(depth=1)
    shallow.load_state_dict({name: value for name, value in deep.state_dict().items() if name in shallow.state_dict()})
    torch.testing.assert_close(deep(context, positions, depth=1), shallow(context, positions))
    assert not torch.allclose(deep(context, positions, depth=1), deep(context, positions))


def test__predictions_leave_through_a_norm_without_scale() -> None:
    predictions = predictor()(encoded(), torch.rand(2, 4, 2))
    torch.testing.assert_close(predictions, final_norm(predictions), rtol=1e-3, atol=1e-4)
