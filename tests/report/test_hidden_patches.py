import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from capi.errors import CapiError
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import LinearHead
from capi.models.predictor import CrossPredictor
from capi.report.pictures.gallery import PrototypeIndex
from capi.report.pictures.hidden_patches import (
    Answer,
    HiddenPredictions,
    answers_picture,
    filled_picture,
    hidden_picture,
    hidden_probabilities,
    outline_region,
    predict_hidden,
    rectangle,
)

PROTOTYPES = 11


@pytest.fixture
def predictor() -> CapiEncoder:
    """Untrained, with a head; its predictor has another width than its encoder."""
    encoder = Encoder(width=32, depth=2, heads=2, patch_size=4, registers=4, mlp_width=64)
    return CapiEncoder(
        encoder=encoder,
        predictor=CrossPredictor(width=48, depth=2, heads=4, context_width=32, mlp_width=64),
        head=LinearHead(width=48, outputs=PROTOTYPES),
    ).eval()


def some_predictions() -> HiddenPredictions:
    hidden = torch.tensor([[True, False], [False, True]])
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    return HiddenPredictions(hidden, probabilities, torch.tensor([0, 1]))


def test__probabilities_are_those_of_predicting_each_patch_alone(predictor: CapiEncoder) -> None:
    from capi.models.positions import patch_coordinates

    image, hidden = torch.randn(1, 3, 16, 20), rectangle((1, 2), (2, 3), (4, 5))
    probabilities = hidden_probabilities(predictor, image, hidden, temperature=0.2)
    visible = torch.tensor([[n for n in range(20) if not hidden.flatten()[n]]])
    positions = patch_coordinates(4, 5, device=image.device)
    with torch.no_grad():
        for row, number in enumerate(hidden.flatten().nonzero()[:, 0].tolist()):
            # The predictor's queries never see each other, so one at a time gives the same.
            encoded = predictor.encoder(image, visible)
            token = predictor.predictor(encoded, positions[None, number : number + 1])
            logits = predictor.head(token)[0, 0].double() / 0.2
            torch.testing.assert_close(
                probabilities[row].double(), logits.exp() / logits.exp().sum(), atol=1e-5, rtol=1e-4
            )
    assert probabilities.shape == (4, PROTOTYPES)


def test__what_is_hidden_does_not_change_what_is_predicted(predictor: CapiEncoder) -> None:
    image, hidden = torch.randn(1, 3, 16, 16), rectangle((0, 0), (1, 1), (4, 4))
    changed = image.clone()
    changed[..., :8, :8] = 5
    before = hidden_probabilities(predictor, image, hidden)
    assert torch.equal(before, hidden_probabilities(predictor, changed, hidden))
    changed[..., 8:, 8:] = 5
    assert not torch.allclose(before, hidden_probabilities(predictor, changed, hidden))


def test__the_truth_is_the_prototype_of_the_patch_in_the_whole_image(predictor: CapiEncoder) -> None:
    image, hidden = torch.randn(1, 3, 16, 16), rectangle((2, 1), (3, 2), (4, 4))
    prototypes, bias = torch.randn(PROTOTYPES, 32), torch.randn(PROTOTYPES) / 5
    with torch.no_grad():
        feature_map = predictor(image, pooled=False).feature_map[0]
    predictions = predict_hidden(predictor, image, hidden, PrototypeIndex(prototypes, bias).nearest(feature_map))
    expected = []
    for row, column in ((2, 1), (2, 2), (3, 1), (3, 2)):
        token = feature_map[row, column] / feature_map[row, column].norm()
        expected.append(max(range(PROTOTYPES), key=lambda k: float(token @ prototypes[k] + bias[k])))
    assert predictions.truth.tolist() == expected
    assert predictions.predicted.tolist() == [int(row.argmax()) for row in predictions.probabilities]


def test__confidence_and_entropy_are_those_of_the_distribution() -> None:
    predictions = some_predictions()
    assert predictions.confidence.tolist() == pytest.approx([0.7, 0.6])
    expected = [-sum(p * math.log(p) for p in row) for row in ([0.7, 0.2, 0.1], [0.1, 0.3, 0.6])]
    assert predictions.entropy.tolist() == pytest.approx(expected)
    assert predictions.hits() == pytest.approx(0.5)
    assert predictions.hits(2) == pytest.approx(1.0)
    assert predictions.hits(50) == pytest.approx(1.0)


def test__hidden_patches_are_counted_row_by_row() -> None:
    predictions = some_predictions()
    assert [predictions.position(row, column) for row in range(2) for column in range(2)] == [0, None, None, 1]
    assert predictions.top(1, 2) == [Answer(2, pytest.approx(0.6)), Answer(1, pytest.approx(0.3))]
    assert len(predictions.top(0, 9)) == 3
    placed = predictions.as_map(predictions.confidence)
    assert placed[1, 1] == pytest.approx(0.6)
    assert placed.isnan().tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("hidden", [torch.zeros(4, 4).bool(), torch.ones(4, 4).bool()])
def test__all_or_nothing_cannot_be_hidden(predictor: CapiEncoder, hidden: Tensor) -> None:
    with pytest.raises(CapiError, match="of 16 patches are hidden"):
        hidden_probabilities(predictor, torch.randn(1, 3, 16, 16), hidden)


def test__a_model_without_a_head_and_foreign_prototypes_are_refused(model: CapiEncoder, predictor: CapiEncoder) -> None:
    image, hidden = torch.randn(1, 3, 8, 8), rectangle((0, 0), (0, 0), (2, 2))
    with pytest.raises(CapiError, match="no head"):
        hidden_probabilities(model, image, hidden)
    with pytest.raises(CapiError, match="another model"):
        predict_hidden(predictor, image, hidden, torch.full((2, 2), PROTOTYPES))


@pytest.mark.parametrize("corners", [((1, 3), (2, 1)), ((2, 1), (1, 3)), ((1, 1), (2, 3))])
def test__a_rectangle_lies_between_its_corners(corners: tuple[tuple[int, int], tuple[int, int]]) -> None:
    expected = [(row, column) for row in (1, 2) for column in (1, 2, 3)]
    assert [tuple(place) for place in rectangle(*corners, (4, 5)).nonzero().tolist()] == expected


def test__only_hidden_patches_are_covered() -> None:
    photo = Image.new("RGB", (40, 40), (200, 10, 10))
    pixels = np.asarray(hidden_picture(photo, rectangle((0, 1), (1, 1), (2, 2))))
    assert (pixels[:, :20] == (200, 10, 10)).all()
    assert not (pixels[:, 20:] == (200, 10, 10)).all(2).any()


def test__hidden_patches_are_filled_with_the_patch_of_their_prototype() -> None:
    photo = Image.new("RGB", (40, 40), "white")
    colors = {0: "red", 1: "lime"}
    hidden = torch.tensor([[True, True], [True, False]])
    asked: list[int] = []

    def example(prototype: int) -> Image.Image | None:
        asked.append(prototype)
        return Image.new("RGB", (5, 5), colors[prototype]) if prototype in colors else None

    picture = filled_picture(photo, hidden, torch.tensor([0, 1, 2]), example)
    assert picture.getpixel((10, 10)) == (255, 0, 0)
    assert picture.getpixel((30, 10)) == (0, 255, 0)
    assert picture.getpixel((30, 30)) == (255, 255, 255)
    # There is no patch of prototype 2: it stays covered.
    assert picture.getpixel((10, 30)) in {hidden_picture(photo, hidden).getpixel((10, 30))}
    assert asked == [0, 1, 2]


def test__a_region_is_outlined_where_it_ends() -> None:
    picture = Image.new("RGB", (40, 40))
    pixels = np.asarray(outline_region(picture, torch.tensor([[True, False], [True, False]])))
    assert pixels[5, 20].any()
    assert not pixels[:, :18].any()
    assert not outline_region(picture, torch.ones(2, 2).bool()).getbbox()


def test__answers_have_a_row_each_and_the_truth_one_of_its_own_where_it_is_not_among_them() -> None:
    asked: list[int] = []

    def examples(prototype: int) -> list[Image.Image]:
        asked.append(prototype)
        return [Image.new("RGB", (9, 9), "red")] * (prototype % 3)

    answers = [Answer(4, 0.5), Answer(3, 0.2)]
    with_truth = answers_picture(answers, 4, examples)
    assert asked == [4, 3]
    asked.clear()
    assert answers_picture(answers, 7, examples).height > with_truth.height
    assert asked == [4, 3, 7]
