"""Classification by k-NN on frozen features, and what every classification protocol shares.

Settings are chosen on held-out training images, then the test sets are scored with the chosen one. k-NN afterwards
takes all training images for its bank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from capi.errors import CapiError, counted, some_of
from capi.evals.features import Encoding, encode, encoded_batches, frame_of, image_vectors
from capi.evals.fitted_probes import Classifier, Judge, KnnClassifier, Probe, encoder_facts, vote_confidences
from capi.evals.metrics import right_answers
from capi.evals.neighbors import NearestNeighbors, Vote
from capi.evals.results import Outcome, Split, departures, few_held_out, hold_out, precision_notes, size_notes
from capi.evals.tasks import NO_ANSWER, AnsweredImages, ClassificationData
from capi.runtime.protocol import OUR_NEIGHBORS, OUR_TEMPERATURE, OUR_VOTES, PAPER_SHARE, PAPER_SIZE, VectorKind
from capi.types import VisionEncoder

_IMAGES_AT_A_TIME = 1024
Kind = TypeVar("Kind", bound=str)


@dataclass(frozen=True)
class KnnClassification:
    """Cosine k-NN on one vector an image: every number of neighbours and every vote from one search."""

    data: ClassificationData
    encoding: Encoding = field(default_factory=Encoding)
    neighbors: tuple[int, ...] = OUR_NEIGHBORS
    votes: tuple[Vote, ...] = OUR_VOTES
    temperature: float = OUR_TEMPERATURE
    features: tuple[VectorKind, ...] = ("mean_patch", "pooled")
    validation_share: float = PAPER_SHARE
    seed: int = 0
    kind: ClassVar[str] = "knn"
    paper: ClassVar[dict[str, Any]] = {"validation_share": PAPER_SHARE}

    def run(self, encoder: VisionEncoder) -> Outcome:
        check_data(self.data)
        encoding = self.encoding.fitted(encoder.patch_size)
        train = self.data.train
        kinds, warnings = available_kinds(encoder, self.features, encoding)
        vectors = image_vectors(encoder, train.images, encoding, kinds, "training images")
        settings = len(kinds) * len(self.votes) * len(self.neighbors)
        # Of a single setting nothing is held out to choose by.
        split = None if settings == 1 else hold_out(len(train.labels), self.validation_share, self.seed)
        grid, more = self._grid(vectors, split)
        best = {kind: max((row for row in grid if row["feature"] == kind), key=_validation) for kind in kinds}
        classifiers = {kind: self._classifier(vectors[kind], best[kind]) for kind in kinds}
        chosen = max(best.values(), key=_validation)
        scores = score_tests(classifiers, chosen["feature"], encoder, self.data.tests, encoding)
        return Outcome(
            scores=scores,
            chosen=chosen,
            grid=grid,
            deviations=[
                "the paper does not describe its k-NN classification: neighbours and votes are this package's choice",
                *departures(self, self.paper),
                *precision_notes(encoding.precision),
                *size_notes(self.encoding.size, encoding.size, encoder.patch_size, PAPER_SIZE),
                *self.data.notes,
            ],
            warnings=[*warnings, *more, *choice_warnings(self.data, split, grid), *class_warnings(self.data)],
            details=data_details(self.data, split),
            probe=make_probe(self.kind, classifiers[chosen["feature"]], self.data, encoding, encoder),
        )

    def _grid(
        self, vectors: Mapping[VectorKind, Tensor], split: Split | None
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Every setting with its accuracy on held-out images."""
        settings = [(vote, number) for vote in self.votes for number in self.neighbors]
        if split is None:
            ((vote, number),) = settings
            self._refuse_too_many([number], len(self.data.train.labels))
            return [{"feature": next(iter(vectors)), "vote": vote, "neighbours": number, "validation": None}], []
        possible = self._refuse_too_many(self.neighbors, len(split.fit))
        left_out = sorted(set(self.neighbors) - set(possible))
        warnings = (
            [f"neighbours {left_out} were not tried: they are more than {counted(len(split.fit), 'image')}"]
            if left_out
            else []
        )
        rows = []
        labels = self.data.train.labels
        for kind, all_vectors in vectors.items():
            search = NearestNeighbors(max(possible), "cosine", device=self.encoding.device).fit(all_vectors[split.fit])
            nearest = search.kneighbors(all_vectors[split.held_out])
            voters = labels[split.fit][nearest.index]
            for vote, number in settings:
                if number in possible:
                    chosen = self._voted(voters, nearest.closeness, vote, number)
                    score = (chosen == labels[split.held_out]).double().mean().item()
                    rows.append({"feature": kind, "vote": vote, "neighbours": number, "validation": score})
        return rows, warnings

    def _voted(self, voters: Tensor, closeness: Tensor, vote: Vote, number: int) -> Tensor:
        """The chosen classes, some images at a time: with thousands of classes their votes take much memory."""
        parts = zip(voters.split(_IMAGES_AT_A_TIME), closeness.split(_IMAGES_AT_A_TIME), strict=True)
        options = {"classes": len(self.data.classes), "vote": vote, "temperature": self.temperature}
        confidences = (vote_confidences(*part, neighbors=number, **options) for part in parts)  # type: ignore[arg-type]
        return torch.cat([part.argmax(1) for part in confidences])

    def _refuse_too_many(self, neighbors: Sequence[int], count: int) -> list[int]:
        possible = [number for number in neighbors if number <= count]
        if not possible:
            raise CapiError(f"{count} labeled images are fewer than the {min(neighbors)} neighbours to ask")
        return possible

    def _classifier(self, vectors: Tensor, setting: Mapping[str, Any]) -> KnnClassifier:
        return KnnClassifier(
            bank=vectors,
            labels=self.data.train.labels,
            feature=setting["feature"],
            neighbors=setting["neighbours"],
            vote=setting["vote"],
            temperature=self.temperature,
            classes=len(self.data.classes),
        )


def _validation(row: Mapping[str, Any]) -> float:
    return row["validation"] or 0.0


def check_data(data: ClassificationData) -> None:
    """What no protocol can work with."""
    if len(data.train.images) == 0:
        raise CapiError("the training split has no images")
    if not data.tests:
        raise CapiError("there is no test split to score")
    _check_labels("training split", data.train.labels, len(data.train.images), len(data.classes))
    for name, test in data.tests.items():
        _check_test(f'test split "{name}"', test, len(data.classes))
    labels = data.train.labels
    if len(labels.unique()) < 2:
        raise CapiError(f"all training images are of one class ({data.classes[int(labels[0])]}): at least 2 are needed")


def _check_test(name: str, test: AnsweredImages, classes: int) -> None:
    if len(test.images) == 0:
        raise CapiError(f"the {name} has no images")
    if test.answer_of_class is None:
        _check_labels(name, test.answers, len(test.images), classes, lowest=NO_ANSWER)
    elif len(test.answer_of_class) != classes:
        raise CapiError(f"the {name} says what {len(test.answer_of_class)} classes stand for, but there are {classes}")


def _check_labels(name: str, labels: Tensor, images: int, classes: int, lowest: int = 0) -> None:
    if len(labels) != images:
        raise CapiError(f"the {name} has {images} images, but {len(labels)} labels")
    if int(labels.min()) < lowest or int(labels.max()) >= classes:
        raise CapiError(
            f"labels of the {name} go from {labels.min()} to {labels.max()}, but there are {classes} classes"
        )


def class_warnings(data: ClassificationData) -> list[str]:
    """Classes that a test asks for and training never showed."""
    seen = set(data.train.labels.tolist())
    warnings = []
    for name, test in data.tests.items():
        answers = seen if test.answer_of_class is None else {int(test.answer_of_class[label]) for label in seen}
        asked = set(test.answers.unique().tolist()) - {NO_ANSWER}
        unseen = sorted(asked - answers)
        if unseen:
            plain = test.answer_of_class is None
            named = some_of([data.classes[answer] if plain else f"answer {answer}" for answer in unseen], 5)
            warnings.append(f"{name}: {named} occur in the test but not in training, and cannot be recognised")
    return warnings


def available_kinds(
    encoder: VisionEncoder, kinds: tuple[Kind, ...], encoding: Encoding
) -> tuple[tuple[Kind, ...], list[str]]:
    """The kinds of features that this encoder can give; one that it cannot give is left out with a warning."""
    if not any(kind in {"pooled", "both"} for kind in kinds):
        return kinds, []
    channels = frame_of(encoder, encoding).channels
    tried = encode(encoder, torch.zeros(1, channels, *encoding.size), encoding, pooled=True)
    if tried.pooled is not None:
        return kinds, []
    left = tuple(kind for kind in kinds if kind not in {"pooled", "both"})
    if not left:
        raise CapiError(f"this encoder gives no pooled vector, which {', '.join(kinds)} needs: use mean_patch")
    return left, ["the encoder gives no pooled vector: the mean of the patches alone was used"]


def score_tests(
    classifiers: Mapping[Any, Classifier],
    quoted: str,
    encoder: VisionEncoder,
    tests: Mapping[str, AnsweredImages],
    encoding: Encoding,
) -> dict[str, float]:
    """Accuracy on each test set: first that of the quoted classifier, then, where there are several, of each."""
    scores: dict[str, float] = {}
    each: dict[str, float] = {}
    for name, test in tests.items():
        judged_test = _score_test(classifiers, encoder, name, test, encoding)
        scores[name] = judged_test[quoted]
        if len(classifiers) > 1:
            each |= {f"{name}, {kind}": score for kind, score in judged_test.items()}
    return scores | each


def _score_test(
    classifiers: Mapping[Any, Classifier], encoder: VisionEncoder, name: str, test: AnsweredImages, encoding: Encoding
) -> dict[str, float]:
    """One pass over the images for all classifiers; each judges as many of them together as suits it."""
    asked = int((test.answers != NO_ANSWER).any(1).sum())
    if not asked:
        raise CapiError(f'no image of the test split "{name}" has an answer')
    pooled = any(classifier.needs_pooled for classifier in classifiers.values())
    patches = any(classifier.needs_patches for classifier in classifiers.values())
    judges = {kind: Judge(classifier) for kind, classifier in classifiers.items()}
    right = dict.fromkeys(classifiers, 0)

    def count(kind: Any, judged: Iterator[tuple[Tensor, Tensor]]) -> None:
        for numbers, confidences in judged:
            answered = right_answers(confidences, test.answers[numbers], test.answer_of_class, test.restricted)
            right[kind] += int(answered.sum())

    what = f"test images ({name})"
    for batch in encoded_batches(
        encoder, test.images, encoding, what=what, pooled=pooled, patches=patches, registers=False
    ):
        for kind, judge in judges.items():
            count(kind, judge.add(batch.read.numbers, batch.features))
    for kind, judge in judges.items():
        count(kind, judge.finish())
    return {kind: number / asked for kind, number in right.items()}


def choice_warnings(data: ClassificationData, split: Split | None, grid: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the setting was chosen by few images."""
    return few_held_out(held_out_count(split), classes=len(data.classes), settings=len(grid))


def held_out_count(split: Split | None) -> int:
    """How many images settings were chosen by."""
    return 0 if split is None else len(split.held_out)


def data_details(data: ClassificationData, split: Split | None) -> dict[str, Any]:
    """What the data set was."""
    return {
        "classes": len(data.classes),
        "training images": len(data.train.images),
        "held-out images": held_out_count(split),
        "test images": {name: len(test.images) for name, test in data.tests.items()},
    }


def make_probe(
    kind: str, model: Classifier, data: ClassificationData, encoding: Encoding, encoder: VisionEncoder
) -> Probe:
    """A classifier with what must be known to apply it."""
    return Probe(
        kind=kind,
        model=model,
        classes=dict(enumerate(data.classes)),
        size=encoding.size,
        encoder=encoder_facts(encoder),
    )
