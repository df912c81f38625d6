import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from capi.errors import CapiError
from capi.evals.neighbours import NearestNeighbours

SCIKIT_METRIC = {"cosine": "cosine", "l2": "euclidean"}


def labelled_clouds(count: int, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Five overlapping clouds, so that neighbours disagree."""
    labels = torch.randint(5, (count,))
    centres = torch.randn(5, 12, generator=torch.Generator().manual_seed(7))
    return centres[labels] + torch.randn(count, 12) + offset, labels


def voted_slowly(labels: list[int]) -> int:
    """The commonest label; of several, the one that comes first."""
    return max(labels, key=lambda label: (labels.count(label), -labels.index(label)))


@pytest.mark.parametrize("distance", SCIKIT_METRIC)
@pytest.mark.parametrize("k", [1, 3, 10, 300])
def test__agrees_with_scikit_learn(distance: str, k: int) -> None:
    (features, labels), (queries, wanted) = labelled_clouds(300), labelled_clouds(200)
    ours = NearestNeighbours(k, distance).fit(features, labels)
    theirs = KNeighborsClassifier(k, metric=SCIKIT_METRIC[distance]).fit(features.double().numpy(), labels.numpy())
    nearest = theirs.kneighbors(queries.double().numpy(), return_distance=False)
    assert ours.kneighbors(queries).tolist() == nearest.tolist()
    clear = torch.tensor([votes.bincount(minlength=5).sort().values.diff()[-1] > 0 for votes in labels[nearest]])
    assert clear.float().mean() > 0.6
    expected = torch.from_numpy(theirs.predict(queries.double().numpy()))
    predicted = ours.predict(queries)
    assert torch.equal(predicted[clear], expected[clear])
    assert ours.score(queries, wanted) == pytest.approx((predicted == wanted).sum().item() / 200)


def test__l2_is_exact_far_from_the_origin() -> None:
    (features, labels), (queries, _) = labelled_clouds(300, offset=1000.0), labelled_clouds(100, offset=1000.0)
    theirs = KNeighborsClassifier(10).fit(features.double().numpy(), labels.numpy())
    nearest = theirs.kneighbors(queries.double().numpy(), return_distance=False)
    assert NearestNeighbours(10, "l2").fit(features, labels).kneighbors(queries).tolist() == nearest.tolist()


@pytest.mark.parametrize("k", [2, 4, 9])
def test__tied_votes_go_to_the_class_of_the_nearest_member(k: int) -> None:
    labels = torch.randint(6, (50,))
    nearest = torch.stack([torch.randperm(50)[:k] for _ in range(500)])
    expected = [voted_slowly(labels[row].tolist()) for row in nearest]
    lowest_class = labels[nearest].mode(dim=1).values
    assert (torch.tensor(expected) != lowest_class).any()
    classifier = NearestNeighbours(k).fit(torch.randn(50, 3), labels)
    assert classifier.vote(nearest).tolist() == expected


def test__equally_distant_neighbours_count_in_the_order_of_the_training_set() -> None:
    # Whole numbers on a small grid: distances are exact, and many are equal.
    features, queries = torch.randint(3, (120, 2)), torch.randint(3, (40, 2))
    squares = (queries[:, None] - features[None]).square().sum(2)
    expected = [sorted(range(120), key=lambda number, row=row: (row[number], number))[:7] for row in squares.tolist()]
    classifier = NearestNeighbours(7, "l2").fit(features.float(), torch.randint(4, (120,)))
    assert classifier.kneighbors(queries.float()).tolist() == expected


@pytest.mark.parametrize("distance", SCIKIT_METRIC)
def test__queries_do_not_depend_on_their_chunk(distance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (features, labels), (queries, _) = labelled_clouds(60), labelled_clouds(50)
    classifier = NearestNeighbours(5, distance).fit(features, labels)
    whole = classifier.kneighbors(queries)
    monkeypatch.setattr("capi.evals.neighbours._ROWS_AT_A_TIME", 7)
    assert torch.equal(classifier.kneighbors(queries), whole)
    assert torch.equal(classifier.kneighbors(queries.flip(0)), whole.flip(0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test__values_that_are_not_finite_are_errors(value: float) -> None:
    features, labels = labelled_clouds(20)
    broken = features.clone()
    broken[3, 2] = value
    with pytest.raises(CapiError, match="no finite numbers"):
        NearestNeighbours(5).fit(broken, labels)
    with pytest.raises(CapiError, match="no finite numbers"):
        NearestNeighbours(5).fit(features, labels).predict(broken)


def test__fewer_labelled_images_than_neighbours_are_an_error() -> None:
    features, labels = labelled_clouds(9)
    NearestNeighbours(9).fit(features, labels)
    with pytest.raises(CapiError, match="9 labelled images are fewer than the 10 neighbours"):
        NearestNeighbours(10).fit(features, labels)
