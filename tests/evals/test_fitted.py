from collections import Counter
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from capi.errors import CapiError
from capi.evals.fitted_probes import (
    AttentiveClassifier,
    Classifier,
    Judge,
    KnnClassifier,
    KnnSegmenter,
    LinearClassifier,
    LogisticSegmenter,
    Segmenter,
    block_size,
    spread,
    vote_confidences,
)
from capi.evals.probes import AttentiveProbes, LinearProbes
from capi.types import Features


def features_of(images: int = 5, width: int = 6) -> Features:
    return Features(torch.randn(images, width), torch.zeros(images, 0, width), torch.randn(images, 2, 3, width))


def knn(**options: object) -> KnnClassifier:
    values = {
        "bank": torch.randn(20, 6),
        "labels": torch.arange(20) % 3,
        "feature": "mean_patch",
        "neighbors": 4,
        "vote": "majority",
        "temperature": 0.07,
        "classes": 4,
    }
    return KnnClassifier(**{**values, **options})  # type: ignore[arg-type]


def knn_segmenter(**options: object) -> KnnSegmenter:
    values = {
        "bank": torch.randn(20, 6),
        "blocks": torch.randint(3, (20, 2, 2), dtype=torch.uint8),
        "mean": torch.zeros(6),
        "scale": torch.ones(6),
        "neighbors": 3,
        "distance": "l2",
        "ignored": (),
        "clean": False,
    }
    return KnnSegmenter(**{**values, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("feature", ["mean_patch", "pooled", "both"])
def test__a_linear_classifier_says_what_its_probe_says(feature: str) -> None:
    features = features_of()
    probes = LinearProbes(settings=3, width=12 if feature == "both" else 6, classes=4, seed=1)
    with torch.no_grad():
        probes.classifier.weight.copy_(torch.randn_like(probes.classifier.weight))
        probes.classifier.bias.copy_(torch.randn_like(probes.classifier.bias))
    classifier = LinearClassifier.of(probes.select(1), feature)
    inputs = classifier.inputs(features)
    torch.testing.assert_close(classifier.judge(inputs), probes(inputs)[1].double().softmax(1))
    assert isinstance(classifier, Classifier)
    assert (classifier.width, classifier.needs_pooled) == (6, feature != "mean_patch")
    assert not classifier.needs_patches


def test__an_attentive_classifier_says_what_its_probe_says() -> None:
    features = features_of()
    probes = AttentiveProbes(settings=3, width=6, classes=4, seed=1)
    with torch.no_grad():
        for parameter in probes.parameters():
            parameter.copy_(torch.randn_like(parameter))
    classifier = AttentiveClassifier.of(probes.select(2))
    inputs = classifier.inputs(features)
    assert inputs.shape == (5, 6, 6)
    torch.testing.assert_close(classifier.judge(inputs), probes(inputs)[2].double().softmax(1))
    assert isinstance(classifier, Classifier)
    assert (classifier.width, classifier.needs_pooled, classifier.needs_patches) == (6, False, True)


def slow_vote(labels: list[int], closeness: list[float], vote: str, temperature: float) -> int:
    """The class with the most votes; of several, the one that comes first."""
    votes: Counter[int] = Counter()
    for label, similarity in zip(labels, closeness, strict=True):
        votes[label] += 1 if vote == "majority" else torch.tensor(similarity / temperature).double().exp().item()
    most = max(votes.values())
    return next(label for label in labels if votes[label] == most)


@pytest.mark.parametrize("vote", ["majority", "weighted"])
def test__neighbors_vote_as_a_slow_count_says(vote: str) -> None:
    labels = torch.randint(3, (60, 8))
    closeness = torch.rand(60, 8, dtype=torch.float64).sort(1, descending=True).values
    confidences = vote_confidences(labels, closeness, neighbors=6, classes=5, vote=vote, temperature=0.1)
    rows = zip(labels[:, :6].tolist(), closeness[:, :6].tolist(), strict=True)
    expected = [slow_vote(row, near, vote, 0.1) for row, near in rows]
    assert confidences.argmax(1).tolist() == expected
    torch.testing.assert_close(confidences.sum(1), torch.ones(60, dtype=torch.float64))


def test__confidences_are_shares_of_the_votes() -> None:
    labels, closeness = torch.tensor([[2, 0, 0, 2, 1]]), torch.linspace(1, 0.8, 5).double()[None]
    confidences = vote_confidences(labels, closeness, neighbors=4, classes=4, vote="majority", temperature=0.07)
    torch.testing.assert_close(confidences, torch.tensor([[0.5, 0, 0.5, 0]]).double(), atol=1e-8, rtol=0)


def test__at_a_low_temperature_the_nearest_neighbor_decides() -> None:
    labels, closeness = torch.tensor([[1, 0, 0]]), torch.tensor([[1.0, 0.9, 0.8]]).double()
    confidences = vote_confidences(labels, closeness, neighbors=3, classes=2, vote="weighted", temperature=1e-3)
    torch.testing.assert_close(confidences, torch.tensor([[0.0, 1.0]]).double(), atol=1e-8, rtol=0)


def test__a_tie_goes_to_the_class_of_the_nearest_neighbor() -> None:
    closeness = torch.ones(2, 4, dtype=torch.float64)
    labels = torch.tensor([[2, 0, 0, 2], [0, 2, 2, 0]])
    for vote in ("majority", "weighted"):
        confidences = vote_confidences(labels, closeness, neighbors=4, classes=3, vote=vote, temperature=0.07)
        assert confidences.argmax(1).tolist() == [2, 0]


def test__the_nearest_training_images_vote() -> None:
    bank = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1], [0.1, 0.9], [0.2, 0.8]])
    classifier = knn(bank=bank, labels=torch.tensor([1, 1, 3, 3, 0]), neighbors=3, feature="pooled")
    asked = torch.tensor([[2.0, 0.1], [0.1, 5.0]])
    features = Features(asked, torch.zeros(2, 0, 2), torch.zeros(2, 1, 1, 2))
    confidences = classifier.judge(classifier.inputs(features))
    assert confidences.argmax(1).tolist() == [1, 3]
    assert confidences.shape == (2, 4)
    assert (classifier.width, classifier.needs_pooled, classifier.needs_patches) == (2, True, False)


def test__a_judge_gives_every_image_once_however_many_are_judged_together() -> None:
    class Patient(KnnClassifier):
        images_at_a_time = 7

    values = knn()
    together = Patient(**{each.name: getattr(values, each.name) for each in fields(KnnClassifier)})
    features = features_of(20)
    parts = list(zip(torch.arange(20).split(3), *(part.split(3) for part in features), strict=True))
    judge, numbers, confidences, sizes = Judge(together), [], [], []
    for number, *part in parts:
        for judged, confidence in judge.add(number, Features(*part)):
            numbers.append(judged)
            confidences.append(confidence)
            sizes.append(len(judged))
    for judged, confidence in judge.finish():
        numbers.append(judged)
        confidences.append(confidence)
        sizes.append(len(judged))
    assert sizes == [9, 9, 2]
    assert list(judge.finish()) == []
    assert torch.equal(torch.cat(numbers), torch.arange(20))
    assert torch.equal(torch.cat(confidences), values.judge(values.inputs(features)))


def test__a_probe_with_a_judge_that_has_nothing_says_nothing() -> None:
    assert list(Judge(knn()).finish()) == []


def slow_segmentation(probe: KnnSegmenter, feature_map: Tensor) -> Tensor:
    """Distances and votes one at a time."""
    images, rows, columns, _ = feature_map.shape
    height, width = probe.blocks.shape[1:]
    result = torch.zeros(images, rows * height, columns * width, dtype=torch.long)
    bank = (probe.bank.double() - probe.mean) / probe.scale
    for image in range(images):
        for row in range(rows):
            for column in range(columns):
                asked = (feature_map[image, row, column].double() - probe.mean) / probe.scale
                order = (bank - asked).norm(dim=1).sort(stable=True).indices[: probe.neighbors]
                for y in range(height):
                    for x in range(width):
                        voters = [int(probe.blocks[number, y, x]) for number in order]
                        most = max(voters.count(label) for label in voters)
                        winner = next(label for label in voters if voters.count(label) == most)
                        result[image, row * height + y, column * width + x] = winner
    return result


def test__neighbors_vote_at_every_pixel_of_a_patch() -> None:
    probe = knn_segmenter(mean=torch.randn(6), scale=torch.rand(6) + 0.5, neighbors=5, ties="nearest")
    features = features_of(2)
    labels_of_pixels = probe.segment(features, (4, 6))
    assert torch.equal(labels_of_pixels, slow_segmentation(probe, features.feature_map))
    assert isinstance(probe, Segmenter)
    assert not isinstance(probe, Classifier)
    assert probe.width == 6


def test__ignored_labels_have_a_vote_unless_the_rule_is_clean() -> None:
    bank = torch.tensor([[0.0], [0.1], [0.2]])
    blocks = torch.tensor([9, 9, 1], dtype=torch.uint8).view(3, 1, 1)
    features = Features(None, torch.zeros(1, 0, 1), torch.zeros(1, 1, 1, 1))
    standard = {"mean": torch.zeros(1), "scale": torch.ones(1), "ignored": (9,)}
    for clean, expected in ((False, 9), (True, 1)):
        probe = knn_segmenter(bank=bank, blocks=blocks, clean=clean, **standard)
        assert probe.segment(features, (1, 1)).item() == expected


def test__patches_that_do_not_tile_the_image_are_an_error() -> None:
    with pytest.raises(CapiError, match=r"patches of this probe have 2 x 2 pixels, which do not tile 8 x 12 pixels"):
        knn_segmenter().segment(features_of(), (8, 12))


def test__a_logistic_segmenter_gives_each_patch_the_label_of_the_highest_score() -> None:
    probe = LogisticSegmenter(torch.randn(3, 6), torch.randn(3), torch.tensor([0, 4, 300]))
    features = features_of(2)
    labels_of_pixels = probe.segment(features, (4, 9))
    for image in range(2):
        for row in range(2):
            for column in range(3):
                scores = [
                    float(weight @ features.feature_map[image, row, column] + bias)
                    for weight, bias in zip(probe.weight, probe.bias, strict=True)
                ]
                label = probe.labels[scores.index(max(scores))]
                assert (labels_of_pixels[image, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3] == label).all()
    assert isinstance(probe, Segmenter)


def test__labels_of_patches_are_spread_over_their_pixels() -> None:
    patches = torch.tensor([[[1, 2], [3, 4]]])
    assert spread(patches, (2, 4)).tolist() == [[[1, 1, 2, 2], [3, 3, 4, 4]]]


def test__a_feature_map_that_does_not_tile_the_image_is_an_error() -> None:
    assert block_size((2, 3), (8, 9)) == (4, 3)
    for size in ((9, 9), (8, 10)):
        with pytest.raises(CapiError, match=r"2 x 3 does not tile"):
            block_size((2, 3), size)
