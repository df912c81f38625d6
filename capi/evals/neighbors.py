"""k nearest neighbours, exact and in bounded memory, and what their classes say.

A block of the bank at a time, products in float32 find the candidates: every vector whose product comes within a bound
on all rounding errors of the k best. Only candidates are measured, by differences in float64, so that the result is
that of float64 throughout and does not depend on how the work was cut. The cosine of two vectors is a matter of the
distance of their directions, so both distances are one search; a vector that is itself in the bank is at distance 0.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.errors import CapiError
from capi.runtime.devices import float32_products
from capi.types import Float, Int

Distance = Literal["cosine", "l2"]
Vote = Literal["majority", "weighted"]
DEFAULT_CHUNK_BYTES = 256 * 2**20
DEFAULT_BANK_BYTES = 2**30
# Of a value that is ready for products: in float64, and in float32.
_READY_BYTES = 12
_LARGEST_BLOCK = 32768
_CANDIDATES_AT_A_TIME = 2**20
# Differences of so many values stay in the cache of a processor, and are too few for torch to call other threads.
_ELEMENTS_AT_A_TIME = {"cpu": 2**15, "other": 2**24}
_FLOAT32, _FLOAT64 = 2.0**-24, 2.0**-53


class Neighbors(NamedTuple):
    """Numbers of training vectors, nearest first, with their cosine similarity or minus their distance.

    The first k columns are the k nearest, for any smaller k.
    """

    index: Int[Tensor, "s k"]  # type: ignore[assignment]
    closeness: Float[Tensor, "s k"]


class NearestNeighbors:
    """The k nearest training vectors, in the manner of scikit-learn.

    Equally distant neighbours count in the order of the training set. The training vectors stay where they are (they
    may be mapped from a file) and are standardised on the way: `(vector - mean) / scale`, as are those asked about.
    Blocks of both are moved to `device`; `chunk_bytes` is about the memory that the work takes there. A bank that takes
    no more than `bank_bytes` there stays ready from one search to the next (default: 1 GiB; a third of what is free on
    a CUDA device).
    """

    def __init__(
        self,
        neighbors: int = 10,
        distance: Distance = "cosine",
        *,
        device: torch.device | str = "cpu",
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        bank_bytes: int | None = None,
    ) -> None:
        self.neighbors, self.distance = neighbors, distance
        self.device, self.chunk_bytes, self.bank_bytes = device, chunk_bytes, bank_bytes

    def fit(
        self,
        features: Float[Tensor, "s d"],
        *,
        mean: Float[Tensor, " d"] | None = None,
        scale: Float[Tensor, " d"] | None = None,
    ) -> "NearestNeighbors":
        if self.neighbors < 1:
            raise CapiError(f"{self.neighbors} neighbours cannot be asked: the least is 1")
        if len(features) < self.neighbors:
            raise CapiError(f"{len(features)} training vectors are fewer than the {self.neighbors} neighbours to ask")
        if scale is not None and not (scale > 0).all():
            raise CapiError("the scale of each feature must be above 0: give a feature that never varies the scale 1")
        self.mean_, self.scale_ = mean, scale
        self.block_rows_, self.query_rows_ = _rows_at_a_time(self.chunk_bytes, features.shape[1])
        _must_be_finite(features, self.block_rows_)
        self.features_ = features
        self._ready: dict[tuple[str, int, Distance], list[_Block]] = {}
        return self

    @torch.no_grad()
    def kneighbors(self, features: Float[Tensor, "s d"]) -> Neighbors:
        """The nearest training vectors of each vector."""
        _must_be_finite(features, self.query_rows_)
        device = _device_of_float64(self.device)
        squared = torch.full((len(features), self.neighbors), torch.inf, dtype=torch.float64, device=device)
        index = torch.zeros(squared.shape, dtype=torch.long, device=device)
        # Products in true float32, whatever training chose: the bound on their errors relies on it.
        with float32_products("highest"), torch.autocast(torch.device(self.device).type, enabled=False):
            for block in self._blocks():
                for first in range(0, len(features), self.query_rows_):
                    rows = slice(first, first + self.query_rows_)
                    queries = self._points(features[rows])
                    squared[rows], index[rows] = _nearer(queries, block, squared[rows], index[rows])
        return _as_neighbors(squared.cpu(), index.cpu(), self.distance)

    def _blocks(self) -> Iterator["_Block"]:
        """The bank, ready for products; one that there is room for stays ready for the next search."""
        kind = str(self.device), self.neighbors, self.distance
        if kind not in self._ready:
            # What was ready for another device makes room.
            self._ready = {}
            # A bank stays ready if there is room from one search to the next; a single block is in memory anyway.
            room = self.bank_bytes
            if room is None:
                on_gpu = torch.device(self.device).type == "cuda"
                room = torch.cuda.mem_get_info(torch.device(self.device))[0] // 3 if on_gpu else DEFAULT_BANK_BYTES
            if len(self.features_) > self.block_rows_ and self.features_.numel() * _READY_BYTES > room:
                yield from self._prepared()
                return
            self._ready[kind] = list(self._prepared())
        yield from self._ready[kind]

    def _prepared(self) -> Iterator["_Block"]:
        for start in range(0, len(self.features_), self.block_rows_):
            bank = self._points(self.features_[start : start + self.block_rows_])
            yield _Block.of(bank, start, self.neighbors, self.device)

    def _points(self, features: Tensor) -> "_Points":
        vectors = features.to(_device_of_float64(self.device), torch.float64, copy=True)
        if self.mean_ is not None:
            vectors.sub_(self.mean_.to(vectors))
        if self.scale_ is not None:
            vectors.div_(self.scale_.to(vectors))
        return _points(vectors, self.distance)


def class_votes(
    labels: Int[Tensor, "s n"],
    closeness: Float[Tensor, "s n"],
    k: int,
    classes: int,
    vote: Vote = "majority",
    temperature: float = 0.07,
) -> Float[Tensor, "s classes"]:
    """What the k nearest of n neighbours, given by their labels, say of each class.

    `majority` counts them; `weighted` sums exp(similarity / temperature), which is meant for cosine similarity.
    """
    if not 1 <= k <= labels.shape[1]:
        raise CapiError(f"{k} neighbours cannot vote where {labels.shape[1]} were found: ask for 1 to that many")
    weights = torch.ones_like(closeness) if vote == "majority" else (closeness.double() / temperature).exp()
    votes = torch.zeros(len(labels), classes, dtype=torch.float64, device=labels.device)
    return votes.scatter_add_(1, labels[:, :k].long(), weights[:, :k].double())


class _Points(NamedTuple):
    """Vectors in float64 whose distances are wanted: for the cosine, directions. `zero`: those without direction."""

    vectors: Tensor
    zero: Tensor


class _Block(NamedTuple):
    """A part of the bank, ready for products: vectors less their `centre`, in parts of the longest, in float32.

    Half the squared distance of q and b is |q|^2 / 2 - (q.b - |b|^2 / 2), whatever the origin; it is the mean of the
    block here, because products of vectors far from the origin lose the digits that distinguish them.

    `products` is (rows, d + 1), row by row: b / unit, then -|b / unit|^2 / 2 in the last column.
    """

    points: _Points
    numbers: Tensor
    center: Tensor
    unit: float
    products: Tensor
    largest_half_square: float

    @classmethod
    def of(cls, bank: _Points, start: int, neighbors: int, device: torch.device | str) -> "_Block":
        center = bank.vectors.mean(0)
        shifted = bank.vectors - center
        square = torch.linalg.vector_norm(shifted, dim=1).square_()
        first = _first_copies(bank.vectors, square, neighbors)
        if len(first) < len(square):
            bank, shifted, square = _Points(bank.vectors[first], bank.zero[first]), shifted[first], square[first]
        unit = square.max().sqrt().item() or 1.0
        half_square = (square + bank.zero) / (2 * unit**2)
        products = torch.cat([shifted.div_(unit).float(), -half_square.float()[:, None]], 1).to(device)
        return cls(bank, first + start, center, unit, products, half_square.max().item())


def _points(vectors: Tensor, distance: Distance) -> _Points:
    """Normalize vectors for the distance, in place."""
    if distance == "l2":
        return _Points(vectors, vectors.new_zeros(len(vectors)))
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    zero = norms == 0
    return _Points(vectors.div_(norms.masked_fill_(zero, 1)), zero[:, 0].double())


def _first_copies(vectors: Tensor, square: Tensor, neighbors: int) -> Tensor:
    """Rows in their order, without those that as many equal rows precede as there are neighbours to find.

    Such rows are never among the nearest; thousands of them (white patches, a constant encoder) would all be
    candidates. Equal rows have equal squares, but not the other way round.
    """
    _, group, sizes = square.unique(return_inverse=True, return_counts=True)
    if sizes.max() <= neighbors:
        return torch.arange(len(vectors), device=vectors.device)
    order = group.sort(stable=True).indices
    starts = sizes.cumsum(0) - sizes
    large = (sizes > neighbors)[group[order]]
    rows, heads = order[large], order[starts[group[order[large]]]]
    copies = torch.zeros(len(vectors), dtype=torch.long, device=vectors.device)
    copies[large] = (vectors[rows] == vectors[heads]).all(1).long()
    before = copies.cumsum(0) - copies
    surplus = (copies > 0) & (before - before[starts[group[order]]] >= neighbors)
    return order[~surplus].sort().values


def _nearer(queries: _Points, block: _Block, squared: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The best of the neighbours known so far and of a block, which are few: more are looked at where products are too
    close to tell.
    """
    shifted = queries.vectors - block.center
    norms = torch.linalg.vector_norm(shifted, dim=1)
    unit = max(norms.max().item(), block.unit)
    norms, ratio = norms / unit, block.unit / unit
    error = _largest_error(norms, block, ratio)
    # With q and b in parts of `unit` a product is (q.b - |b|^2 / 2) / ratio, so |q - b|^2 = |q|^2 - 2 ratio product: a
    # vector is as near as `squared` where its product is at least (|q|^2 - squared / unit^2) / (2 ratio).
    least = (norms.square() - squared[:, -1] / unit**2) / (2 * ratio) - error
    least.masked_fill_(queries.zero > 0, torch.inf)
    # (s, d + 1) @ (d + 1, rows): a row of products, one after the other in memory, is a query against the whole block.
    products = F.pad((shifted / unit).float(), (0, 1), value=ratio).to(block.products.device) @ block.products.T
    squared, index = squared.clone(), index.clone()
    k, width = squared.shape[1], products.shape[1]
    count, pending = min(k + 16, width), torch.arange(len(norms), device=norms.device)
    while len(pending):
        unfinished = []
        for rows in pending.split(max(_CANDIDATES_AT_A_TIME // count, 1)):
            all_rows = len(rows) == len(products)
            values, columns = (products if all_rows else products[rows.to(products.device)]).topk(count, dim=1)
            values, columns = values.to(rows.device).double(), columns.to(rows.device)
            threshold = least[rows]
            if count >= k:
                threshold = torch.maximum(threshold, values[:, k - 1] - 2 * error[rows])
            reached = values >= threshold[:, None]
            crowded = reached[:, -1] & (count < width)
            unfinished.append(rows[crowded])
            which, place = (reached & ~crowded[:, None]).nonzero(as_tuple=True)
            distances = torch.full_like(values, torch.inf)
            distances[which, place] = _squared_distances(queries, block.points, rows[which], columns[which, place])
            # The k nearest of each row; of equally distant ones those with lower numbers.
            numbers, order = torch.cat([index[rows], block.numbers[columns]], 1).sort(1)
            ordered, nearest = torch.cat([squared[rows], distances], 1).gather(1, order).sort(dim=1, stable=True)
            squared[rows], index[rows] = ordered[:, :k], numbers.gather(1, nearest[:, :k])
        pending, count = torch.cat(unfinished), min(4 * count, width)
    return squared, index


def _largest_error(norms: Tensor, block: _Block, ratio: float) -> Tensor:
    """How far a product may be from its true value, for each query: the order of summation is not known.

    `norms` are those of the queries, and all lengths are in parts of the longest, as they are for the products.
    """
    width = block.products.shape[1]
    longest = norms + ratio * (1 + block.largest_half_square)
    shift = block.center.norm() / block.unit
    relative = 1.01 * (width + 16) * _FLOAT32 + 16 * _FLOAT64 * shift
    # Known distances are to the query, whose own length is taken away from them.
    cancelled = 16 * (width + 16) * _FLOAT64 * norms.square() / ratio
    return relative * longest + cancelled + width * torch.finfo(torch.float32).tiny


def _squared_distances(queries: _Points, bank: _Points, rows: Tensor, columns: Tensor) -> Tensor:
    """Squared distances of pairs, in float64; 2 for a vector without direction, which is at a right angle to all."""
    pairs = max(1, _ELEMENTS_AT_A_TIME["cpu" if rows.device.type == "cpu" else "other"] // queries.vectors.shape[1])
    squared = torch.empty(len(rows), dtype=torch.float64, device=rows.device)
    for out, row, column in zip(squared.split(pairs), rows.split(pairs), columns.split(pairs), strict=True):
        difference = queries.vectors.index_select(0, row).sub_(bank.vectors.index_select(0, column))
        torch.linalg.vector_norm(difference, dim=1, out=out)
    return squared.square_().add_(bank.zero[columns])


def _as_neighbors(squared: Tensor, index: Tensor, distance: Distance) -> Neighbors:
    if distance == "l2":
        return Neighbors(index, 0 - squared.sqrt())
    # Vectors without direction, for which nothing was searched, are equally far from all.
    zero = squared.isinf()
    index = torch.where(zero, torch.arange(index.shape[1]), index)
    return Neighbors(index, (1 - squared / 2).masked_fill(zero, 0))


def _must_be_finite(features: Tensor, rows: int) -> None:
    if not all(part.isfinite().all() for part in features.split(rows)):
        raise CapiError("the features hold values that are no finite numbers: look at the encoder that made them")


def _rows_at_a_time(chunk_bytes: int, width: int) -> tuple[int, int]:
    """Rows of a block and of queries: half the memory for blocks, a quarter each for queries and for products.

    A vector takes about 20 bytes a value, in float64 and float32, and a product 5, with what it is compared with.
    """
    block = min(max(1, chunk_bytes // (40 * width)), _LARGEST_BLOCK)
    return block, max(1, min(chunk_bytes // (80 * width), chunk_bytes // (20 * block)))


def _device_of_float64(device: torch.device | str) -> torch.device:
    """The device for float64, which Apple's GPUs lack."""
    return torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)
