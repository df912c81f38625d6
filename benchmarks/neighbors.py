"""Neighbors found once for every k, and the votes of their pixel labels, against the plain ways.

    python benchmarks/neighbors.py

All ways run in turn in one run. The plain search is one for every k; scikit-learn's is brute force too, in float64 as
ours is in effect. The plain vote counts every label of the data set at every pixel.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from measure import Work, interleaved_best
from torch import Tensor

from capi.evals.neighbors import Distance, NearestNeighbors
from capi.evals.patches import vote_blocks

ALL_K = (1, 3, 10, 30)
SCIKIT_METRIC: dict[Distance, str] = {"cosine": "cosine", "l2": "euclidean"}


def searched_once(bank: Tensor, queries: Tensor) -> dict[tuple[Distance, int], Tensor]:
    nearest = {name: NearestNeighbors(max(ALL_K), name).fit(bank).kneighbors(queries).index for name in SCIKIT_METRIC}
    return {(name, k): index[:, :k] for name, index in nearest.items() for k in ALL_K}


def searched_for_every_k(bank: Tensor, queries: Tensor) -> dict[tuple[Distance, int], Tensor]:
    return {
        (name, k): NearestNeighbors(k, name).fit(bank).kneighbors(queries).index
        for name in SCIKIT_METRIC
        for k in ALL_K
    }


def searched_by_scikit_learn(
    bank: Tensor, queries: Tensor, numbers: tuple[int, ...]
) -> dict[tuple[Distance, int], Tensor]:
    from sklearn.neighbors import NearestNeighbors

    points = bank.double().numpy(), queries.double().numpy()
    return {
        (name, k): torch.from_numpy(
            NearestNeighbors(n_neighbors=k, metric=metric, algorithm="brute")
            .fit(points[0])
            .kneighbors(points[1], return_distance=False)
        )
        for name, metric in SCIKIT_METRIC.items()
        for k in numbers
    }


def vectors(count: int, width: int) -> Tensor:
    """Vectors of few dimensions with noise in all, far from the origin, as features are."""
    basis = torch.randn(24, width, generator=torch.Generator().manual_seed(1))
    return torch.randn(count, 24) @ basis + 0.3 * torch.randn(count, width) + 2


def search(arguments: argparse.Namespace) -> None:
    bank, queries = vectors(arguments.bank, arguments.width), vectors(arguments.queries, arguments.width)
    works: dict[str, Work] = {
        "once for all k": partial(searched_once, bank, queries),
        "for every k": partial(searched_for_every_k, bank, queries),
        "scikit-learn, once": partial(searched_by_scikit_learn, bank, queries, (max(ALL_K),)),
        "scikit-learn, for every k": partial(searched_by_scikit_learn, bank, queries, ALL_K),
    }
    ours, theirs = searched_once(bank, queries), searched_by_scikit_learn(bank, queries, ALL_K)
    same = all(torch.equal(ours[key], theirs[key]) for key in ours)
    print(f"{len(queries)} x {len(bank)} vectors of {bank.shape[1]}, both distances, k = {ALL_K}")
    print(f"  the same neighbours as scikit-learn: {'yes' if same else 'NO'}")
    report(works, arguments.rounds)


def pixel_labels(count: int, labels: int, side: int = 14) -> Tensor:
    """Blocks of one label, or of two with a straight border between them."""
    first, second = torch.randint(labels, (2, count, 1, 1))
    ramp = torch.arange(side)[:, None] + torch.arange(side)
    border = torch.where(torch.rand(count) < 0.6, 2 * side, torch.randint(2 * side, (count,)))[:, None, None]
    return torch.where(ramp < border, first, second).to(torch.uint8)


def counted_votes(blocks: Tensor, neighbors: Tensor, labels: int) -> Iterator[Tensor]:
    pixels = blocks[0].numel()
    for numbers in neighbors.split(64):
        votes = blocks[numbers].flatten(2).transpose(1, 2).long()
        counts = torch.zeros(len(numbers), pixels, labels, dtype=torch.int16)
        yield counts.scatter_add_(2, votes, torch.ones_like(votes, dtype=torch.int16)).argmax(2)


def votes(arguments: argparse.Namespace) -> None:
    blocks = pixel_labels(arguments.bank, arguments.labels)
    # Half of the neighbours of a patch are of its label, the others of any.
    order = blocks[:, 0, 0].argsort()
    start = torch.randint(arguments.bank - 60, (arguments.patches, 1))
    alike = order[start + torch.randint(60, (arguments.patches, max(ALL_K)))]
    other = torch.randint(arguments.bank, alike.shape)
    neighbors = torch.where(torch.rand(alike.shape) < 0.5, alike, other)
    for k in ALL_K:
        index = neighbors[:, :k]
        works: dict[str, Work] = {
            "compared": partial(vote_blocks, blocks, index),
            "counted": lambda index=index: list(counted_votes(blocks, index, arguments.labels)),  # type: ignore[misc]
        }
        print(f"votes at 14 x 14 pixels of {arguments.patches} patches, {arguments.labels} labels, k = {k}")
        report(works, arguments.rounds)


def report(works: dict[str, Work], rounds: int) -> None:
    """Times, and how many times that of the first the others take."""
    seconds = interleaved_best(works, rounds)
    first = next(iter(seconds.values()))
    for name, time in seconds.items():
        print(f"  {name:26} {time:7.3f} s   {time / first:5.1f} x")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("bank", 10000), ("queries", 1024), ("width", 384), ("patches", 1024), ("labels", 150)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    search(arguments)
    votes(arguments)


if __name__ == "__main__":
    main()
