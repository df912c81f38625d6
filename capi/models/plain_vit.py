"""One plain vision transformer for every baseline; `capi/models/plain_architecture.py` lists what they differ in."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.errors import CapiError
from capi.models.plain_architecture import Architecture
from capi.models.plain_positions import (
    column_first_sincos,
    relative_index,
    resampled,
    rotary_angles,
    rotary_periods,
    rotated,
)
from capi.types import IMAGENET, Features, Float, Statistics


class Attention(nn.Module):
    """Softmax attention among the tokens; logits are divided by the root of a head's width."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.heads = of.heads
        self.query = nn.Linear(of.width, of.width, bias=of.query_bias)
        self.key = nn.Linear(of.width, of.width, bias=of.key_bias)
        self.value = nn.Linear(of.width, of.width, bias=of.value_bias)
        self.output = nn.Linear(of.width, of.width, bias=of.output_bias)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        bias: Float[Tensor, "1 h t t"] | None,
        angles: Float[Tensor, "n w"] | None,
    ) -> Float[Tensor, "b t d"]:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        if angles is not None:
            query, key = rotated(query, angles), rotated(key, angles)
        bias = None if bias is None else bias.to(query.dtype)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """Two linear maps with an exact GELU, or SwiGLU."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.gate = nn.Linear(of.width, of.mlp_width, bias=of.mlp_bias) if of.gated_mlp else None
        self.expand = nn.Linear(of.width, of.mlp_width, bias=of.mlp_bias)
        self.contract = nn.Linear(of.mlp_width, of.width, bias=of.mlp_bias)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        hidden = F.gelu(self.expand(x)) if self.gate is None else F.silu(self.gate(x)) * self.expand(x)
        output: Tensor = self.contract(hidden)
        return output


class RelativeBias(nn.Module):
    """A number for each head and each offset between two patches."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.grid, self.class_token = of.grid, of.class_token
        rows = (2 * of.grid - 1) ** 2 + 3 * of.class_token
        self.table = nn.Parameter(torch.zeros(rows, of.heads))

    def forward(self) -> Float[Tensor, "1 h t t"]:
        index = relative_index(self.grid, class_token=self.class_token).to(self.table.device)
        return self.table[index].permute(2, 0, 1)[None]


class Block(nn.Module):
    """Attention and MLP, each with a norm before it or after the sum."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.post_norm = of.post_norm
        self.attention_norm = nn.LayerNorm(of.width, eps=of.eps)
        self.attention = Attention(of)
        self.mlp_norm = nn.LayerNorm(of.width, eps=of.eps)
        self.mlp = MLP(of)
        scale = torch.ones(of.width) if of.layer_scale else None
        self.attention_scale = None if scale is None else nn.Parameter(scale)
        self.mlp_scale = None if scale is None else nn.Parameter(scale.clone())
        self.relative_bias = RelativeBias(of) if of.relative_bias == "block" else None

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        bias: Float[Tensor, "1 h t t"] | None,
        angles: Float[Tensor, "n w"] | None,
    ) -> Float[Tensor, "b t d"]:
        if self.relative_bias is not None:
            bias = self.relative_bias()
        if self.post_norm:
            x = self.attention_norm(x + self.attention(x, bias, angles))
            normed: Tensor = self.mlp_norm(x + self.mlp(x))
            return normed
        x = x + _scaled(self.attention(self.attention_norm(x), bias, angles), self.attention_scale)
        return x + _scaled(self.mlp(self.mlp_norm(x)), self.mlp_scale)


class PlainViT(nn.Module):
    """A `VisionEncoder`: features of the patches after the last block that is used, in the order of the image.

    `pooled` is the class token; of a model without one, the mean of the patches. Both have passed the final norm, where
    there is one. `registers` are the register tokens. `statistics` are the mean and deviation that images are
    normalised with before they come here. `licence` is that of the weights, and `verified` says how the map of their
    names was checked.
    """

    rotary_periods: Tensor | None

    def __init__(
        self, architecture: Architecture, *, statistics: Statistics = IMAGENET, licence: str = "", verified: str = ""
    ) -> None:
        super().__init__()
        of = architecture
        self.architecture = of
        self.statistics, self.licence, self.verified = statistics, licence, verified
        self.patch_embedding = nn.Conv2d(of.channels, of.width, of.patch_size, of.patch_size)
        self.patch_norm = nn.LayerNorm(of.width, eps=of.eps) if of.patch_norm else None
        self.class_token = nn.Parameter(torch.zeros(1, 1, of.width)) if of.class_token else None
        self.registers = nn.Parameter(torch.zeros(1, of.registers, of.width)) if of.registers else None
        length = of.grid**2 + (of.class_token and of.class_position)
        self.positions = nn.Parameter(torch.zeros(1, length, of.width)) if of.positions == "table" else None
        self.relative_bias = RelativeBias(of) if of.relative_bias == "shared" else None
        self.input_norm = nn.LayerNorm(of.width, eps=of.eps) if of.input_norm else None
        self.blocks = nn.ModuleList(Block(of) for _ in range(of.depth))
        self.final_norm = nn.LayerNorm(of.width, eps=of.eps) if of.final_norm else None
        periods = rotary_periods(of.width // of.heads) if of.rotary else None
        self.register_buffer("rotary_periods", periods, persistent=False)

    @property
    def width(self) -> int:
        return self.architecture.width

    @property
    def patch_size(self) -> int:
        return self.architecture.patch_size

    def forward(self, images: Float[Tensor, "b c height width"], *, pooled: bool = True) -> Features:
        of = self.architecture
        rows, columns = self._grid(images)
        x = self._embed(images, rows, columns)
        bias = None if self.relative_bias is None else self.relative_bias()
        angles = None if self.rotary_periods is None else rotary_angles(rows, columns, self.rotary_periods)
        for block in self.blocks[: of.blocks_used]:
            x = block(x, bias, angles)
        if self.final_norm is not None and of.blocks_used is None:
            x = self.final_norm(x)
        patches = x[:, of.class_token + of.registers :]
        summary = x[:, 0] if of.class_token else patches.mean(1)
        return Features(
            pooled=summary if pooled else None,
            registers=x[:, int(of.class_token) : of.class_token + of.registers],
            feature_map=patches.unflatten(1, (rows, columns)),
        )

    def _grid(self, images: Float[Tensor, "b c height width"]) -> tuple[int, int]:
        of = self.architecture
        _, channels, height, width = images.shape
        if channels != of.channels:
            raise CapiError(f"this model takes images of {of.channels} channels, but these have {channels}")
        if height % of.patch_size or width % of.patch_size or not height or not width:
            raise CapiError(
                f"an image of {height} x {width} pixels cannot be cut into patches of {of.patch_size}: use a size "
                f"divisible by it, such as {of.native_size}"
            )
        rows, columns = height // of.patch_size, width // of.patch_size
        if of.relative_bias != "none" and (rows, columns) != (of.grid, of.grid):
            raise CapiError(
                f"this model takes images of {of.native_size} x {of.native_size} pixels only, as its relative "
                f"positions are made for them, but the image has {height} x {width}: resize it"
            )
        return rows, columns

    def _embed(self, images: Float[Tensor, "b c height width"], rows: int, columns: int) -> Float[Tensor, "b t d"]:
        """Class token, registers and patches, with positions, before the first block."""
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)
        if self.patch_norm is not None:
            patches = self.patch_norm(patches)
        class_token: Tensor | None = self.class_token
        if self.architecture.positions == "sincos":
            patches = patches + column_first_sincos(rows, columns, self.width).to(patches)
        elif self.positions is not None:
            of_class, of_patches = self._split_table(self.positions)
            placed = resampled(of_patches, rows, columns, self.architecture.resampling, self.patch_size)
            patches = patches + placed.to(patches.dtype)
            class_token = class_token if class_token is None or of_class is None else class_token + of_class
        prefix = [token.expand(len(patches), -1, -1) for token in (class_token, self.registers) if token is not None]
        x = torch.cat([*prefix, patches], dim=1)
        return x if self.input_norm is None else self.input_norm(x)

    def _split_table(
        self, table: Float[Tensor, "1 n d"]
    ) -> tuple[Float[Tensor, "1 1 d"] | None, Float[Tensor, "1 m d"]]:
        of = self.architecture
        return (table[:, :1], table[:, 1:]) if of.class_token and of.class_position else (None, table)


def _scaled(x: Float[Tensor, "b t d"], scale: Float[Tensor, " d"] | None) -> Float[Tensor, "b t d"]:
    return x if scale is None else x * scale
