"""The cross-attention predictor: mask tokens read the encoder's output and never see each other."""

import torch
from torch import Tensor, nn

from capi.models.encoder import INITIAL_TOKEN_STD, Encoded
from capi.models.layers import Block, final_norm
from capi.models.rope import RopeVariant, rotary_table
from capi.types import Float


class Predictor(nn.Module):
    """Predicts the tokens at given positions from an encoding."""

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        heads: int,
        context_width: int,
        mlp_width: int,
        rope: RopeVariant = "axial",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.width = width
        self.head_width = width // heads
        self.rope: RopeVariant = rope
        self.mask_token = nn.Parameter(torch.empty(1, width).normal_(std=INITIAL_TOKEN_STD))
        self.blocks = nn.ModuleList(
            Block(width=width, heads=heads, mlp_width=mlp_width, drop_rate=drop_rate, context_width=context_width)
            for _ in range(depth)
        )

    def forward(
        self, encoded: Encoded, coordinates: Float[Tensor, "s p 2"], depth: int | None = None
    ) -> Float[Tensor, "b p d"]:
        """The predictions at `coordinates`; `depth` stops after so many blocks."""
        query_rotary = rotary_table(coordinates, self.head_width, self.rope)
        key_rotary = rotary_table(encoded.coordinates, self.head_width, self.rope)
        x = self.mask_token.expand(len(encoded.tokens), coordinates.shape[1], -1)
        for block in list(self.blocks)[:depth]:
            x = block(x, query_rotary, encoded.tokens, key_rotary)
        return final_norm(x)
