"""What a prototype means: the patches of many images that belong to it most, found in one pass and shown in context.

A patch belongs to the prototype with its largest logit (product with the normalised token, plus bias), as in the
clustering before it is balanced. The score is the cosine between token and prototype. For one prototype that ranks
patches as its logit does, since length and bias are the same for all; but it can be compared between prototypes, and
never saturates as a softmax does, which gives hundreds of patches the probability 1 and would rank them by rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from capi.errors import CapiError
from capi.report.pictures.painters import Drawn
from capi.report.pictures.sheets import Row, sheet_of, strip, strip_width
from capi.types import Float, Int

# Patches of one image that a prototype shows at most: neighbours are alike, and a gallery is to show variety.
FROM_ONE_IMAGE = 3
# Logits that are in memory at a time.
_LOGITS = 2**24
_OUTLINE, _AROUND, _EMPTY = "white", "black", "#eceff3"


@dataclass(frozen=True)
class PatchPlace:
    """A patch of an image of a set, and how close it is to its prototype: from -1 to 1."""

    image: int
    row: int
    column: int
    score: float


class PrototypeIndex:
    """The best patches of each prototype among those that it is nearest to, in memory that images do not add to.

    Every image is added once. A prototype gets its three best patches of an image at most. Of equal scores the one
    that was added first comes first, within an image row by row.
    """

    def __init__(
        self, prototypes: Float[Tensor, "k d"], bias: Float[Tensor, " k"] | None = None, best: int = 16
    ) -> None:
        if best < 1:
            raise CapiError(f"best={best} patches of each prototype cannot be kept: give at least 1")
        self.prototypes, self.best = prototypes.detach().float(), best
        self.bias = None if bias is None else bias.detach().float()
        count, device = len(prototypes), prototypes.device
        self._lengths = self.prototypes.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        self._counts = torch.zeros(count, dtype=torch.int64, device=device)
        self._scores = torch.full((count, best), -torch.inf, device=device)
        # Image, row and column of each.
        self._places = torch.zeros(count, best, 3, dtype=torch.int64, device=device)

    def add(self, number: int, feature_map: Float[Tensor, "rows columns d"]) -> None:
        """All patches of the image with this number."""
        nearest, scores = self._nearest(feature_map)
        self._counts += nearest.bincount(minlength=len(self._counts))
        patches, ranks = _best_of_each(nearest, scores, FROM_ONE_IMAGE)
        better = scores[patches] > self._scores[nearest[patches], -1]
        patches, ranks = patches[better], ranks[better]
        columns = feature_map.shape[1]
        rows = patches.div(columns, rounding_mode="floor")
        places = torch.stack([torch.full_like(patches, number), rows, patches % columns], 1)
        self._merge(nearest[patches], ranks, scores[patches], places)

    def nearest(self, feature_map: Float[Tensor, "rows columns d"]) -> Int[Tensor, "rows columns"]:
        """The prototype that each patch belongs to."""
        return self._nearest(feature_map)[0].view(feature_map.shape[:2])

    def members(self, prototype: int) -> list[PatchPlace]:
        """The patches that belong to a prototype most, best first."""
        if not 0 <= prototype < len(self._counts):
            raise CapiError(f"there is no prototype {prototype}: they are numbered from 0 to {len(self._counts) - 1}")
        filled = self._scores[prototype].isfinite()
        scores, places = self._scores[prototype][filled].tolist(), self._places[prototype][filled].tolist()
        return [
            PatchPlace(image, row, column, score) for (image, row, column), score in zip(places, scores, strict=True)
        ]

    @property
    def shares(self) -> Float[Tensor, " k"]:
        """The share of all patches that each prototype is nearest to; zero where there were no patches."""
        return (self._counts.double() / max(self.seen, 1)).float()

    @property
    def seen(self) -> int:
        """How many patches there were."""
        return int(self._counts.sum())

    def _nearest(self, feature_map: Tensor) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
        """The nearest prototype of each patch, and the cosine with it."""
        if feature_map.shape[2] != self.prototypes.shape[1]:
            raise CapiError(
                f"patches have width {feature_map.shape[2]}, but the prototypes {self.prototypes.shape[1]}: they are "
                "of another model"
            )
        tokens = F.normalize(feature_map.detach().flatten(0, 1).to(self.prototypes.device).float(), dim=-1)
        parts = tokens.split(max(_LOGITS // len(self.prototypes), 1))
        logits = (F.linear(part, self.prototypes, self.bias) for part in parts)
        # On a CPU numpy finds the largest value of each row ten times faster.
        fast = tokens.is_cuda or tokens.is_mps
        nearest = torch.cat([part.argmax(1) if fast else torch.from_numpy(part.numpy().argmax(1)) for part in logits])
        # Of the chosen pairs alone; a logit less its bias would have lost digits.
        products = (tokens * self.prototypes[nearest]).sum(1)
        return nearest, (products / self._lengths[nearest]).clamp(-1, 1)

    def _merge(self, prototypes: Tensor, ranks: Tensor, scores: Tensor, places: Tensor) -> None:
        """Put new patches among those of their prototypes, and drop the worst."""
        touched, rows = prototypes.unique(return_inverse=True)
        more_scores = self._scores.new_full((len(touched), FROM_ONE_IMAGE), -torch.inf)
        more_places = self._places.new_zeros(len(touched), FROM_ONE_IMAGE, 3)
        more_scores[rows, ranks], more_places[rows, ranks] = scores, places
        all_scores = torch.cat([self._scores[touched], more_scores], 1)
        all_places = torch.cat([self._places[touched], more_places], 1)
        # Stable: what was there stays in front of what is no better.
        order = all_scores.sort(dim=1, descending=True, stable=True).indices[:, : self.best]
        self._scores[touched] = all_scores.gather(1, order)
        self._places[touched] = all_places.gather(1, order[..., None].expand(-1, -1, 3))


def _best_of_each(
    labels: Int[Tensor, " n"], scores: Float[Tensor, " n"], count: int
) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Which items are among the `count` best of their label, and as which; of equal ones the first is the better."""
    order = scores.sort(descending=True, stable=True).indices
    order = order[labels[order].sort(stable=True).indices]
    ordered = labels[order]
    starts = torch.searchsorted(ordered, ordered)
    ranks = torch.arange(len(order), device=order.device) - starts
    return order[ranks < count], ranks[ranks < count]


def spread_over_use(shares: Float[Tensor, " k"], count: int) -> list[int]:
    """Prototypes that are used at all, at ranks spread evenly from the most to the least used one, in that order."""
    order = shares.sort(descending=True, stable=True).indices
    used = order[shares[order] > 0]
    ranks = torch.linspace(0, max(len(used) - 1, 0), min(count, len(used)), dtype=torch.float64).round().long()
    chosen: list[int] = used[ranks].tolist()
    return chosen


def patch_crop(
    photo: Image.Image, place: PatchPlace, grid: tuple[int, int], *, context: int = 1, side: int = 64
) -> Image.Image:
    """A patch, outlined, with so many patches around it, in a square of `side` pixels.

    The photo shows what the grid of (rows, columns) covers, at any size. At its borders the view stays inside, so that
    the patch is not in the middle; where the grid is smaller than the view, the rest of the square is empty.
    """
    if not (0 <= place.row < grid[0] and 0 <= place.column < grid[1]):
        raise CapiError(f"there is no patch at row {place.row}, column {place.column} of {grid[0]} x {grid[1]} patches")
    (top, down), (left, across) = (_view(at, n, context) for at, n in zip((place.row, place.column), grid, strict=True))
    height, width = photo.height / grid[0], photo.width / grid[1]
    scale = side / max(across * width, down * height)
    size = max(round(across * width * scale), 1), max(round(down * height * scale), 1)
    box = (left * width, top * height, (left + across) * width, (top + down) * height)
    view = photo.convert("RGB").resize(size, Image.Resampling.BICUBIC, box=box)
    if context:
        _outline(view, (place.column - left) / across, (place.row - top) / down, 1 / across, 1 / down)
    square = Image.new("RGB", (side, side), _EMPTY)
    square.paste(view, ((side - size[0]) // 2, (side - size[1]) // 2))
    return square


def _view(at: int, length: int, context: int) -> tuple[int, int]:
    """Where a view around a patch starts along one axis, and how many patches it shows."""
    shown = min(2 * context + 1, length)
    return min(max(at - context, 0), length - shown), shown


def _outline(view: Image.Image, left: float, top: float, across: float, down: float) -> None:
    """A light frame within a dark one, which is seen on every ground; places are shares of the view."""
    first = round(left * view.width), round(top * view.height)
    last = round((left + across) * view.width) - 1, round((top + down) * view.height) - 1
    last = max(last[0], first[0]), max(last[1], first[1])
    draw = ImageDraw.Draw(view)
    draw.rectangle((first[0] - 1, first[1] - 1, last[0] + 1, last[1] + 1), outline=_AROUND)
    draw.rectangle((*first, *last), outline=_OUTLINE)


def member_crops(
    index: PrototypeIndex,
    prototypes: Sequence[int],
    photo_of: Callable[[int], Image.Image],
    grid: tuple[int, int],
    *,
    patches: int = 8,
    side: int = 64,
) -> dict[int, list[Image.Image]]:
    """The best patches of some prototypes in context; each photo is asked for once, one after the other."""
    places = {prototype: index.members(prototype)[:patches] for prototype in prototypes}
    wanted: dict[int, list[tuple[int, int]]] = {}
    for prototype, members in places.items():
        for rank, place in enumerate(members):
            wanted.setdefault(place.image, []).append((prototype, rank))
    crops: dict[tuple[int, int], Image.Image] = {}
    for number in sorted(wanted):
        photo = photo_of(number)
        for prototype, rank in wanted[number]:
            crops[prototype, rank] = patch_crop(photo, places[prototype][rank], grid, side=side)
    return {prototype: [crops[prototype, rank] for rank in range(len(places[prototype]))] for prototype in places}


def gallery_sheet(
    index: PrototypeIndex,
    photo_of: Callable[[int], Image.Image],
    grid: tuple[int, int],
    *,
    prototypes: Sequence[int] | None = None,
    count: int = 24,
    patches: int = 8,
    side: int = 64,
) -> Image.Image:
    """The best patches of the prototypes that are asked for, else of the `count` most used ones.

    `photo_of` gives the photo of an image by its number, framed as the grid of (rows, columns) covers it.
    """
    if not index.seen:
        raise CapiError("there are no patches to show: add at least one image to the index")
    shares = index.shares
    if prototypes is None:
        order = shares.sort(descending=True, stable=True).indices[:count]
        prototypes = order[shares[order] > 0].tolist()
    crops = member_crops(index, prototypes, photo_of, grid, patches=patches, side=side)
    cells = []
    for number in prototypes:
        share = float(shares[number])
        percent = f"{100 * share:.1f}" if share >= 0.01 else f"{100 * share:.2g}"
        caption = f"prototype {number} · " + (f"{percent} %" if share else "not used")
        cells.append(Drawn(strip(crops[number], side=side, least=patches), caption=caption))
    rows = [Row("", cells[start : start + 2]) for start in range(0, len(cells), 2)]
    notes = [
        "The patches that are closest to each prototype among those it is nearest to, outlined, with what is around "
        f"them; at most {FROM_ONE_IMAGE} of one image. The percentage is the share of all {index.seen} patches."
    ]
    return sheet_of("Prototypes", notes, ["", ""], rows, side=strip_width(patches, side))
