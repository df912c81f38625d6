"""Predictors: from the visible patches of an image to predictions of hidden ones, in the paper's three architectures.

- `cross`, CAPI's own: mask tokens read the encoder's output by cross-attention and never see each other.
- `self` (MAE, CVPR 2022; I-JEPA, CVPR 2023): the encoder's output and the mask tokens are one sequence with
  self-attention, read at the mask tokens. These stand at the predicted positions only (ours: as many as `cross` has),
  or at all masked ones as in MAE.
- `fused` (BEiT, ICLR 2022; iBOT, ICLR 2022; SimMIM, CVPR 2022; data2vec, ICML 2022): no predictor; mask tokens stand
  at all masked positions in the encoder's own sequence. Registers spread around all patches of that sequence, as they
  do around whole images at evaluation (ours). With learned positions mask tokens take the encoder's table.

The paper takes as the global representation what mask tokens at all positions gather in the predictor's first block,
averaged. For `self` it is the same with its own first block (ours); `fused` has no such block: there it is the mean of
the patch tokens (ours).
"""

from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from capi.models.costs import FLOAT32, INT64, ActivationPolicy, Counts, TokenSequence, blocks_of, drops
from capi.models.encoder import INITIAL_TOKEN_STD, Encoded, MaskTokens, PatchEncoder
from capi.models.layers import Block, LinearLayer, final_norm
from capi.models.positions import POSITIONS, AxialPositions, GridSize
from capi.runtime.plugins import register
from capi.types import Float, Int

MaskedPlaces = Literal["predicted", "masked"]

# The released implementation pools after the whole first block of the predictor.
POOLING_DEPTH = 1


class PredictorShape(NamedTuple):
    """The sizes that a model has for its predictor; `context_width` is the encoder's."""

    width: int
    depth: int
    heads: int
    context_width: int
    mlp_width: int
    positions: str = AxialPositions.kind
    grid: GridSize | None = None
    drop_rate: float = 0.0


class Predictor(nn.Module):
    """The contract: predictions of hidden patches, and a vector for a whole image."""

    # Of its predictions.
    width: int
    # The settings of the section `model.predictor` that mean something to it; without blocks of its own there is no
    # depth, width and number of heads to be set.
    reads: ClassVar[tuple[str, ...]] = ("depth", "width", "heads")
    # Whether its mask tokens stand in the encoder's own sequence; then it gives them when it is called.
    joins_encoder: ClassVar[bool] = False
    # Whether the layout of the published weights has a place for it.
    in_released_layout: ClassVar[bool] = False

    @classmethod
    def build(cls, shape: PredictorShape, **settings: Any) -> "Predictor":
        """The predictor of a model. `settings` are what it reads beside sizes, and `model.predictor.options`."""
        return cls(**shape._asdict(), **settings)

    def sequences(self, counts: Counts) -> tuple[TokenSequence, TokenSequence | None]:
        """What the blocks of the student's encoder work on, and what its own do; None without own blocks."""
        return TokenSequence(counts.context), None

    def flop_between(self, counts: Counts) -> int:  # noqa: ARG002 - the contract
        """The forward FLOP on one image outside of all blocks."""
        return 0

    def bytes_between(self, counts: Counts, width: int, policy: ActivationPolicy) -> int:  # noqa: ARG002 - the contract
        """The bytes that it keeps of one image outside of all blocks; `width` is the encoder's."""
        return 0

    @abstractmethod
    def predict(self, encoded: Encoded, predict_index: Int[Tensor, "b p"]) -> Float[Tensor, "b p e"]:
        """One prediction for each patch that is asked for, of this predictor's width, through a norm without scale.

        Nothing of the images is seen but the visible patches, as the encoder gives them.
        """

    @abstractmethod
    def pool(self, encoder: PatchEncoder, encoded: Encoded) -> Float[Tensor, "b e"]:
        """One vector for each image, from the encoding of all its patches."""


class SplitPredictor(Predictor):
    """What `cross` and `self` share: a mask token, and blocks of their own after the encoder."""

    # Whether the attention of a block reads the encoder's output, not the block's own sequence.
    reads_context: ClassVar[bool] = False

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        heads: int,
        context_width: int,
        mlp_width: int,
        positions: str = AxialPositions.kind,
        grid: GridSize | None = None,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.width = width
        self.head_width = width // heads
        self.mask_token = nn.Parameter(torch.empty(1, width))
        self.reset_parameters()
        self.blocks = nn.ModuleList(
            Block(
                width=width,
                heads=heads,
                mlp_width=mlp_width,
                drop_rate=drop_rate,
                context_width=context_width if self.reads_context else None,
            )
            for _ in range(depth)
        )
        self.positions = POSITIONS[positions](width=width, head_width=self.head_width, grid=grid)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.mask_token, std=INITIAL_TOKEN_STD)

    @abstractmethod
    def forward(
        self, encoded: Encoded, coordinates: Float[Tensor, "s p 2"], depth: int | None = None
    ) -> Float[Tensor, "b p d"]:
        """The predictions at `coordinates`; `depth` stops after so many blocks."""

    def predict(self, encoded: Encoded, predict_index: Int[Tensor, "b p"]) -> Float[Tensor, "b p e"]:
        predictions: Tensor = self(encoded, encoded.everywhere[predict_index])
        return predictions

    def pool(self, encoder: PatchEncoder, encoded: Encoded) -> Float[Tensor, "b e"]:
        predictions: Tensor = self(encoded, encoded.coordinates[:, encoder.num_registers :], depth=POOLING_DEPTH)
        return predictions.mean(1)

    def _mask_tokens(self, encoded: Encoded, coordinates: Float[Tensor, "s p 2"]) -> Float[Tensor, "b p d"]:
        tokens = self.mask_token.expand(encoded.tokens.shape[0], coordinates.shape[1], -1)
        return self.positions.place(tokens, coordinates)


class CrossPredictor(SplitPredictor):
    """Mask tokens read the encoder's output, the same for every block, and nothing else."""

    in_released_layout, reads_context = True, True

    def sequences(self, counts: Counts) -> tuple[TokenSequence, TokenSequence | None]:
        return TokenSequence(counts.context), TokenSequence(counts.predicted, counts.context)

    def bytes_between(self, counts: Counts, width: int, policy: ActivationPolicy) -> int:
        """The encoder's output, which all blocks read; and less the input of the first one, which is one mask token."""
        dropping, off = drops(blocks_of(self)[0]), policy.checkpointing == "off"
        # Where blocks take images out of it, or round it, they keep copies of their own.
        read = 0 if off and (policy.mixed or dropping) else FLOAT32 * counts.context * width
        copied = (off and dropping) or not self.positions.rotates
        return read - (0 if copied else FLOAT32 * counts.predicted * self.width)

    def forward(
        self, encoded: Encoded, coordinates: Float[Tensor, "s p 2"], depth: int | None = None
    ) -> Float[Tensor, "b p d"]:
        query_rotary = self.positions.rotary(coordinates)
        key_rotary = self.positions.rotary(encoded.coordinates)
        x = self._mask_tokens(encoded, coordinates)
        for block in list(self.blocks)[:depth]:
            x = block(x, query_rotary, encoded.tokens, key_rotary)
        return final_norm(x)


class SelfPredictor(SplitPredictor):
    """Mask tokens and the encoder's output, through a linear map where widths differ, see each other in every block."""

    reads = (*SplitPredictor.reads, "mask_tokens")

    def __init__(
        self, *, width: int, context_width: int, mask_tokens: MaskedPlaces = "predicted", **others: Any
    ) -> None:
        super().__init__(width=width, context_width=context_width, **others)
        self.mask_tokens = mask_tokens
        self.projection = nn.Identity() if context_width == width else LinearLayer(context_width, width)

    def sequences(self, counts: Counts) -> tuple[TokenSequence, TokenSequence | None]:
        asked = counts.masked if self.mask_tokens == "masked" else counts.predicted
        return TokenSequence(counts.context), TokenSequence(counts.context + asked)

    def flop_between(self, counts: Counts) -> int:
        return 2 * counts.context * sum(weight.numel() for weight in self.projection.parameters())

    def bytes_between(self, counts: Counts, width: int, policy: ActivationPolicy) -> int:
        """What the linear map reads, and the mask tokens of all hidden patches with which of them are asked for."""
        read = policy.compute_bytes * counts.context * width if list(self.projection.parameters()) else 0
        hidden = FLOAT32 * counts.masked * self.width + INT64 * counts.predicted
        return read + (hidden if self.mask_tokens == "masked" else 0)

    def forward(
        self, encoded: Encoded, coordinates: Float[Tensor, "s p 2"], depth: int | None = None
    ) -> Float[Tensor, "b p d"]:
        rotary = self.positions.rotary(torch.cat([encoded.coordinates, coordinates], dim=1))
        x = torch.cat([self.projection(encoded.tokens), self._mask_tokens(encoded, coordinates)], dim=1)
        for block in list(self.blocks)[:depth]:
            x = block(x, rotary)
        return final_norm(x[:, -coordinates.shape[1] :])

    def predict(self, encoded: Encoded, predict_index: Int[Tensor, "b p"]) -> Float[Tensor, "b p e"]:
        if self.mask_tokens == "predicted":
            return super().predict(encoded, predict_index)
        assert encoded.visible_index is not None, "of whole images nothing is hidden"
        hidden = hidden_index(encoded.visible_index, len(encoded.everywhere))
        return rows_at(self(encoded, encoded.everywhere[hidden]), hidden, predict_index)


class FusedPredictor(Predictor):
    """Only a mask token; the encoder does the rest."""

    reads, joins_encoder = (), True

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.width = width
        self.mask_token = nn.Parameter(torch.empty(1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.mask_token, std=INITIAL_TOKEN_STD)

    @classmethod
    def build(cls, shape: PredictorShape) -> "FusedPredictor":  # type: ignore[override]
        return cls(width=shape.context_width)

    def sequences(self, counts: Counts) -> tuple[TokenSequence, TokenSequence | None]:
        return TokenSequence(counts.registers + counts.patches), None

    def bytes_between(self, counts: Counts, width: int, policy: ActivationPolicy) -> int:  # noqa: ARG002 - the contract
        return FLOAT32 * (counts.registers + counts.patches) * width + INT64 * counts.predicted

    def forward(self, hidden: Int[Tensor, "b m"]) -> MaskTokens:
        """The mask tokens of hidden patches."""
        return MaskTokens(self.mask_token.expand(*hidden.shape, -1), hidden)

    def predict(self, encoded: Encoded, predict_index: Int[Tensor, "b p"]) -> Float[Tensor, "b p e"]:
        """The mask tokens of the predicted patches, out of an encoding that ends with those of the hidden ones."""
        assert encoded.visible_index is not None, "of whole images nothing is hidden"
        hidden = hidden_index(encoded.visible_index, len(encoded.everywhere))
        return rows_at(encoded.tokens[:, -hidden.shape[1] :], hidden, predict_index)

    def pool(self, encoder: PatchEncoder, encoded: Encoded) -> Float[Tensor, "b e"]:
        return encoder.patches(encoded).mean(1)


PREDICTORS: dict[str, type[Predictor]] = {
    "cross": CrossPredictor,
    "self": SelfPredictor,
    "fused": FusedPredictor,
}


def register_predictor(name: str, predictor: type[Predictor]) -> None:
    """Make a predictor of your own known as `model.predictor.kind=NAME` in this process."""
    register(PREDICTORS, name, predictor, "model.predictor.kind", Predictor)


def hidden_index(visible_index: Int[Tensor, "b v"], patches: int) -> Int[Tensor, "b m"]:
    """The patches of each image that are not visible, in ascending order; every image has as many."""
    hidden = torch.ones(len(visible_index), patches, dtype=torch.bool, device=visible_index.device)
    hidden.scatter_(1, visible_index, value=False)
    # Sorting puts True first and keeps the order of equals.
    order = hidden.int().argsort(dim=1, descending=True, stable=True)
    return order[:, : patches - visible_index.shape[1]].contiguous()


def rows_at(
    tokens: Float[Tensor, "b m d"], hidden: Int[Tensor, "b m"], predict_index: Int[Tensor, "b p"]
) -> Float[Tensor, "b p d"]:
    """The tokens of the predicted patches, out of those of the hidden ones."""
    place = torch.searchsorted(hidden, predict_index.contiguous())
    return tokens.gather(1, place[..., None].expand(-1, -1, tokens.shape[2]))
