from collections.abc import Callable
from typing import get_args

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neighbors import NearestNeighbors as TheirNeighbors
from torch import Tensor

from capi.errors import CapiError
from capi.evals import neighbors as module
from capi.evals.fitted_probes import vote_confidences
from capi.evals.neighbors import Distance, NearestNeighbors, class_votes

DISTANCES: tuple[Distance, ...] = get_args(Distance)
SCIKIT_METRIC = {"cosine": "cosine", "l2": "euclidean"}
# Small enough that tens of vectors are several blocks.
FEW_BYTES = 12_000


def labeled_clouds(count: int, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Five overlapping clouds, so that neighbours disagree."""
    labels = torch.randint(5, (count,))
    centers = torch.randn(5, 12, generator=torch.Generator().manual_seed(7))
    return centers[labels] + torch.randn(count, 12) + offset, labels


def nearest_slowly(features: Tensor, queries: Tensor, k: int, distance: str) -> Tensor:
    """The nearest by differences in float64, one query at a time; of equally distant ones the first."""
    bank, points = features.double(), queries.double()
    if distance == "cosine":
        bank, points = (vectors / vectors.norm(dim=1, keepdim=True) for vectors in (bank, points))
    squares = torch.stack([(bank - point).square().sum(1) for point in points])
    return squares.sort(dim=1, stable=True).indices[:, :k]


def voted_slowly(labels: list[int]) -> int:
    """The commonest label; of several, the one that comes first."""
    return max(labels, key=lambda label: (labels.count(label), -labels.index(label)))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("k", [1, 3, 10, 300])
def test__agrees_with_scikit_learn(distance: Distance, k: int, offset: float) -> None:
    (features, _), (queries, _) = labeled_clouds(300, offset), labeled_clouds(200, offset)
    theirs = TheirNeighbors(n_neighbors=k, metric=SCIKIT_METRIC[distance], algorithm="brute")
    distances, nearest = theirs.fit(features.double().numpy()).kneighbors(queries.double().numpy())
    if distance == "cosine" and offset:
        # Its cosines differ by rounding alone this far out.
        nearest, distances = nearest_slowly(features, queries, k, distance).numpy(), distances.round(12)
    neighbors = NearestNeighbors(k, distance).fit(features).kneighbors(queries)
    assert neighbors.index.tolist() == nearest.tolist()
    assert neighbors.index.dtype == torch.long
    closeness = 1 - distances if distance == "cosine" else -distances
    torch.testing.assert_close(neighbors.closeness, torch.from_numpy(closeness), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("distance", DISTANCES)
def test__votes_as_scikit_learn_where_the_vote_is_clear(distance: Distance) -> None:
    (features, labels), (queries, _) = labeled_clouds(300), labeled_clouds(200)
    theirs = KNeighborsClassifier(10, metric=SCIKIT_METRIC[distance]).fit(features.double().numpy(), labels.numpy())
    neighbors = NearestNeighbors(10, distance).fit(features).kneighbors(queries)
    votes = class_votes(labels[neighbors.index], neighbors.closeness, 10, 5)
    clear = votes.sort().values.diff()[:, -1] > 0
    assert 0.6 < clear.double().mean() < 1
    expected = torch.from_numpy(theirs.predict(queries.double().numpy()))
    assert torch.equal(votes.argmax(1)[clear], expected[clear])


@pytest.mark.parametrize("distance", DISTANCES)
def test__fewer_neighbors_are_the_first_of_more(distance: Distance) -> None:
    (features, _), (queries, _) = labeled_clouds(90), labeled_clouds(30)
    most = NearestNeighbors(30, distance).fit(features).kneighbors(queries)
    for k in (1, 3, 10):
        fewer = NearestNeighbors(k, distance).fit(features).kneighbors(queries)
        assert torch.equal(fewer.index, most.index[:, :k])
        assert torch.equal(fewer.closeness, most.closeness[:, :k])


def close_together(count: int) -> Tensor:
    """Differences of a few units in the last place of float32."""
    return 1 + torch.randint(8, (count, 6)) * 2.0**-23


def one_far_away(count: int) -> Tensor:
    """One vector so long that products in its units tell the others apart badly."""
    features = torch.randn(count, 6)
    features[count // 2] *= 1e7
    return features


def many_copies(count: int) -> Tensor:
    return torch.randn(9, 6)[torch.randint(9, (count,))]


def tiny_values(count: int) -> Tensor:
    return torch.randn(count, 6) * 1e-30


def huge_values(count: int) -> Tensor:
    return torch.randn(count, 6) * 1e30


@pytest.mark.parametrize("make", [close_together, one_far_away, many_copies, tiny_values, huge_values])
@pytest.mark.parametrize("chunk_bytes", [FEW_BYTES, 2**28])
@pytest.mark.parametrize("distance", DISTANCES)
def test__is_exact_for_awkward_vectors(distance: Distance, chunk_bytes: int, make: Callable[[int], Tensor]) -> None:
    features = make(150)
    queries = torch.cat([make(20), features[::3]])
    search = NearestNeighbors(7, distance, chunk_bytes=chunk_bytes).fit(features)
    assert torch.equal(search.kneighbors(queries).index, nearest_slowly(features, queries, 7, distance))


@pytest.mark.parametrize("chunk_bytes", [FEW_BYTES, 2**28])
@pytest.mark.parametrize("distance", DISTANCES)
def test__a_vector_of_the_bank_finds_itself(distance: Distance, chunk_bytes: int) -> None:
    features = labeled_clouds(80, offset=300.0)[0]
    features[50:] = features[torch.randint(50, (30,))]
    first = [next(other for other in range(80) if features[other].equal(row)) for row in features]
    neighbors = NearestNeighbors(3, distance, chunk_bytes=chunk_bytes).fit(features).kneighbors(features)
    assert neighbors.index[:, 0].tolist() == first
    assert (neighbors.closeness[:, 0] == (1 if distance == "cosine" else 0)).all()


@pytest.mark.parametrize("chunk_bytes", [1500, 2**28])
def test__equally_distant_neighbors_count_in_the_order_of_the_training_set(chunk_bytes: int) -> None:
    # Whole numbers on a small grid: distances are exact, and many are equal.
    features, queries = torch.randint(3, (400, 2)), torch.randint(3, (40, 2))
    squares = (queries[:, None] - features[None]).square().sum(2)
    expected = [sorted(range(400), key=lambda number, row=row: (row[number], number))[:50] for row in squares.tolist()]
    search = NearestNeighbors(50, "l2", chunk_bytes=chunk_bytes).fit(features.float())
    assert search.kneighbors(queries.float()).index.tolist() == expected


def test__copies_beyond_the_neighbors_are_dropped_and_only_those() -> None:
    # The second vector is as long as the first, and is no copy of it.
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 3.0]], dtype=torch.float64)[torch.randint(3, (60,))]
    numbers_left = module._first_copies(vectors, vectors.square().sum(1), 4).tolist()
    for copies in ([0.0, 1.0], [1.0, 0.0], [3.0, 3.0]):
        numbers = [number for number, row in enumerate(vectors.tolist()) if row == copies]
        assert [number for number in numbers_left if number in numbers][:4] == numbers[:4]
    assert numbers_left == sorted(numbers_left)
    assert len(numbers_left) < 60


@pytest.mark.parametrize("distance", DISTANCES)
def test__more_vectors_than_are_looked_at_first_are_too_close_to_tell(distance: Distance) -> None:
    """All of them are measured, however many there are."""
    direction = torch.randn(8)
    features = direction + torch.randint(3, (2000, 8)) * 2.0**-22
    queries = features[::400] + 2.0**-21
    search = NearestNeighbors(3, distance).fit(features)
    assert torch.equal(search.kneighbors(queries).index, nearest_slowly(features, queries, 3, distance))


@pytest.mark.parametrize("distance", DISTANCES)
def test__the_result_does_not_depend_on_how_the_work_is_cut(
    distance: Distance, monkeypatch: pytest.MonkeyPatch
) -> None:
    (features, _), (queries, _) = labeled_clouds(700), labeled_clouds(50)
    whole = NearestNeighbors(5, distance).fit(features).kneighbors(queries)
    cut = NearestNeighbors(5, distance, chunk_bytes=FEW_BYTES).fit(features)
    assert cut.block_rows_ < 100
    assert cut.query_rows_ < 50
    monkeypatch.setattr(module, "_CANDIDATES_AT_A_TIME", 70)
    monkeypatch.setitem(module._ELEMENTS_AT_A_TIME, "cpu", 100)
    for search in (cut, NearestNeighbors(5, distance).fit(features)):
        for ours, expected in zip(search.kneighbors(queries), whole, strict=True):
            assert torch.equal(ours, expected)
        assert torch.equal(search.kneighbors(queries.flip(0)).index, whole.index.flip(0))


@pytest.mark.parametrize("distance", DISTANCES)
def test__vectors_are_standardised_on_the_way(distance: Distance) -> None:
    (features, _), (queries, _) = labeled_clouds(90, offset=5.0), labeled_clouds(30, offset=5.0)
    mean, scale = features.mean(0), torch.rand(12) + 0.1
    expected = NearestNeighbors(8, distance).fit((features.double() - mean) / scale)
    before = features.clone()
    neighbors = NearestNeighbors(8, distance).fit(features, mean=mean, scale=scale).kneighbors(queries)
    for ours, theirs in zip(neighbors, expected.kneighbors((queries.double() - mean) / scale), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert torch.equal(features, before)


def test__a_search_that_is_changed_finds_again() -> None:
    (features, _), (queries, _) = labeled_clouds(90, offset=1.0), labeled_clouds(30, offset=1.0)
    search = NearestNeighbors(8, "l2").fit(features)
    assert torch.equal(search.kneighbors(queries).index, search.kneighbors(queries).index)
    search.distance = "cosine"
    assert torch.equal(search.kneighbors(queries).index, nearest_slowly(features, queries, 8, "cosine"))
    others = labeled_clouds(90, offset=1.0)[0]
    assert torch.equal(search.fit(others).kneighbors(queries).index, nearest_slowly(others, queries, 8, "cosine"))


@pytest.mark.parametrize(("bank_bytes", "times"), [(None, 1), (60 * 8 * 12, 1), (60 * 8 * 12 - 1, 3)])
def test__a_bank_that_there_is_room_for_is_prepared_once(
    monkeypatch: pytest.MonkeyPatch, bank_bytes: int | None, times: int
) -> None:
    prepared = []
    of = module._Block.of
    monkeypatch.setattr(module._Block, "of", lambda *words: prepared.append(words[1]) or of(*words))
    bank, asked = torch.randn(60, 8), torch.randn(9, 8)
    search = NearestNeighbors(3, "l2", chunk_bytes=8000, bank_bytes=bank_bytes).fit(bank)
    blocks = -(-60 // search.block_rows_)
    assert blocks > 2
    indices = [search.kneighbors(part).index for part in asked.split(3)]
    assert len(prepared) == times * blocks
    assert torch.equal(torch.cat(indices), torch.cdist(asked.double(), bank.double()).topk(3, largest=False).indices)


def test__a_bank_is_prepared_again_for_other_features() -> None:
    search = NearestNeighbors(1, "l2", chunk_bytes=8000)
    first, second = torch.randn(60, 8), torch.randn(60, 8)
    for bank in (first, second, first):
        assert search.fit(bank).kneighbors(bank).index[:, 0].tolist() == list(range(60))


def test__vectors_without_direction_are_at_a_right_angle_to_all() -> None:
    features = torch.tensor([[0.0, 0.0], [-1.0, 0.0], [1.0, 0.1], [0.0, 0.0]])
    neighbors = NearestNeighbors(4).fit(features).kneighbors(torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
    assert neighbors.index.tolist() == [[0, 1, 2, 3], [2, 0, 3, 1]]
    assert neighbors.closeness[0].tolist() == [0, 0, 0, 0]
    assert neighbors.closeness[1, [1, 2, 3]].tolist() == pytest.approx([0, 0, -1])


def test__low_precision_of_training_does_not_reach_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    (features, _), (queries, _) = labeled_clouds(900), labeled_clouds(30)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    seen = []
    nearer = module._nearer
    monkeypatch.setattr(
        module, "_nearer", lambda *given: seen.append(torch.get_float32_matmul_precision()) or nearer(*given)
    )
    try:
        with torch.autocast("cpu", torch.bfloat16):
            neighbors = NearestNeighbors(5, "l2").fit(features).kneighbors(queries)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert set(seen) == {"highest"}
    assert torch.equal(neighbors.index, nearest_slowly(features, queries, 5, "l2"))


def test__all_rounding_errors_are_within_the_bound() -> None:
    bank = module._points(torch.randn(500, 40, dtype=torch.float64) + 3, "l2")
    queries = module._points(torch.randn(50, 40, dtype=torch.float64) * 5, "l2")
    block = module._Block.of(bank, 0, 5, "cpu")
    shifted = queries.vectors - block.center
    unit = shifted.norm(dim=1).max().item()
    ratio = block.unit / unit
    products = torch.nn.functional.pad((shifted / unit).float(), (0, 1), value=ratio) @ block.products[:500].T
    squares = (queries.vectors[:, None] - bank.vectors[None]).square().sum(2)
    exact = (shifted.square().sum(1)[:, None] - squares) / (2 * unit * block.unit)
    errors = (products - exact).abs().amax(1)
    bound = module._largest_error(shifted.norm(dim=1) / unit, block, ratio)
    assert (errors > 0).any()
    assert (errors < bound).all()
    assert (bound < 1e-5).all()


@pytest.mark.parametrize("k", [2, 4, 9])
def test__tied_votes_go_to_the_class_of_the_nearest_member(k: int) -> None:
    labels = torch.randint(6, (500, 9))
    expected = [voted_slowly(row[:k].tolist()) for row in labels]
    assert (torch.tensor(expected) != labels[:, :k].mode(dim=1).values).any()
    assert class_votes(labels, torch.zeros(labels.shape), k, 6).sum(1).tolist() == [k] * 500
    shares = vote_confidences(
        labels, torch.zeros(labels.shape), neighbors=k, classes=6, vote="majority", temperature=0.07
    )
    assert shares.argmax(1).tolist() == expected


def test__weighted_votes_sum_the_exponential_of_similarities() -> None:
    labels, closeness = torch.randint(4, (50, 7)), torch.rand(50, 7).sort(descending=True).values
    expected = torch.zeros(50, 4, dtype=torch.float64)
    for row in range(50):
        for place in range(5):
            expected[row, labels[row, place]] += torch.exp(closeness[row, place].double() / 0.07)
    votes = class_votes(labels, closeness, 5, 4, vote="weighted")
    torch.testing.assert_close(votes, expected)
    flat = class_votes(labels, closeness, 5, 4, vote="weighted", temperature=1e9)
    torch.testing.assert_close(flat, class_votes(labels, closeness, 5, 4))


def test__more_voters_than_neighbors_are_an_error() -> None:
    with pytest.raises(CapiError, match="5 neighbours cannot vote where 4 were found"):
        class_votes(torch.zeros(2, 4).long(), torch.zeros(2, 4), 5, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test__values_that_are_not_finite_are_errors(value: float) -> None:
    features, _ = labeled_clouds(20)
    broken = features.clone()
    broken[3, 2] = value
    with pytest.raises(CapiError, match="no finite numbers"):
        NearestNeighbors(5).fit(broken)
    with pytest.raises(CapiError, match="no finite numbers"):
        NearestNeighbors(5).fit(features).kneighbors(broken)


def test__neighbors_that_cannot_be_asked_are_errors() -> None:
    features, _ = labeled_clouds(9)
    NearestNeighbors(9).fit(features)
    with pytest.raises(CapiError, match="9 training vectors are fewer than the 10 neighbours"):
        NearestNeighbors(10).fit(features)
    with pytest.raises(CapiError, match="0 neighbours cannot be asked"):
        NearestNeighbors(0).fit(features)
    with pytest.raises(CapiError, match="scale of each feature must be above 0"):
        NearestNeighbors(3).fit(features, scale=torch.zeros(12))
