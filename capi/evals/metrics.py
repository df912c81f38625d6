"""Scores: which images were answered rightly, and how well predicted labels of pixels agree with the true ones."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.evals.tasks import NO_ANSWER
from capi.types import Bool, Float, Int

# Few enough to stay near the processor.
_PIXELS_AT_A_TIME = 2**18


def chosen_classes(scores: Float[Tensor, "s c"], allowed: Bool[Tensor, " c"] | None = None) -> Int[Tensor, " s"]:
    """The class with the highest score, of equal ones the lowest; none but those `allowed`."""
    if scores.isnan().any():
        raise CapiError("some scores are NaN: the probe or the features are broken")
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.argmax(1)


def right_answers(
    scores: Float[Tensor, "s c"],
    answers: Int[Tensor, "s m"],
    answer_of_class: Int[Tensor, " c"] | None = None,
    restricted: bool = False,
) -> Bool[Tensor, " s"]:
    """Whether the chosen class stands for one of the right answers of each image.

    Rows of `answers` are filled up with -1, and an image without any answer is never right. `answer_of_class` says
    which answer a class stands for (-1: none); `restricted` leaves classes that stand for none out of the choice.
    """
    if answer_of_class is None:
        answer_of_class = torch.arange(scores.shape[1])
    answer_of_class, answers = answer_of_class.to(scores.device), answers.to(scores.device)
    allowed = answer_of_class != NO_ANSWER if restricted else None
    if allowed is not None and not allowed.any():
        raise CapiError("no class of the probe stands for an answer of this test: nothing could be chosen")
    given = answer_of_class[chosen_classes(scores, allowed)][:, None]
    return ((given == answers) & (given != NO_ANSWER)).any(1)


def answered_accuracy(
    scores: Float[Tensor, "s c"],
    answers: Int[Tensor, "s m"],
    answer_of_class: Int[Tensor, " c"] | None = None,
    restricted: bool = False,
) -> float:
    """Share of right answers among images that have an answer."""
    asked = int((answers != NO_ANSWER).any(1).sum())
    if not asked:
        raise CapiError("none of the images has an answer, so there is no share of right ones")
    return int(right_answers(scores, answers, answer_of_class, restricted).sum()) / asked


class SegmentationScore:
    """Agreement of predicted and true labels of pixels, added up image by image.

    Pixels whose true label is ignored do not count. A prediction may be an ignored label: it is wrong, and then that
    label is a class of its own, with an IoU of 0, in the mean. That is how published numbers came about; a prediction
    that never takes an ignored label (`vote_blocks(clean=True)`) has no such class.
    """

    def __init__(self, labels: Sequence[int], ignored: Collection[int] = ()) -> None:
        self.labels, self.ignored = labels, ignored
        self.confusion_ = torch.zeros(len(self._all_labels), len(self._all_labels), dtype=torch.long)
        """Pixels by true label (row) and predicted label, labels in rising order, ignored ones among them."""

    @property
    def _all_labels(self) -> list[int]:
        return sorted({*self.labels, *self.ignored})

    def update(self, truth: Tensor, prediction: Tensor) -> "SegmentationScore":
        """Count some pixels: labels of the same shape, whole numbers of any kind."""
        if truth.shape != prediction.shape:
            shapes = [" x ".join(map(str, labels.shape)) for labels in (truth, prediction)]
            raise CapiError(f"masks of {shapes[0]} and predictions of {shapes[1]} pixels cannot be compared")
        parts = zip(
            truth.flatten().split(_PIXELS_AT_A_TIME), prediction.flatten().split(_PIXELS_AT_A_TIME), strict=True
        )
        for true, predicted in parts:
            self.confusion_ += confusion(true, predicted.to(true.device), self._all_labels, self.ignored).cpu()
        return self

    def iou(self) -> dict[int, float]:
        """IoU of each label: NaN if it is neither true nor predicted anywhere. Ignored labels count if predicted."""
        common = self.confusion_.diagonal()
        either = self.confusion_.sum(0) + self.confusion_.sum(1) - common
        values = dict(zip(self._all_labels, (common.double() / either.double()).tolist(), strict=True))
        predicted = dict(zip(self._all_labels, self.confusion_.sum(0).tolist(), strict=True))
        return {label: value for label, value in values.items() if label not in self.ignored or predicted[label]}

    def mean_iou(self) -> float:
        """Mean over the labels that are true or predicted somewhere."""
        self._must_have_counted()
        present = [value for value in self.iou().values() if value == value]  # noqa: PLR0124 - nan is not itself
        return sum(present) / len(present)

    def pixel_accuracy(self) -> float:
        """Share of pixels that are right."""
        return int(self.confusion_.diagonal().sum()) / self._must_have_counted()

    def _must_have_counted(self) -> int:
        count = int(self.confusion_.sum())
        if not count:
            raise CapiError("no pixel has a true label that counts, so there is no score: look at the masks")
        return count


def confusion(
    truth: Tensor, prediction: Tensor, values: Sequence[int], ignored: Collection[int] = ()
) -> Int[Tensor, "labels labels"]:
    """Pixels by true and predicted label, of those whose true label is not ignored; `values` is sorted."""
    # Where each label stands among the known ones, from one below the lowest to one above the highest; one more place
    # stands for all labels that are not known.
    size = len(values) + 1
    table = torch.full((values[-1] - values[0] + 3,), len(values))
    table[torch.tensor(values) - values[0] + 1] = torch.arange(len(values))
    table = table.to(truth.device)
    true, predicted = (
        table.index_select(0, labels.flatten().long().clamp(values[0] - 1, values[-1] + 1).sub_(values[0] - 1))
        for labels in (truth, prediction)
    )
    # Cell (t, p) of the matrix is number t * size + p.
    counts = true.mul_(size).add_(predicted).bincount(minlength=size**2).reshape(size, size)
    if counts[-1].any() or counts[:, -1].any():
        strange = sorted({*truth.unique().tolist(), *prediction.unique().tolist()} - {*values})
        raise CapiError(f"the label {strange[0]} is neither a class nor ignored: name it among the one or the other")
    counts[[place for place, label in enumerate(values) if label in ignored]] = 0
    return counts[:-1, :-1]
