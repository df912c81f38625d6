"""Training patches of segmentation: features, pixel labels, and the statistics that features are standardised with.

A patch's label is the most frequent of its pixels. Patches whose label is ignored are not learnt from, but they count
in the mean and std of the channels. Both are those of the images that settings are fitted on, without those held
out, and stay so in the last fit on all training images: that is how the published numbers came about, and a setting's
score is the same whether it was chosen or given. Features lie in one array that may be mapped to a file, those of
images to fit on first, those held out behind them: both parts are slices of it.

Masks are cut into blocks of pixel labels, one for each patch, by which neighbours vote at every pixel. Labels are whole
numbers of any kind; bytes are the fastest.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.evals.features import Encoding, FeatureRows
from capi.types import Bool, Float, Int, Integer

# Labels of a part of the patches: few enough to stay near the processor.
_LABELS_AT_A_TIME = 2**22
_COUNTS_AT_A_TIME = 2**20
# Signed numbers of 16 bits.
_LARGEST_SHORT = 2**15 - 1
Ties = Literal["smallest", "nearest"]


def pixel_blocks(masks: Tensor, rows: int, columns: int) -> Tensor:
    """The pixel labels of each patch of a grid, (s, height, width) to (m, h, w): row by row, as in a feature map."""
    count, height, width = masks.shape
    if height % rows or width % columns:
        raise CapiError(f"masks of {height} x {width} pixels cannot be cut into {rows} x {columns} equal patches")
    # (s, rows, h, columns, w) to (s, rows, columns, h, w)
    blocks = masks.reshape(count, rows, height // rows, columns, width // columns)
    return blocks.transpose(2, 3).reshape(-1, height // rows, width // columns)


def unblock(blocks: Tensor, rows: int, columns: int) -> Tensor:
    """The masks (s, height, width) that `pixel_blocks` cut."""
    count, height, width = blocks.shape
    if count % (rows * columns):
        raise CapiError(f"{count} patches are no whole number of images with {rows} x {columns} patches")
    grid = blocks.reshape(-1, rows, columns, height, width)
    return grid.transpose(2, 3).reshape(-1, rows * height, columns * width)


def patch_labels(blocks: Tensor) -> Tensor:
    """The most frequent label of each block (m, h, w); of equally frequent ones the smallest."""
    lowest, highest = (int(value) for value in blocks.aminmax())
    span = highest - lowest + 1
    parts = blocks.flatten(1).split(max(1, _COUNTS_AT_A_TIME // max(span, blocks[0].numel())))
    return torch.cat([(_label_counts(part, lowest, span).argmax(1) + lowest).to(blocks.dtype) for part in parts])


def is_counted(labels: Tensor, ignored: Collection[int]) -> Tensor:
    """Which labels are not ignored."""
    return ~torch.isin(labels, torch.tensor(sorted(ignored), dtype=torch.long, device=labels.device))


def vote_blocks(
    blocks: Tensor,
    neighbors: Int[Tensor, "s k"],
    *,
    ignored: Collection[int] = (),
    clean: bool = False,
    ties: Ties = "smallest",
) -> Tensor:
    """The most frequent label at every pixel among k of the blocks (m, h, w), whose numbers are given nearest first.

    Of equally frequent labels, the smallest (as in the published numbers) or that of the nearest block among them.
    Ignored labels vote like any other, unless `clean`: then they have no vote, and a pixel where all k blocks hold
    ignored labels takes the label that is most frequent in the k whole blocks (of equally frequent ones the smallest).
    """
    # A row of pixels for each block of the bank, (m, h w); numbers of blocks with the place k first, (k, s).
    flat = blocks.flatten(1)
    index = neighbors.to(blocks.device).T
    if len(index) == 1 and not clean:
        return blocks[index[0]]
    part = max(1, _LABELS_AT_A_TIME // (len(index) * flat.shape[1]))
    voted = []
    for each in index.split(part, dim=1):
        # Several times faster than indexing, which goes value by value.
        rows = flat.index_select(0, each.flatten()).view(*each.shape, -1)
        voted.append(_voted(rows, ignored if clean else (), ties))
    return torch.cat(voted).reshape(-1, *blocks.shape[1:])


def _voted(labels: Tensor, voiceless: Collection[int], ties: Ties) -> Tensor:
    """(patches, pixels) from (k, patches, pixels)."""
    winners = _most_frequent(labels.flatten(1), voiceless, ties)
    winner, votes = (each.view(labels.shape[1:]) for each in winners)
    silent = votes == 0
    patches = silent.any(1).nonzero()[:, 0]
    if len(patches):
        common = _common_labels(labels[:, patches], voiceless)
        winner[patches] = torch.where(silent[patches], common[:, None], winner[patches])
    return winner


def _most_frequent(labels: Tensor, voiceless: Collection[int], ties: Ties) -> tuple[Tensor, Tensor]:
    """The most frequent label of each column of (k, pixels), of several by rule, and how often it is there.

    Each place in turn counts its own label from there on: that is the whole count where the label comes first, and
    less than its whole count later. Comparing bytes is so fast that counting all labels of a data set is not.
    """
    k, pixels = labels.shape
    lowest, highest = (int(value) for value in labels.aminmax())
    ranks = k if ties == "nearest" else highest - lowest + 1
    same = torch.empty(labels.shape, dtype=torch.bool, device=labels.device)
    # best (pixels,) = votes * ranks + rank, with 0 <= rank < ranks: the largest has more votes, or wins the tie.
    short = (k + 1) * ranks <= _LARGEST_SHORT
    best = torch.zeros(pixels, dtype=torch.int16 if short else torch.int64, device=labels.device)
    for place, label in enumerate(labels):
        torch.eq(labels[place:], label, out=same[place:])
        count = same[place:].view(torch.uint8).sum(0, dtype=torch.uint8 if k < 256 else torch.int64)
        for other in voiceless:
            count *= label != other
        rank = k - 1 - place if ties == "nearest" else highest - label.to(best.dtype)
        best = torch.maximum(best, count.to(best.dtype).mul_(ranks).add_(rank))
        # Labels that have not come yet cannot win; with the smallest to win a tie, they must not draw level either.
        if int(best.min()) // ranks >= k - 1 - place + (ties == "smallest"):
            break
    if ties == "smallest":
        return (highest - best % ranks).to(labels.dtype), best // ranks
    return labels.gather(0, (k - 1 - best % k).long()[None])[0], best // k


def _common_labels(labels: Tensor, voiceless: Collection[int]) -> Tensor:
    """The most frequent label of each patch that has a voice, from (k, patches, pixels)."""
    lowest, highest = (int(value) for value in labels.aminmax())
    counts = _label_counts(labels.transpose(0, 1).flatten(1), lowest, highest - lowest + 1)
    for label in voiceless:
        if lowest <= label <= highest:
            counts[:, label - lowest] = 0
    if not counts.any(1).all():
        raise CapiError("some neighbours have nothing but ignored labels: leave such patches out of the training set")
    return (counts.argmax(1) + lowest).to(labels.dtype)


def _label_counts(labels: Tensor, lowest: int, span: int) -> Tensor:
    """How often each label from the lowest on is in each row: (s, span) from (s, m)."""
    # One histogram for all rows: cell = row * span + (label - lowest).
    rows = torch.arange(len(labels), device=labels.device)[:, None] * span
    cells = labels.long() - lowest + rows
    return cells.flatten().bincount(minlength=len(labels) * span).reshape(len(labels), span)


class Standard(NamedTuple):
    """Mean and std of every channel; 0 and 1 where features are taken as they are."""

    mean: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]


@dataclass
class ColumnMoments:
    """Mean and squared deviations of rows that come in parts, in float64."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, rows: Float[Tensor, "s d"]) -> "ColumnMoments":
        """Merged part by part, which keeps the digits that a sum of squares would lose."""
        if len(rows):
            # Of parts a and b with n_a + n_b = n rows (Chan et al.), with d = mean_b - mean_a:
            #   mean = mean_a + d n_b / n,   squares = squares_a + squares_b + d^2 n_a n_b / n
            values = rows.double().cpu()
            mean, total = values.mean(0), self.count + len(rows)
            shift = mean - self.mean
            self.squares = self.squares + (values - mean).square().sum(0)
            self.squares = self.squares + shift.square() * (self.count * len(rows) / total)
            self.mean = self.mean + shift * (len(rows) / total)
            self.count = total
        return self

    def standard(self, wanted: bool = True) -> Standard:
        """A channel that never changes says nothing; its std counts as 1."""
        if not wanted:
            return Standard(torch.zeros(self.mean.shape), torch.ones(self.mean.shape))
        variance = self.squares / max(self.count, 1)
        return Standard(self.mean.float(), torch.where(variance > 0, variance.sqrt(), 1.0).float())


@dataclass(frozen=True)
class Patches:
    """Patches with a label that counts."""

    features: Float[Tensor, "s d"]
    blocks: Integer[Tensor, "s block_height block_width"]
    labels: Integer[Tensor, " s"]
    standard: Standard


class TrainingPatches(NamedTuple):
    """Patches of the images to fit on while settings are tried, and of every training image."""

    fit: Patches
    every: Patches
    left_out: int


class PatchCollector:
    """Takes batches of training images in order, those to fit on before those held out.

    Rows are patches that count, image by image and row by row of the grid, so that the first `fit_count` are to fit on.
    """

    def __init__(self, encoding: Encoding, ignored: Collection[int], standardize: bool) -> None:
        self.encoding, self.ignored, self.standardize = encoding, ignored, standardize
        self.fit_moments = ColumnMoments()
        self.rows: dict[str, FeatureRows] = {}
        self.fit_count = self.left_out = 0

    def add(self, features: Float[Tensor, "s d"], blocks: Tensor, to_fit: Bool[Tensor, " s"], capacity: int) -> None:
        """The patches of a batch; there are no more than `capacity` in all."""
        features = features.cpu()
        self.fit_moments.add(features[to_fit])
        if not self.rows:
            self.rows = {name: FeatureRows(capacity, self.encoding, name) for name in ("features", "blocks", "labels")}
        labels = patch_labels(blocks)
        counts = is_counted(labels, self.ignored)
        for name, values in (("features", features), ("blocks", blocks), ("labels", labels)):
            self.rows[name].append(values[counts])
        self.left_out += int((~counts).sum())
        self.fit_count += int((counts & to_fit).sum())

    def finish(self) -> TrainingPatches:
        if not self.fit_count:
            raise CapiError(f"no training patch has a label that counts: all are ignored ({sorted(self.ignored)})")
        filled = {name: rows.filled for name, rows in self.rows.items()}
        fit = {name: values[: self.fit_count] for name, values in filled.items()}
        standard = self.fit_moments.standard(self.standardize)
        return TrainingPatches(Patches(**fit, standard=standard), Patches(**filled, standard=standard), self.left_out)
