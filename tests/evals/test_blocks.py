from collections import Counter

import pytest
import torch
from torch import Tensor

from capi.errors import CapiError
from capi.evals.patches import is_counted, patch_labels, pixel_blocks, unblock, vote_blocks


def voted_slowly(votes: list[int], ignored: set[int], common: int, ties: str) -> int:
    """The commonest label that has a voice, the smallest or first of several; `common` where none has."""
    voiced = [label for label in votes if label not in ignored]
    rank = voiced.index if ties == "nearest" else int
    return max(voiced, key=lambda label: (voiced.count(label), -rank(label))) if voiced else common


def common_slowly(labels: list[int], ignored: set[int]) -> int:
    counts = Counter(label for label in labels if label not in ignored)
    return min(counts, key=lambda label: (-counts[label], label))


def blocks_voted_slowly(blocks: Tensor, neighbors: Tensor, ignored: set[int], ties: str = "smallest") -> Tensor:
    voted = torch.empty(len(neighbors), *blocks.shape[1:], dtype=blocks.dtype)
    for patch, numbers in enumerate(neighbors):
        chosen = blocks[numbers]
        common = common_slowly(chosen.flatten().tolist(), ignored)
        for row in range(blocks.shape[1]):
            for column in range(blocks.shape[2]):
                voted[patch, row, column] = voted_slowly(chosen[:, row, column].tolist(), ignored, common, ties)
    return voted


def test__blocks_follow_the_feature_map() -> None:
    masks = torch.randint(256, (3, 6, 20), dtype=torch.uint8)
    blocks = pixel_blocks(masks, 2, 5)
    assert blocks.shape == (30, 3, 4)
    assert blocks.dtype == torch.uint8
    for image, row, column in torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(5)).tolist():
        expected = masks[image, 3 * row : 3 * row + 3, 4 * column : 4 * column + 4]
        assert torch.equal(blocks[image * 10 + row * 5 + column], expected)
    assert torch.equal(unblock(blocks, 2, 5), masks)


def test__what_cannot_be_cut_or_joined_is_an_error() -> None:
    with pytest.raises(CapiError, match="6 x 20 pixels cannot be cut into 4 x 5"):
        pixel_blocks(torch.zeros(1, 6, 20, dtype=torch.uint8), 4, 5)
    with pytest.raises(CapiError, match="7 patches are no whole number of images"):
        unblock(torch.zeros(7, 2, 2, dtype=torch.uint8), 2, 3)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64])
def test__a_patch_takes_its_most_frequent_label(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.randint(3, (200, 2, 3)).to(kind) * 100 + 7
    blocks[0], blocks[1] = 107, torch.tensor([[207, 207, 107], [107, 7, 7]]).to(kind)
    expected = [common_slowly(block.flatten().tolist(), set()) for block in blocks]
    assert expected[:2] == [107, 7]
    assert patch_labels(blocks).tolist() == expected
    assert patch_labels(blocks).dtype == kind
    monkeypatch.setattr("capi.evals.patches._COUNTS_AT_A_TIME", 1000)
    assert patch_labels(blocks).tolist() == expected


def test__labels_may_lie_below_zero() -> None:
    assert patch_labels(torch.tensor([[[-1, -1, 4, 9]], [[4, -1, 9, 9]]])).tolist() == [-1, 9]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int64])
def test__ignored_labels_do_not_count(kind: torch.dtype) -> None:
    labels = torch.tensor([0, 3, 255, 7]).to(kind)
    assert is_counted(labels, {0, 255}).tolist() == [False, True, False, True]
    assert is_counted(labels, ()).all()


@pytest.mark.parametrize("ties", ["smallest", "nearest"])
@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test__every_pixel_takes_the_label_of_the_most_neighbors(k: int, clean: bool, ties: str) -> None:
    blocks = torch.tensor([0, 3, 4, 9, 255])[torch.randint(5, (40, 3, 2))].to(torch.uint8)
    # Every patch of the bank has a label that counts.
    blocks[:, 0, 0] = torch.randint(3, 5, (40,))
    neighbors = torch.stack([torch.randperm(40)[:k] for _ in range(60)])
    expected = blocks_voted_slowly(blocks, neighbors, {0, 255} if clean else set(), ties)
    voted = vote_blocks(blocks, neighbors, ignored={0, 255}, clean=clean, ties=ties)
    assert torch.equal(voted, expected)
    assert bool(is_counted(voted, {0, 255}).all()) is clean


@pytest.mark.parametrize("k", [181, 300])
def test__many_neighbors_are_counted_rightly(k: int) -> None:
    blocks = torch.randint(3, (400, 2, 2))
    neighbors = torch.stack([torch.randperm(400)[:k] for _ in range(5)])
    assert torch.equal(vote_blocks(blocks, neighbors), blocks_voted_slowly(blocks, neighbors, set()))
    same = torch.full((400, 2, 2), 5, dtype=torch.uint8)
    assert (vote_blocks(same, neighbors) == 5).all()


def test__the_vote_does_not_depend_on_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, neighbors = torch.randint(4, (30, 2, 2), dtype=torch.uint8), torch.randint(30, (50, 4))
    whole = vote_blocks(blocks, neighbors)
    monkeypatch.setattr("capi.evals.patches._LABELS_AT_A_TIME", 100)
    assert torch.equal(vote_blocks(blocks, neighbors), whole)


def test__tied_labels_go_to_the_smallest_or_to_the_nearest_neighbor() -> None:
    blocks = torch.tensor([4, 2, 9], dtype=torch.uint8).view(3, 1, 1)
    neighbors = torch.tensor([[1, 0, 2], [2, 1, 0], [0, 1, 2]])
    assert vote_blocks(blocks, neighbors).flatten().tolist() == [2, 2, 2]
    assert vote_blocks(blocks, neighbors, ties="nearest").flatten().tolist() == [2, 9, 4]


def test__pixels_without_a_voice_take_the_commonest_label_of_the_blocks() -> None:
    blocks = torch.tensor([[[255, 1, 1]], [[255, 2, 255]]], dtype=torch.uint8)
    neighbors = torch.tensor([[1, 0]])
    assert vote_blocks(blocks, neighbors, ignored=[255]).tolist() == [[[255, 1, 1]]]
    assert vote_blocks(blocks, neighbors, ignored=[255], clean=True).tolist() == [[[1, 1, 1]]]
    assert vote_blocks(blocks, neighbors, ignored=[255], ties="nearest").tolist() == [[[255, 2, 255]]]
    assert vote_blocks(blocks, neighbors, ignored=[255], clean=True, ties="nearest").tolist() == [[[1, 2, 1]]]


def test__neighbors_without_any_label_that_counts_are_an_error() -> None:
    blocks = torch.full((2, 1, 3), 255, dtype=torch.uint8)
    with pytest.raises(CapiError, match="nothing but ignored labels"):
        vote_blocks(blocks, torch.tensor([[0, 1]]), ignored=[255], clean=True)
