import pytest
import torch

from capi.method.student import student_of
from capi.models.encoder import Encoded, Encoder, MaskTokens
from capi.models.layers import final_norm
from capi.models.predictor import (
    PREDICTORS,
    CrossPredictor,
    FusedPredictor,
    Predictor,
    SelfPredictor,
    hidden_index,
    rows_at,
)


def predictor(**changes) -> CrossPredictor:
    sizes = {"width": 32, "depth": 3, "heads": 2, "context_width": 32, "mlp_width": 64}
    return CrossPredictor(**(sizes | changes)).eval()


def encoded(width: int = 32) -> Encoded:
    return Encoded(torch.randn(2, 7, width), torch.rand(2, 7, 2), torch.rand(30, 2))


@pytest.mark.parametrize("kind", PREDICTORS.values())
def test__mask_tokens_start_small(kind: type) -> None:
    own = {} if kind is FusedPredictor else {"depth": 1, "heads": 16, "context_width": 4, "mlp_width": 8}
    assert abs(kind(width=1024, **own).mask_token.std() - 0.02) < 0.002


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
    model, context, positions = predictor(positions=variant), encoded(), torch.rand(2, 4, 2)
    shuffled = Encoded(context.tokens.flip(1), context.coordinates.flip(1), context.everywhere)
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


GRID, WIDTH = (6, 5), 32
VISIBLE = torch.tensor([[0, 7, 9, 11], [3, 4, 28, 29]])
PREDICT = torch.tensor([[20, 1, 13], [5, 0, 17]])


def encoder(**changes) -> Encoder:
    sizes = {"width": WIDTH, "depth": 2, "heads": 2, "patch_size": 4, "registers": 4, "mlp_width": 64, "grid": GRID}
    return Encoder(**(sizes | changes)).eval()


def variants(positions="axial", width: int = 48) -> dict[str, torch.nn.Module]:
    shape = {"width": width, "depth": 2, "heads": 2, "context_width": WIDTH, "mlp_width": 64, "grid": GRID}
    return {
        "cross": CrossPredictor(**shape, positions=positions),
        "self": SelfPredictor(**shape, positions=positions),
        "self, all masked": SelfPredictor(**shape, positions=positions, mask_tokens="masked"),
        "fused": FusedPredictor(width=WIDTH),
    }


NAMES = list(variants())


def predict(model: Predictor, network: Encoder, *batch: torch.Tensor) -> torch.Tensor:
    """The predictions of a student, before its head."""
    predictions: torch.Tensor = student_of(encoder=network, predictor=model, head=torch.nn.Identity())(*batch)
    return predictions


def images() -> torch.Tensor:
    return torch.randn(2, 3, 24, 20, generator=torch.Generator().manual_seed(3))


def test__the_variants_are_those_of_the_dict() -> None:
    # Other tests may have added predictors of their own.
    ours = {predictor for predictor in PREDICTORS.values() if predictor.__module__.startswith("capi.")}
    assert {type(model) for model in variants().values()} == ours


@pytest.mark.parametrize("positions", ["axial", "released", "learned"])
@pytest.mark.parametrize("name", NAMES)
def test__every_predictor_keeps_the_contract(name: str, positions) -> None:
    torch.manual_seed(1)
    model, network = variants(positions)[name].eval(), encoder(positions=positions)
    assert isinstance(model, Predictor)
    predictions = predict(model, network, images(), VISIBLE, PREDICT)
    assert predictions.shape == (2, 3, model.width)
    torch.testing.assert_close(predictions, final_norm(predictions), rtol=1e-3, atol=1e-4)
    whole = network(images())
    assert model.pool(network, whole).shape == (2, model.width)
    # Nothing of the hidden patches is seen.
    hidden = torch.ones(2, 30).scatter(1, VISIBLE, 0).view(2, 1, 6, 5).repeat_interleave(4, 2).repeat_interleave(4, 3)
    scrambled = torch.where(hidden.bool(), torch.randn(2, 3, 24, 20), images())
    torch.testing.assert_close(predict(model, network, scrambled, VISIBLE, PREDICT), predictions)
    assert not torch.allclose(predict(model, network, images().flip(-1), VISIBLE, PREDICT), predictions)


@pytest.mark.parametrize("name", NAMES)
def test__predictions_differ_by_position_and_follow_the_order_asked_for(name: str) -> None:
    model, network = variants()[name].eval(), encoder()
    predictions = predict(model, network, images(), VISIBLE, PREDICT)
    assert predictions.std(1).max() > 1e-4
    turned = predict(model, network, images(), VISIBLE, PREDICT.flip(1))
    torch.testing.assert_close(turned.flip(1), predictions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "sees"), [("cross", False), ("self", True)])
def test__whether_a_prediction_changes_with_the_other_mask_tokens(name: str, sees: bool) -> None:
    model, network = variants()[name].eval(), encoder()
    others = torch.tensor([[20, 2, 14], [5, 1, 18]])
    first, second = (predict(model, network, images(), VISIBLE, index)[:, 0] for index in (PREDICT, others))
    assert torch.allclose(first, second, rtol=1e-4, atol=1e-5) != sees


@pytest.mark.parametrize("name", ["self, all masked", "fused"])
def test__mask_tokens_at_all_masked_positions_see_each_other_whichever_are_read(name: str) -> None:
    model, network = variants()[name].eval(), encoder()
    together = predict(model, network, images(), VISIBLE, PREDICT)
    alone = predict(model, network, images(), VISIBLE, PREDICT[:, 1:2])
    torch.testing.assert_close(alone, together[:, 1:2], rtol=1e-4, atol=1e-5)
    # A mask token elsewhere shows by its effect: one patch more is hidden, and one less visible.
    fewer = predict(model, network, images(), VISIBLE[:, :3], PREDICT)
    assert not torch.allclose(fewer, together, rtol=1e-4, atol=1e-5)
    gradient = torch.autograd.grad(together.square().sum(), model.mask_token)[0]
    assert gradient.abs().sum() > 0


def test__a_mask_token_of_the_fused_model_changes_the_others() -> None:
    network = encoder()
    hidden = hidden_index(VISIBLE, 30)
    tokens = torch.randn(2, hidden.shape[1], WIDTH)
    first = network(images(), VISIBLE, MaskTokens(tokens, hidden)).tokens
    changed = tokens.clone()
    changed[:, -1] += 1
    second = network(images(), VISIBLE, MaskTokens(changed, hidden)).tokens
    # Every token, visible patches included, sees every mask token.
    assert ((first - second).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("positions", ["axial", "learned"])
@pytest.mark.parametrize("name", NAMES)
def test__gradients_reach_every_parameter_of_encoder_and_predictor(name: str, positions) -> None:
    model, network = variants(positions)[name], encoder(positions=positions)
    predict(model, network, images(), VISIBLE, PREDICT).pow(3).sum().backward()
    for module in (model, network):
        assert [parameter for parameter, weight in module.named_parameters() if weight.grad is None] == []


def block_parameters(width: int, context: int, mlp: int) -> int:
    """Queries and output, keys and values, the MLP, and two norms."""
    return 2 * width**2 + 2 * width * context + 2 * width * mlp + 2 * width


def test__parameters_by_hand() -> None:
    def count(module: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    narrow, same, table = variants(), variants(width=32), variants("learned")
    assert count(narrow["cross"]) == 48 + 2 * block_parameters(48, 32, 64)
    assert count(narrow["self"]) == 48 + 2 * block_parameters(48, 48, 64) + 32 * 48
    assert count(same["self"]) == 32 + 2 * block_parameters(32, 32, 64)
    assert count(narrow["fused"]) == 32
    assert count(table["cross"]) == count(narrow["cross"]) + 30 * 48
    embedding = 3 * 16 * 32 + 32
    assert count(encoder()) == embedding + 4 * 32 + 2 * block_parameters(32, 32, 64)
    assert count(encoder(positions="learned")) == count(encoder()) + 30 * 32


def test__pooled_of_self_asks_at_all_positions_and_of_fused_is_the_mean_patch() -> None:
    network, models = encoder(), variants()
    whole = network(images())
    asked = models["self"].eval()(whole, whole.coordinates[:, 4:], depth=1)
    torch.testing.assert_close(models["self"].pool(network, whole), asked.mean(1))
    torch.testing.assert_close(models["fused"].pool(network, whole), whole.tokens[:, 4:].mean(1))


def test__hidden_patches_are_the_others_in_order() -> None:
    hidden = hidden_index(VISIBLE, 30)
    for row, visible in zip(hidden.tolist(), VISIBLE.tolist(), strict=True):
        assert row == [patch for patch in range(30) if patch not in visible]
    tokens = hidden[..., None].float()
    assert torch.equal(rows_at(tokens, hidden, PREDICT)[..., 0], PREDICT.float())
