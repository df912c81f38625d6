"""The probes that are trained by gradient, every setting of the grid at once.

Settings (g of them) differ in how they are trained, never in what they see. So their parameters are stacked, and one
computation serves all of them. The axes:

    g settings   b images   n tokens of an image   d width of a token   c classes
    h attention heads of a setting   q = g * h, the heads of all settings   w width of a head

Every setting starts from the same draw (ours): then settings differ in their numbers alone, and what a setting becomes
does not depend on the others in the grid.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.errors import CapiError
from capi.types import Float

LARGEST_HEAD_WIDTH = 64
INITIAL_STD = 0.02


def head_width(width: int) -> int:
    """The width of an attention head: 64, or the largest number below it that divides `width` (ours)."""
    return next(size for size in range(min(LARGEST_HEAD_WIDTH, width), 0, -1) if width % size == 0)


def attention_pooling(tokens: Float[Tensor, "b n d"], directions: Float[Tensor, "q d"]) -> Float[Tensor, "b q d"]:
    """The mean of an image's tokens for each direction, weighted by the softmax of their products with it.

    Tokens take no gradient, and autograd keeps nothing of n * q values but the weights.
    """
    scores = tokens.flatten(0, 1) @ directions.T
    weights = scores.unflatten(0, tokens.shape[:2]).softmax(dim=1)
    return weights.transpose(1, 2) @ tokens


class StackedLinear(nn.Module):
    """A linear map for each setting: truncated normal weights, biases 0."""

    def __init__(self, *, settings: int, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = _stacked_weights(settings, (outputs, inputs), generator)
        self.bias = nn.Parameter(torch.zeros(settings, outputs))

    def forward(self, x: Float[Tensor, "g b inputs"]) -> Float[Tensor, "g b outputs"]:
        return torch.baddbmm(self.bias[:, None], x, self.weight.transpose(1, 2))


class Probes(nn.Module):
    """What probes have in common: each parameter has the settings as its first axis, and all biases are called so."""

    def __init__(self, *, settings: int, width: int, classes: int, seed: int = 0) -> None:
        super().__init__()
        for name, value in (("settings", settings), ("width", width), ("classes", classes)):
            if value < 1:
                raise CapiError(f"probes need at least one of each, but {name} is {value}")
        self.settings, self.width, self.classes, self.seed = settings, width, classes, seed

    def select(self, index: int) -> "Probes":
        """A copy of one setting's probe."""
        chosen = type(self)(settings=1, width=self.width, classes=self.classes, seed=self.seed)
        chosen.load_state_dict({name: value[index, None] for name, value in self.state_dict().items()})
        return chosen.to(next(self.parameters()).device)

    def check_width(self, width: int) -> None:
        if width != self.width:
            raise CapiError(f"these probes are for features of width {self.width}, but got {width}: use their encoder")


class LinearProbes(Probes):
    """A linear classifier of one vector for each image."""

    def __init__(self, *, settings: int, width: int, classes: int, seed: int = 0) -> None:
        super().__init__(settings=settings, width=width, classes=classes, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        self.classifier = StackedLinear(settings=settings, inputs=width, outputs=classes, generator=generator)

    def forward(self, vectors: Float[Tensor, "b d"]) -> Float[Tensor, "g b c"]:
        self.check_width(vectors.shape[-1])
        # All settings see the same vectors, so one product with all rows of all classifiers is enough.
        logits = F.linear(vectors, self.classifier.weight.flatten(0, 1), self.classifier.bias.flatten())
        return logits.unflatten(1, (self.settings, self.classes)).transpose(0, 1)


class AttentiveProbes(Probes):
    """One learned query attends to the tokens of an image; a linear classifier reads what it gathers.

    Keys and values of all tokens are never formed. With a single query, q.(W_k x + b_k) = (W_k^T q).x plus a number
    that the softmax takes away again, and the weights of the softmax sum to one, so W_v and its bias may come after
    pooling: 4 * h * d operations for each token instead of 4 * d^2. The key's bias therefore never matters; it is
    kept, at 0 and without a gradient, because it is one of the head's 2 d^2 + (3 + c) d + c parameters.
    """

    def __init__(self, *, settings: int, width: int, classes: int, seed: int = 0) -> None:
        super().__init__(settings=settings, width=width, classes=classes, seed=seed)
        self.head_width = head_width(width)
        generator = torch.Generator().manual_seed(seed)
        self.query = _stacked_weights(settings, (width,), generator)
        self.key = StackedLinear(settings=settings, inputs=width, outputs=width, generator=generator)
        self.value = StackedLinear(settings=settings, inputs=width, outputs=width, generator=generator)
        self.classifier = StackedLinear(settings=settings, inputs=width, outputs=classes, generator=generator)

    def forward(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "g b c"]:
        self.check_width(tokens.shape[-1])
        return self.classifier(self._values(attention_pooling(tokens, self._directions())))

    def _directions(self) -> Float[Tensor, "q d"]:
        """W_k^T q of each head, scaled as attention scores are."""
        query = self.query.view(-1, 1, self.head_width) / math.sqrt(self.head_width)
        return (query @ self._by_head(self.key.weight)).squeeze(1)

    def _values(self, pooled: Float[Tensor, "b q d"]) -> Float[Tensor, "g b d"]:
        """The values that each head gathered, heads of a setting side by side."""
        by_head = torch.bmm(pooled.transpose(0, 1), self._by_head(self.value.weight).transpose(1, 2))
        return by_head.unflatten(0, (self.settings, -1)).transpose(1, 2).flatten(2) + self.value.bias[:, None]

    def _by_head(self, weight: Float[Tensor, "g d d"]) -> Float[Tensor, "q w d"]:
        return weight.view(-1, self.head_width, self.width)


def _stacked_weights(settings: int, shape: tuple[int, ...], generator: torch.Generator) -> nn.Parameter:
    drawn = nn.init.trunc_normal_(torch.empty(shape), std=INITIAL_STD, generator=generator)
    return nn.Parameter(drawn.repeat(settings, *(1 for _ in shape)))
