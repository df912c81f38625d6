import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from capi.data.crops import Frame
from capi.data.sources import EncodedImages
from capi.evals.features import Encoding
from capi.evals.images import StillBatches
from capi.evals.raw_pixels import raw_pixel_accuracies
from capi.evals.tasks import AnsweredImages, LabeledImages
from tests.evals.toys import source_of

ENCODING = Encoding(size=(32, 32), batch_size=16)


def noisy_shades(count: int, seed: int) -> tuple[EncodedImages, Tensor]:
    """Tinted noise, and the channel that is brightest."""
    generator = torch.Generator().manual_seed(seed)
    tint = torch.rand(count, 1, 1, 3, generator=generator) * 120
    pixels = (tint + torch.rand(count, 36, 40, 3, generator=generator) * 120).to(torch.uint8)
    return source_of(list(pixels.numpy())), tint.flatten(1).argmax(1)


def small(source: EncodedImages, side: int) -> Tensor:
    """The framed images, averaged over blocks."""
    pixels = StillBatches(source, Frame((32, 32)), torch.arange(len(source)), len(source))[0].images.double()
    return pixels.unflatten(3, (side, -1)).unflatten(2, (side, -1)).mean((3, 5)).flatten(1)


def test__every_size_and_distance_is_scored_as_scikit_learn_scores_it() -> None:
    train, labels = noisy_shades(50, 1)
    test, answers = noisy_shades(40, 2)
    accuracies = raw_pixel_accuracies(LabeledImages(train, labels), AnsweredImages(test, answers[:, None]), ENCODING)
    expected = {}
    for side in (4, 8, 16, 32):
        center = small(train, side).mean(0)
        for distance, metric in (("cosine", "cosine"), ("l2", "euclidean")):
            theirs = KNeighborsClassifier(1, metric=metric).fit((small(train, side) - center).numpy(), labels.numpy())
            score = theirs.score((small(test, side) - center).numpy(), answers.numpy())
            expected[f"{side} px, {distance}"] = score
    assert len(set(expected.values())) > 1
    assert accuracies == pytest.approx(expected)


def test__answers_are_mapped_as_for_every_other_classifier() -> None:
    train, labels = noisy_shades(30, 1)
    plain = raw_pixel_accuracies(LabeledImages(train, labels), AnsweredImages(train, labels[:, None]), ENCODING)
    assert set(plain.values()) == {1.0}
    # The class c stands for the answer 2 - c.
    mapped = AnsweredImages(train, 2 - labels[:, None], torch.tensor([2, 1, 0]), restricted=True)
    assert raw_pixel_accuracies(LabeledImages(train, labels), mapped, ENCODING) == plain
