from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from capi.errors import CapiError
from capi.evals.classification import KnnClassification, available_kinds, class_warnings
from capi.evals.features import Encoding, image_vectors
from capi.evals.results import hold_out
from capi.evals.tasks import AnsweredImages, ClassificationData, LabeledImages
from capi.types import Features
from tests.evals.toys import (
    COLORS,
    PatchColors,
    RandomPatches,
    answered,
    beside_choice,
    colored_data,
    labeled,
    shades,
)

SMALL = Encoding(size=(12, 8), batch_size=5)
ALONE = {"neighbors": (1,), "votes": ("majority",), "features": ("mean_patch",)}


def protocol(data: ClassificationData, **options: object) -> KnnClassification:
    return KnnClassification(data, **{"encoding": SMALL, "neighbors": (1, 3), **options})  # type: ignore[arg-type]


def noisy() -> ClassificationData:
    """Classes that cannot all be distinguished."""
    return colored_data(train=20, test=12, spread=180, size=(12, 8))


def their_accuracies(train: Tensor, labels: Tensor, test: Tensor, answers: Tensor, neighbors: int, vote: str) -> float:
    """scikit-learn's score of unit vectors, with votes by similarity."""

    def weights(distances: np.ndarray) -> np.ndarray:
        return np.exp((1 - distances) / 0.07)

    theirs = KNeighborsClassifier(neighbors, metric="cosine", weights=weights if vote == "weighted" else "uniform")
    return theirs.fit(train.double().numpy(), labels.numpy()).score(test.double().numpy(), answers.numpy())


def test__classes_that_can_be_seen_are_all_recognised() -> None:
    outcome = protocol(colored_data()).run(PatchColors())
    assert outcome.main == 1.0
    assert outcome.scores == {"test": 1.0, "test, mean_patch": 1.0, "test, pooled": 1.0}


def test__every_setting_is_scored_as_scikit_learn_scores_it() -> None:
    # Odd numbers of neighbours of 2 classes cannot tie.
    hard = {"spread": 700, "size": (12, 8)}
    train, test = labeled([0, 1] * 20, **hard), answered([0, 1] * 15, seed=1, **hard)
    data, encoder = ClassificationData(("red", "green"), train, {"test": test}), RandomPatches()
    outcome = protocol(data, neighbors=(1, 3, 7), validation_share=0.3).run(encoder)

    split = hold_out(40, 0.3, seed=0)
    vectors = image_vectors(encoder, train.images, SMALL, ("mean_patch", "pooled"), "")
    tests = image_vectors(encoder, test.images, SMALL, ("mean_patch", "pooled"), "")
    fit, held_out = split
    expected = [
        their_accuracies(each[fit], train.labels[fit], each[held_out], train.labels[held_out], number, vote)
        for each in vectors.values()
        for vote in ("majority", "weighted")
        for number in (1, 3, 7)
    ]
    assert [row["validation"] for row in outcome.grid] == pytest.approx(expected)
    assert len(set(expected)) > 2
    assert outcome.chosen == outcome.grid[expected.index(max(expected))] != outcome.grid[0]
    feature, vote, number = (outcome.chosen[name] for name in ("feature", "vote", "neighbours"))
    # The bank of the test has the held-out images too.
    score = their_accuracies(vectors[feature], train.labels, tests[feature], test.answers[:, 0], number, vote)
    assert outcome.main == pytest.approx(score)
    assert 0 < score < 1


def test__of_settings_that_are_equally_good_the_first_is_chosen() -> None:
    outcome = protocol(colored_data(), neighbors=(3, 1), features=("pooled", "mean_patch")).run(PatchColors())
    assert {row["validation"] for row in outcome.grid} == {1.0}
    assert outcome.chosen == {"feature": "pooled", "vote": "majority", "neighbours": 3, "validation": 1.0}


def test__equally_near_images_count_in_their_order() -> None:
    class Constant(PatchColors):
        def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
            return Features(None, torch.zeros(len(images), 0, 3), torch.ones(len(images), 3, 2, 3))

    data = ClassificationData(tuple(COLORS), labeled([2, 1, 0, 1]), {"test": answered([2, 2, 1])})
    assert protocol(data, **ALONE).run(Constant()).main == pytest.approx(2 / 3)


def test__a_single_setting_needs_no_held_out_images() -> None:
    data = ClassificationData(("red", "green"), labeled([0, 1]), {"test": answered([1, 0, 0])})
    outcome = protocol(data, **ALONE).run(PatchColors())
    assert outcome.main == 1.0
    assert outcome.chosen == {"feature": "mean_patch", "vote": "majority", "neighbours": 1, "validation": None}
    assert outcome.grid == [outcome.chosen]
    assert outcome.details["held-out images"] == 0
    assert outcome.warnings == []


def test__a_choice_by_few_images_is_a_warning() -> None:
    outcome = protocol(colored_data()).run(PatchColors())
    assert outcome.details["held-out images"] == 2
    (warning,) = outcome.warnings
    assert warning.startswith(f"the best of {len(outcome.grid)} settings was chosen by 2 held-out images of 3 classes")


def test__the_feature_asked_for_is_used() -> None:
    class Silent(PatchColors):
        def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
            features = super().__call__(images, pooled=pooled)
            return features._replace(pooled=torch.ones(len(images), 3) if pooled else None)

    data = colored_data()
    both = protocol(data).run(Silent())
    assert both.chosen["feature"] == "mean_patch"
    assert (both.scores["test, mean_patch"], both.scores["test, pooled"]) == (1.0, pytest.approx(1 / 3))
    assert protocol(data, features=("pooled",)).run(Silent()).main == pytest.approx(1 / 3)


def test__a_class_that_only_the_test_has_is_a_warning() -> None:
    data = ClassificationData(tuple(COLORS), labeled([0, 1] * 6), {"own": answered([0, 1, 2])})
    outcome = protocol(data).run(PatchColors())
    assert beside_choice(outcome) == ["own: blue occur in the test but not in training, and cannot be recognised"]
    assert outcome.main == pytest.approx(2 / 3)


def test__many_unseen_classes_are_counted_and_mapped_ones_are_numbers() -> None:
    names = tuple(f"class {number}" for number in range(9))
    test = AnsweredImages(shades([0] * 9), torch.arange(9)[:, None])
    data = ClassificationData(names, labeled([0, 1]), {"own": test})
    assert class_warnings(data) == [
        "own: class 2, class 3, class 4, class 5, class 6 and 2 more occur in the test but not in training, and cannot "
        "be recognised"
    ]
    mapped = replace(test, answer_of_class=torch.tensor([5, 6, *range(7)]))
    assert class_warnings(replace(data, tests={"own": mapped}))[0].startswith("own: answer 0, answer 1,")
    # Answers that no class of the head stands for are not asked of it either.
    mapped_test = replace(test, answers=torch.tensor([[5, 6]] * 9), answer_of_class=mapped.answer_of_class)
    assert class_warnings(replace(data, tests={"own": mapped_test})) == []


def test__several_answers_subsets_and_maps_are_scored() -> None:
    """Red, green, blue images; a head of three classes that sees them perfectly."""
    images = shades([0, 1, 2, 2])
    none = -1
    several = AnsweredImages(images, torch.tensor([[0, 1], [0, 2], [2, none], [none, none]]))
    # Red and green stand for the answer 0, blue for none: blue images can only be right where it is left out.
    mapping = torch.tensor([0, 0, none])
    asked = torch.tensor([[0], [0], [0], [7]])
    tests = {
        "several": several,
        "mapped": AnsweredImages(images, asked, mapping),
        "restricted": AnsweredImages(images, asked, mapping, restricted=True),
    }
    data = ClassificationData(tuple(COLORS), labeled([0, 1, 2] * 5), tests)
    outcome = protocol(data, **ALONE).run(PatchColors())
    assert outcome.scores == {
        "several": pytest.approx(2 / 3),
        "mapped": pytest.approx(2 / 4),
        "restricted": pytest.approx(3 / 4),
    }


def test__the_first_test_set_is_the_one_to_quote() -> None:
    data = colored_data()
    wrong = AnsweredImages(shades([0, 1]), torch.tensor([[1], [0]]))
    outcome = protocol(replace(data, tests={"wrong": wrong, **data.tests})).run(PatchColors())
    assert list(outcome.scores)[:2] == ["wrong", "test"]
    assert outcome.main == 0.0


def broken(data: ClassificationData, **changes: object) -> ClassificationData:
    return replace(data, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": LabeledImages(shades([]), torch.zeros(0, dtype=torch.long))}, "training split has no images"),
        ({"train": LabeledImages(shades([0, 1]), torch.tensor([0]))}, "training split has 2 images, but 1 labels"),
        ({"train": labeled([1, 1, 1])}, r"all training images are of one class \(green\)"),
        ({"train": LabeledImages(shades([0, 1]), torch.tensor([0, 3]))}, "go from 0 to 3, but there are 3 classes"),
        ({"train": LabeledImages(shades([0, 1]), torch.tensor([-1, 1]))}, "go from -1 to 1"),
        ({"tests": {}}, "no test split"),
        (
            {"tests": {"own": AnsweredImages(shades([]), torch.zeros(0, 1, dtype=torch.long))}},
            '"own" has no images',
        ),
        ({"tests": {"own": AnsweredImages(shades([0]), torch.tensor([[3]]))}}, 'split "own" go from 3 to 3'),
        ({"tests": {"own": AnsweredImages(shades([0]), torch.tensor([[-1]]))}}, '"own" has an answer'),
        ({"tests": {"own": AnsweredImages(shades([0, 1]), torch.tensor([[0]]))}}, '"own" has 2 images, but 1 labels'),
        (
            {"tests": {"own": AnsweredImages(shades([0]), torch.tensor([[0]]), torch.tensor([0, 1]))}},
            "what 2 classes stand for, but there are 3",
        ),
    ],
)
def test__data_that_cannot_be_scored_is_an_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CapiError, match=message):
        protocol(broken(colored_data(), **changes), **ALONE).run(PatchColors())


def test__more_neighbors_than_images_are_left_out_with_a_warning() -> None:
    # 24 images, of which 2 are held out.
    outcome = protocol(colored_data(), neighbors=(1, 22, 23, 100)).run(PatchColors())
    assert {row["neighbours"] for row in outcome.grid} == {1, 22}
    assert beside_choice(outcome) == ["neighbours [23, 100] were not tried: they are more than 22 images"]


def test__fewer_images_than_any_number_of_neighbors_are_an_error() -> None:
    with pytest.raises(CapiError, match="24 labeled images are fewer than the 25 neighbours"):
        protocol(colored_data(), **{**ALONE, "neighbors": (25,)}).run(PatchColors())


def test__an_encoder_without_a_pooled_vector_is_a_warning() -> None:
    outcome = protocol(colored_data()).run(PatchColors(gives_pooled=False))
    assert beside_choice(outcome) == ["the encoder gives no pooled vector: the mean of the patches alone was used"]
    assert {row["feature"] for row in outcome.grid} == {"mean_patch"}
    assert outcome.main == 1.0
    assert beside_choice(protocol(colored_data()).run(PatchColors())) == []


def test__only_kinds_that_the_encoder_cannot_give_are_an_error() -> None:
    with pytest.raises(CapiError, match="no pooled vector, which pooled, both needs"):
        available_kinds(PatchColors(gives_pooled=False), ("pooled", "both"), SMALL)


@pytest.mark.parametrize("changes", [{"batch_size": 1}, {"batch_size": 64}, {"workers": 2}])
def test__results_do_not_depend_on_how_images_are_read(changes: dict[str, int]) -> None:
    data, encoder = noisy(), RandomPatches()
    first = protocol(data).run(encoder)
    other = protocol(data, encoding=replace(SMALL, **changes)).run(encoder)
    assert (other.scores, other.grid, other.chosen) == (first.scores, first.grid, first.chosen)
    assert len({row["validation"] for row in first.grid}) > 1


def test__the_held_out_images_follow_from_the_seed() -> None:
    data, encoder = noisy(), RandomPatches()
    grids = [protocol(data, seed=seed, validation_share=0.3).run(encoder).grid for seed in (0, 0, 1)]
    assert grids[0] == grids[1] != grids[2]


def test__departures_notes_and_the_size_are_reported() -> None:
    data = replace(colored_data(), notes=("one image is missing",))
    outcome = protocol(data, encoding=Encoding(size=(13, 8)), validation_share=0.2).run(PatchColors())
    assert outcome.deviations == [
        "the paper does not describe its k-NN classification: neighbours and votes are this package's choice",
        "validation share: 0.2 instead of 0.1",
        "image size: 13 x 8 px instead of 224 x 224 px",
        "image size: 12 x 8 px, the nearest to 13 x 8 px that patches of 4 fill",
        "one image is missing",
    ]
    assert outcome.details == {"classes": 3, "training images": 24, "held-out images": 4, "test images": {"test": 12}}


def test__the_probe_is_the_classifier_that_was_scored() -> None:
    outcome = protocol(colored_data(), encoding=Encoding(size=(13, 8))).run(PatchColors())
    probe = outcome.probe
    assert (probe.kind, probe.size, probe.classes) == ("knn", (12, 8), {0: "red", 1: "green", 2: "blue"})
    assert len(probe.model.bank) == 24
    assert (probe.model.feature, probe.model.neighbors) == (outcome.chosen["feature"], outcome.chosen["neighbours"])
