import math

import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score
from torch import Tensor

from capi.errors import CapiError
from capi.evals.metrics import SegmentationScore, answered_accuracy, chosen_classes, confusion, right_answers


def noisy_masks(labels: list[int], share: float = 0.4, count: int = 4) -> tuple[Tensor, Tensor]:
    """Labels and predictions of which some are other labels."""
    values = torch.tensor(labels)
    truth = values[torch.randint(len(labels), (count, 9, 7))]
    other = values[torch.randint(len(labels), truth.shape)]
    return truth, torch.where(torch.rand(truth.shape) < share, other, truth)


def scored_slowly(truth: Tensor, prediction: Tensor, ignored: set[int]) -> tuple[dict[int, float], float, float]:
    """IoU of the labels that are there, their mean, and the share of right pixels: sets of pixels, one by one."""
    pairs = list(zip(truth.flatten().tolist(), prediction.flatten().tolist(), strict=True))
    pairs = [(true, predicted) for true, predicted in pairs if true not in ignored]
    ious = {}
    for label in {label for pair in pairs for label in pair}:
        true = {place for place, pair in enumerate(pairs) if pair[0] == label}
        predicted = {place for place, pair in enumerate(pairs) if pair[1] == label}
        ious[label] = len(true & predicted) / len(true | predicted)
    right = sum(true == predicted for true, predicted in pairs)
    return ious, sum(ious.values()) / len(ious), right / len(pairs)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int64])
def test__agrees_with_the_definition(kind: torch.dtype) -> None:
    truth, prediction = noisy_masks([0, 1, 5, 200, 255])
    truth[truth == 5] = 1
    score = SegmentationScore([0, 1, 5, 9, 200], {255})
    for part in range(4):
        assert score.update(truth[part].to(kind), prediction[part].to(kind)) is score
    ious, mean, accuracy = scored_slowly(truth, prediction, {255})
    assert ious[5] == ious[255] == 0
    ious_here = score.iou()
    assert list(ious_here) == [0, 1, 5, 9, 200, 255]
    assert math.isnan(ious_here.pop(9))
    assert ious_here == pytest.approx(ious)
    assert score.mean_iou() == pytest.approx(mean)
    assert score.pixel_accuracy() == pytest.approx(accuracy)


def test__agrees_with_scikit_learn_where_nothing_is_ignored() -> None:
    truth, prediction = noisy_masks([0, 1, 2, 3])
    flat = truth.flatten().numpy(), prediction.flatten().numpy()
    score = SegmentationScore(range(4)).update(truth, prediction)
    assert list(score.iou().values()) == pytest.approx(jaccard_score(*flat, average=None).tolist())
    assert score.mean_iou() == pytest.approx(jaccard_score(*flat, average="macro"))
    assert torch.equal(score.confusion_, torch.from_numpy(confusion_matrix(*flat)))


def test__pixels_with_an_ignored_true_label_do_not_count() -> None:
    truth, prediction = torch.tensor([3, 3, 0, 255]), torch.tensor([3, 4, 3, 4])
    score = SegmentationScore([3, 4], [0, 255]).update(truth, prediction)
    assert score.iou() == {3: 0.5, 4: 0.0}
    assert score.pixel_accuracy() == 0.5


def test__predicting_an_ignored_label_is_wrong_and_a_class_of_its_own() -> None:
    truth = torch.tensor([3, 3, 4, 4])
    clean = SegmentationScore([3, 4], [255]).update(truth, torch.tensor([3, 3, 4, 3]))
    ignored = SegmentationScore([3, 4], [255]).update(truth, torch.tensor([3, 3, 4, 255]))
    assert clean.iou() == {3: pytest.approx(2 / 3), 4: 0.5}
    assert ignored.iou() == {3: 1.0, 4: 0.5, 255: 0.0}
    assert ignored.mean_iou() == pytest.approx(0.5)
    assert ignored.pixel_accuracy() == 0.75


def test__class_0_counts_unless_it_is_ignored() -> None:
    truth, prediction = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    assert SegmentationScore([0, 1]).update(truth, prediction).iou() == {0: 0.5, 1: 0.5}
    assert SegmentationScore([1], [0]).update(truth, prediction).iou() == {1: 1.0}


def test__the_score_does_not_depend_on_how_pixels_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, prediction = noisy_masks([0, 1, 2])
    whole = SegmentationScore(range(3)).update(truth, prediction).confusion_
    monkeypatch.setattr("capi.evals.metrics._PIXELS_AT_A_TIME", 11)
    assert torch.equal(SegmentationScore(range(3)).update(truth, prediction).confusion_, whole)


def test__confusion_counts_true_labels_by_row() -> None:
    truth, prediction = torch.tensor([-1, 2, 2, 7]), torch.tensor([2, 2, 7, 7])
    assert confusion(truth, prediction, [-1, 2, 7], [-1]).tolist() == [[0, 0, 0], [0, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("label", [-1, 2, 300])
def test__unknown_labels_are_errors(label: int) -> None:
    allowed, strange = torch.tensor([0, 1, 255]), torch.tensor([0, label, 255])
    score = SegmentationScore([0, 1], [255])
    for pair in ((allowed, strange), (strange, allowed)):
        with pytest.raises(CapiError, match=f"the label {label} is neither a class nor ignored"):
            score.update(*pair)


def test__shapes_that_differ_are_errors() -> None:
    with pytest.raises(CapiError, match="masks of 2 x 3 and predictions of 3 x 2 pixels"):
        SegmentationScore([0]).update(torch.zeros(2, 3).long(), torch.zeros(3, 2).long())


def test__nothing_to_score_is_an_error() -> None:
    score = SegmentationScore([0, 1], [255]).update(torch.tensor([255]), torch.tensor([1]))
    for result in (score.mean_iou, score.pixel_accuracy):
        with pytest.raises(CapiError, match="no pixel has a true label that counts"):
            result()


def test__one_answer_an_image_is_plain_accuracy() -> None:
    scores, labels = torch.randn(300, 12), torch.randint(12, (300,))
    expected = accuracy_score(labels.numpy(), scores.argmax(1).numpy())
    assert answered_accuracy(scores, labels[:, None]) == pytest.approx(expected)


@pytest.mark.parametrize("restricted", [False, True])
def test__several_answers_and_a_map_agree_with_the_definition(restricted: bool) -> None:
    scores = torch.randint(6, (200, 8)).float()
    answers = torch.where(torch.rand(200, 3) < 0.4, torch.randint(4, (200, 3)), -1)
    answer_of_class = torch.tensor([2, -1, 0, 0, -1, 3, 1, -1])
    right = []
    for row, correct in zip(scores.tolist(), answers.tolist(), strict=True):
        choice = [number for number in range(8) if not restricted or answer_of_class[number] >= 0]
        best = min(choice, key=lambda number, row=row: (-row[number], number))
        right.append(int(answer_of_class[best]) in set(correct) - {-1})
    assert right_answers(scores, answers, answer_of_class, restricted).tolist() == right
    asked = int((answers >= 0).any(1).sum())
    assert 0 < asked < 200
    assert answered_accuracy(scores, answers, answer_of_class, restricted) == pytest.approx(sum(right) / asked)


def test__equal_scores_go_to_the_lowest_class() -> None:
    scores = torch.randint(3, (100, 40)).float()
    first = [min(range(40), key=lambda number, row=row: (-row[number], number)) for row in scores.tolist()]
    assert chosen_classes(scores).tolist() == first


def test__classes_that_are_not_allowed_are_not_chosen() -> None:
    allowed = torch.tensor([True, False, True])
    assert chosen_classes(torch.tensor([[1.0, 9.0, 2.0], [-1e30, 0.0, -1e30]]), allowed).tolist() == [2, 0]


def test__tests_without_answers_are_errors() -> None:
    with pytest.raises(CapiError, match="none of the images has an answer"):
        answered_accuracy(torch.randn(3, 2), torch.full((3, 1), -1))
    with pytest.raises(CapiError, match="no class of the probe stands for an answer"):
        right_answers(torch.randn(3, 2), torch.zeros(3, 1).long(), torch.tensor([-1, -1]), restricted=True)


def test__scores_that_are_not_finite_are_errors() -> None:
    with pytest.raises(CapiError, match="scores are NaN"):
        answered_accuracy(torch.tensor([[0.0, math.nan]]), torch.zeros(1, 1).long())
