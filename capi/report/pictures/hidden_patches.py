"""What the student would answer: the prototypes it predicts for hidden patches, how sure it is, and how that looks.

A patch of the image is hidden from the encoder; predictor and head give each hidden patch a probability for every
prototype. The truth is the prototype of the token that the encoder gives for that patch when it sees the whole image.
There is no decoder: a prototype is shown by a real patch that belongs to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from capi.errors import CapiError
from capi.method.student import student_of
from capi.models.features import CapiEncoder
from capi.report.pictures.painters import Drawn
from capi.report.pictures.sheets import Row, sheet_of
from capi.report.pictures.similarity import patch_box, patch_mask
from capi.types import Bool, Float, Int

# The temperature of the student's softmax in the released recipe.
STUDENT_TEMPERATURE = 0.12
_HIDDEN, _HATCH, _BORDER = "#3a414d", "#5b6472", "#39d7ff"
_HATCH_STEP = 10


class Answer(NamedTuple):
    """A prototype that is predicted for a patch, and how likely."""

    prototype: int
    probability: float


@dataclass(frozen=True)
class HiddenPredictions:
    """The predictions of an image's hidden patches, which are counted row by row."""

    hidden: Bool[Tensor, "rows columns"]
    probabilities: Float[Tensor, "p k"]
    truth: Int[Tensor, " p"]

    @property
    def grid(self) -> tuple[int, int]:
        return self.hidden.shape[0], self.hidden.shape[1]

    @property
    def predicted(self) -> Int[Tensor, " p"]:
        """The likeliest prototype of each hidden patch."""
        return self.probabilities.argmax(1)

    @property
    def confidence(self) -> Float[Tensor, " p"]:
        """The probability of the likeliest prototype."""
        return self.probabilities.amax(1)

    @property
    def entropy(self) -> Float[Tensor, " p"]:
        """How undecided each prediction is, in nat: 0 for one prototype, log k for all alike."""
        return torch.special.entr(self.probabilities).sum(1)

    def hits(self, count: int = 1) -> float:
        """The share of hidden patches whose true prototype is among the `count` likeliest."""
        best = self.probabilities.topk(min(count, self.probabilities.shape[1]), dim=1).indices
        return float((best == self.truth[:, None]).any(1).float().mean())

    def position(self, row: int, column: int) -> int | None:
        """Which of the hidden patches this one is; None where it is visible."""
        if not self.hidden[row, column]:
            return None
        return int(self.hidden.flatten()[: row * self.grid[1] + column].sum())

    def top(self, position: int, count: int = 5) -> list[Answer]:
        """The likeliest prototypes of one hidden patch."""
        best = self.probabilities[position].topk(min(count, self.probabilities.shape[1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [Answer(prototype, value) for prototype, value in pairs]

    def as_map(self, values: Float[Tensor, " p"]) -> Float[Tensor, "rows columns"]:
        """Values of the hidden patches at their places; NaN where patches are visible."""
        placed = torch.full(self.hidden.shape, torch.nan, dtype=values.dtype)
        placed[self.hidden] = values
        return placed


@torch.inference_mode()
def hidden_probabilities(
    model: CapiEncoder,
    image: Float[Tensor, "1 c height width"],
    hidden: Bool[Tensor, "rows columns"],
    *,
    temperature: float = STUDENT_TEMPERATURE,
) -> Float[Tensor, "p k"]:
    """The probabilities of all prototypes for each hidden patch of a normalised image."""
    if model.head is None:
        raise CapiError("this model has no head, so it predicts no prototypes: take a run or a file of `capi export`")
    if not hidden.any() or hidden.all():
        raise CapiError(
            f"{int(hidden.sum())} of {hidden.numel()} patches are hidden: at least one must be hidden and one visible"
        )
    flat = hidden.flatten().to(image.device)
    visible, predicted = (~flat).nonzero()[None, :, 0], flat.nonzero()[None, :, 0]
    student = student_of(encoder=model.encoder, predictor=model.predictor, head=model.head)
    logits: Tensor = student(image, visible, predicted)
    return F.softmax(logits[0].float() / temperature, dim=-1).cpu()


def predict_hidden(
    model: CapiEncoder,
    image: Float[Tensor, "1 c height width"],
    hidden: Bool[Tensor, "rows columns"],
    nearest: Int[Tensor, "rows columns"],
    *,
    temperature: float = STUDENT_TEMPERATURE,
) -> HiddenPredictions:
    """What the model predicts for hidden patches; `nearest` are the prototypes of all patches of the whole image.

    `PrototypeIndex(prototypes, bias).nearest(feature_map)` gives those.
    """
    probabilities = hidden_probabilities(model, image, hidden, temperature=temperature)
    if int(nearest.max()) >= probabilities.shape[1]:
        raise CapiError(
            f"the head predicts {probabilities.shape[1]} prototypes, but the image has prototype {int(nearest.max())}: "
            "they are of another model"
        )
    return HiddenPredictions(hidden, probabilities, nearest.cpu()[hidden])


def rectangle(corner: tuple[int, int], other: tuple[int, int], grid: tuple[int, int]) -> Bool[Tensor, "rows columns"]:
    """The patches of the rectangle between two patches, both of them inside, in any order."""
    chosen = torch.zeros(grid, dtype=torch.bool)
    (top, bottom), (left, right) = (sorted(pair) for pair in zip(corner, other, strict=True))
    chosen[top : bottom + 1, left : right + 1] = True
    return chosen


def hidden_picture(photo: Image.Image, hidden: Bool[Tensor, "rows columns"]) -> Image.Image:
    """The photo with its hidden patches covered by a hatching."""
    cover = Image.new("RGB", photo.size, _HIDDEN)
    draw = ImageDraw.Draw(cover)
    for start in range(-photo.height, photo.width, _HATCH_STEP):
        draw.line((start, photo.height, start + photo.height, 0), fill=_HATCH, width=2)
    return Image.composite(cover, photo.convert("RGB"), patch_mask(hidden, photo.size))


def filled_picture(
    photo: Image.Image,
    hidden: Bool[Tensor, "rows columns"],
    labels: Int[Tensor, " p"],
    example: Callable[[int], Image.Image | None],
) -> Image.Image:
    """The photo with each hidden patch replaced by a real patch of its prototype, and the hidden region outlined.

    `example` gives the patch of a prototype; where it has none, the hatching stays.
    """
    picture = hidden_picture(photo, hidden)
    tiles: dict[tuple[int, int, int], Image.Image | None] = {}
    grid = hidden.shape[0], hidden.shape[1]
    for (row, column), label in zip(hidden.nonzero().tolist(), labels.tolist(), strict=True):
        box = patch_box((row, column), grid, photo.size)
        size = box.right - box.left, box.bottom - box.top
        if (label, *size) not in tiles:
            patch = example(label)
            tiles[label, *size] = None if patch is None else patch.convert("RGB").resize(size)
        tile = tiles[label, *size]
        if tile is not None:
            picture.paste(tile, (box.left, box.top))
    return outline_region(picture, hidden)


def outline_region(picture: Image.Image, region: Bool[Tensor, "rows columns"]) -> Image.Image:
    """The picture with a line between the patches of a region and the others."""
    marked, grid = picture.copy(), (region.shape[0], region.shape[1])
    draw = ImageDraw.Draw(marked)
    for row, column in (region[:, 1:] != region[:, :-1]).nonzero().tolist():
        left, top, _, bottom = patch_box((row, column + 1), grid, picture.size)
        draw.line((left, top, left, bottom), fill=_BORDER, width=2)
    for row, column in (region[1:] != region[:-1]).nonzero().tolist():
        left, top, right, _ = patch_box((row + 1, column), grid, picture.size)
        draw.line((left, top, right, top), fill=_BORDER, width=2)
    return marked


def answers_picture(
    answers: Sequence[Answer], truth: int, examples: Callable[[int], Sequence[Image.Image]], *, side: int = 72
) -> Image.Image:
    """The likeliest prototypes of one hidden patch and the true one, each with patches that belong to it."""
    rows = []
    for rank, guess in enumerate(answers, 1):
        right = " · the truth" if guess.prototype == truth else ""
        label = f"{rank}. prototype {guess.prototype} · {100 * guess.probability:.1f} %{right}"
        rows.append(Row(label, [Drawn(patch) for patch in examples(guess.prototype)]))
    if all(guess.prototype != truth for guess in answers):
        rows.append(Row(f"the truth: prototype {truth}", [Drawn(patch) for patch in examples(truth)]))
    columns = max((len(row.cells) for row in rows), default=0)
    nothing = [Drawn(Image.new("RGB", (side, side), "white"))]
    labeled = [
        row if row.cells else Row(f"{row.label} · no patch of the images belongs to it", nothing) for row in rows
    ]
    return sheet_of("Likeliest prototypes of this patch", [], [""] * columns, labeled, side=side)
