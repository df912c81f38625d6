import torch

from capi.models.features import CapiEncoder
from capi.types import IMAGENET, Features, Statistics, VisionEncoder, statistics_of


def test__is_a_vision_encoder_and_gives_the_named_triple(model: CapiEncoder) -> None:
    assert isinstance(model, VisionEncoder)
    features = model(torch.randn(2, 3, 16, 24))
    assert Features._fields == ("pooled", "registers", "feature_map")
    assert features.pooled.shape == (2, 48)
    assert features.registers.shape == (2, 4, 32)
    assert features.feature_map.shape == (2, 4, 6, 32)


def test__images_are_imagenet_s_unless_said(model: CapiEncoder) -> None:
    assert statistics_of(model) == IMAGENET
    other = Statistics((0.5,) * 3, (0.25,) * 3)
    assert statistics_of(CapiEncoder(encoder=model.encoder, predictor=model.predictor, statistics=other)) == other
    # They are no weights.
    assert not [name for name in model.state_dict() if "statistics" in name]


def test__pooled_is_only_computed_when_asked_for(model: CapiEncoder) -> None:
    calls = []
    model.predictor.register_forward_hook(lambda *_: calls.append(1))
    images = torch.randn(2, 3, 16, 24)
    dense = model(images, pooled=False)
    assert dense.pooled is None
    assert calls == []
    assert torch.equal(dense.feature_map, model(images).feature_map)
    assert calls == [1]


def test__pooled_is_the_mean_of_predictions_at_all_positions_after_one_block(model: CapiEncoder) -> None:
    images = torch.randn(2, 3, 16, 24)
    encoded = model.encoder(images)
    predictions = model.predictor(encoded, encoded.coordinates[:, 4:], depth=1)
    torch.testing.assert_close(model(images).pooled, predictions.mean(1))


def test__the_feature_map_is_row_major(model: CapiEncoder) -> None:
    images = torch.randn(1, 3, 16, 24)
    feature_map = model(images, pooled=False).feature_map
    assert torch.equal(feature_map[0, 2, 5], model.encoder.patches(model.encoder(images))[0, 2 * 6 + 5])
