"""One plain vision transformer for every baseline: its options, its positions, its network."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.errors import CapiError, counted
from capi.models.encoder import Encoded, MaskTokens, PatchEmbedding
from capi.models.layers import TransformerBlock
from capi.models.positions import patch_coordinates, register_coordinates
from capi.types import IMAGENET, Features, Float, Int, Statistics

# How a table of positions comes to another grid than its own:
#   fixed      not at all: the model takes its own size only
#   bicubic    bicubic to the grid that is asked for
#   antialias  the same with torch's antialiasing, which has another kernel also where it enlarges
#   offset     bicubic by the ratio (grid + 0.1) / own grid, as DINO and iBOT do against errors of rounding
#   rows       sines and cosines computed for the grid, rows first (MoCo v3); on square grids only
Resampling = Literal["fixed", "bicubic", "antialias", "offset", "rows"]


@dataclass(frozen=True)
class PlainArchitecture:
    """A plain vision transformer.

    Tokens are [class token, registers, patches in rows]. A block is x + attention(norm(x)), then x + mlp(norm(x)); with
    `post_norm` it is norm(x + attention(x)), then norm(x + mlp(x)). GELU is exact.
    """

    width: int
    depth: int
    heads: int
    patch_size: int
    grid: int
    """Rows and columns of patches that the positions are made for."""
    mlp_width: int
    gated_mlp: bool = False
    """SwiGLU: silu(gate) * up, then down; otherwise two linear maps with a GELU between them."""
    eps: float = 1e-6
    """Of every LayerNorm."""

    class_token: bool = True
    registers: int = 0
    """Between class token and patches, without positions."""

    query_bias: bool = True
    key_bias: bool = True
    value_bias: bool = True
    output_bias: bool = True
    """Of the map after attention."""
    mlp_bias: bool = True
    layer_scale: bool = False
    """A learned factor for each channel of a branch, before it is added."""

    positions: Literal["table", "sincos", "none"] = "table"
    """Added to patches: a table out of the file, sines and cosines computed for each grid (AIM), or nothing."""
    class_position: bool = True
    """Whether the table has a row for the class token, before those of the patches."""
    resampling: Resampling = "bicubic"
    relative_bias: Literal["none", "shared", "block"] = "none"
    """Added to attention logits by the offset between two patches: one table for all blocks, or one in each (BEiT)."""
    rotary: bool = False
    """Queries and keys of patches are rotated by their place (DINOv3); class token and registers are not."""

    patch_norm: bool = False
    """LayerNorm right after the patch embedding (AIM)."""
    input_norm: bool = False
    """LayerNorm of all tokens before the first block (data2vec 2.0)."""
    post_norm: bool = False
    final_norm: bool = True
    """LayerNorm of all tokens after the last block."""
    blocks_used: int | None = None
    """How many blocks are run, where the features come before the last; the norm after it is then left out."""
    causal: bool = False
    """Trained with attention to earlier patches alone, in the order of rows (AIM): it encodes whole images only."""
    channels: int = 3

    @property
    def native_size(self) -> int:
        """Side of the images that the positions are made for, in pixels."""
        return self.grid * self.patch_size

    def changed(self, **changes: Any) -> "PlainArchitecture":
        """The same with other options."""
        return replace(self, **changes)


def vit(
    width: int, depth: int, heads: int, patch_size: int, *, image_size: int = 224, **options: Any
) -> PlainArchitecture:
    """The usual sizes: an MLP of four times the width by default."""
    options.setdefault("mlp_width", 4 * width)
    return PlainArchitecture(
        width=width, depth=depth, heads=heads, patch_size=patch_size, grid=image_size // patch_size, **options
    )


def count_parameters(of: PlainArchitecture) -> int:
    """How many numbers the encoder has, fixed tables of positions included."""
    d, hidden = of.width, of.mlp_width
    maps = 3 if of.gated_mlp else 2
    attention = 4 * d * d + d * (of.query_bias + of.key_bias + of.value_bias + of.output_bias)
    mlp = maps * d * hidden + of.mlp_bias * ((maps - 1) * hidden + d)
    relative = ((2 * of.grid - 1) ** 2 + 3) * of.heads
    block = attention + mlp + 4 * d + 2 * d * of.layer_scale + relative * (of.relative_bias == "block")
    table = (of.grid**2 + (of.class_token and of.class_position)) * d * (of.positions == "table")
    tokens = (of.class_token + of.registers) * d
    norms = 2 * d * (of.patch_norm + of.input_norm + of.final_norm)
    patches = d * of.channels * of.patch_size**2 + d
    return of.depth * block + table + tokens + norms + patches + relative * (of.relative_bias == "shared")


_WAVELENGTH = 10_000.0
_OFFSET = 0.1
_ROTARY_BASE = 100.0


def resampled(
    table: Float[Tensor, "1 n d"], rows: int, columns: int, resampling: Resampling, patch_size: int
) -> Float[Tensor, "1 m d"]:
    """A table of a square grid for another grid, as the authors of the model do it."""
    own = math.isqrt(table.shape[1])
    if (rows, columns) == (own, own):
        return table
    if resampling == "fixed":
        raise CapiError(
            f"this model takes images of {own * patch_size} x {own * patch_size} pixels only, as its positions are not "
            f"made for others, but the image has {rows * patch_size} x {columns * patch_size}: resize it"
        )
    if resampling == "rows":
        return row_first_sincos(rows, columns, table.shape[2], patch_size).to(table)
    grid = table.float().reshape(1, own, own, -1).permute(0, 3, 1, 2)
    if resampling == "offset":
        ratio = ((rows + _OFFSET) / own, (columns + _OFFSET) / own)
        grid = F.interpolate(grid, scale_factor=ratio, mode="bicubic")
    else:
        grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", antialias=resampling == "antialias")
    return grid.permute(0, 2, 3, 1).reshape(1, rows * columns, -1).to(table.dtype)


def column_first_sincos(rows: int, columns: int, width: int) -> Float[Tensor, "1 n d"]:
    """Sines and cosines of the column, then of the row, each over half of the channels (MAE, I-JEPA, AIM)."""
    down, across = torch.meshgrid(torch.arange(rows).float(), torch.arange(columns).float(), indexing="ij")
    return torch.cat([_waves(across.flatten(), width // 2), _waves(down.flatten(), width // 2)], dim=1)[None]


def row_first_sincos(rows: int, columns: int, width: int, patch_size: int) -> Float[Tensor, "1 n d"]:
    """Sines and cosines of the row, then of the column (MoCo v3), whose authors lay them out for squares alone."""
    if rows != columns:
        raise CapiError(
            f"this model takes square images only, as its positions are made for them, but the image has "
            f"{rows * patch_size} x {columns * patch_size} pixels: resize or crop it"
        )
    half = width // 2
    swapped = column_first_sincos(rows, columns, width)
    return torch.cat([swapped[..., half:], swapped[..., :half]], dim=-1)


def _waves(places: Float[Tensor, " n"], width: int) -> Float[Tensor, "n d"]:
    frequencies = 1.0 / _WAVELENGTH ** (torch.arange(width // 2).float() / (width / 2))
    angles = places[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def relative_index(grid: int, *, class_token: bool = True) -> Int[Tensor, "t t"]:
    """Which row of a table belongs to a pair of tokens: that of their offset, or one of three for the class token.

    The rows are (2 grid - 1)^2 offsets, then class token to patch, patch to class token, class token to itself.
    """
    span = 2 * grid - 1
    place = torch.stack(torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")).flatten(1)
    down, across = place[:, :, None] - place[:, None, :] + grid - 1
    between = down * span + across
    if not class_token:
        return between
    index = torch.empty(grid * grid + 1, grid * grid + 1, dtype=torch.long)
    index[1:, 1:] = between
    index[0, :] = span**2
    index[:, 0] = span**2 + 1
    index[0, 0] = span**2 + 2
    return index


def rotary_periods(head_width: int) -> Float[Tensor, " p"]:
    """Periods of the channels of a head along one axis (DINOv3)."""
    return _ROTARY_BASE ** (torch.arange(head_width // 4).float() * 4 / head_width)


def rotary_angles(rows: int, columns: int, periods: Float[Tensor, " p"]) -> Float[Tensor, "n w"]:
    """The angle of each channel of a head at each patch (DINOv3): centres run from -1 to 1 along each axis."""
    places = (torch.arange(count, device=periods.device).float() + 0.5 for count in (rows, columns))
    down, across = (2 * place / count - 1 for place, count in zip(places, (rows, columns), strict=True))
    centers = torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1).flatten(0, 1)
    angles = 2 * math.pi * centers[:, :, None] / periods
    return angles.flatten(1).tile(2)


def rotated(x: Float[Tensor, "b h t w"], angles: Float[Tensor, "s v w"]) -> Float[Tensor, "b h t w"]:
    """The last v tokens turned by their angles, in pairs of channels half a head apart; the others as they are.

    s is the batch, or 1 where all images have the same patches.
    """
    prefix, angles = x.shape[2] - angles.shape[1], angles[:, None]
    first, second = x[:, :, prefix:].chunk(2, dim=-1)
    turned = x[:, :, prefix:] * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return torch.cat([x[:, :, :prefix], turned.to(x.dtype)], dim=2)


class PlainAttention(nn.Module):
    """Softmax attention among the tokens; logits are divided by the root of a head's width."""

    def __init__(self, of: PlainArchitecture) -> None:
        super().__init__()
        self.heads = of.heads
        self.query = nn.Linear(of.width, of.width, bias=of.query_bias)
        self.key = nn.Linear(of.width, of.width, bias=of.key_bias)
        self.value = nn.Linear(of.width, of.width, bias=of.value_bias)
        self.output = nn.Linear(of.width, of.width, bias=of.output_bias)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        bias: Float[Tensor, "m h t t"] | None,
        angles: Float[Tensor, "s v w"] | None,
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


class PlainMLP(nn.Module):
    """Two linear maps with an exact GELU, or SwiGLU."""

    def __init__(self, of: PlainArchitecture) -> None:
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

    def __init__(self, of: PlainArchitecture) -> None:
        super().__init__()
        self.grid, self.class_token = of.grid, of.class_token
        rows = (2 * of.grid - 1) ** 2 + 3 * of.class_token
        self.table = nn.Parameter(torch.zeros(rows, of.heads))

    def forward(self, places: Int[Tensor, "b v"] | None = None) -> Float[Tensor, "s h t t"]:
        """Between the tokens of whole images, or between the class token and the patches at these places."""
        index = relative_index(self.grid, class_token=self.class_token).to(self.table.device)
        if places is None:
            return self.table[index].permute(2, 0, 1)[None]
        if self.class_token:
            places = F.pad(places + 1, (1, 0))
        return self.table[index[places[:, :, None], places[:, None, :]]].permute(0, 3, 1, 2)


class PlainBlock(TransformerBlock):
    """Attention and MLP, each with a norm before it or after the sum."""

    def __init__(self, of: PlainArchitecture) -> None:
        super().__init__()
        self.post_norm = of.post_norm
        self.attention_norm = nn.LayerNorm(of.width, eps=of.eps)
        self.attention = PlainAttention(of)
        self.mlp_norm = nn.LayerNorm(of.width, eps=of.eps)
        self.mlp = PlainMLP(of)
        scale = torch.ones(of.width) if of.layer_scale else None
        self.attention_scale = None if scale is None else nn.Parameter(scale)
        self.mlp_scale = None if scale is None else nn.Parameter(scale.clone())
        self.relative_bias = RelativeBias(of) if of.relative_bias == "block" else None

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        bias: Float[Tensor, "m h t t"] | None,
        angles: Float[Tensor, "s v w"] | None,
        places: Int[Tensor, "b v"] | None = None,
    ) -> Float[Tensor, "b t d"]:
        if self.relative_bias is not None:
            bias = self.relative_bias(places)
        if self.post_norm:
            x = self.attention_norm(x + self.attention(x, bias, angles))
            normed: Tensor = self.mlp_norm(x + self.mlp(x))
            return normed
        x = x + _scaled(self.attention(self.attention_norm(x), bias, angles), self.attention_scale)
        return x + _scaled(self.mlp(self.mlp_norm(x)), self.mlp_scale)


class WeightsOrigin(NamedTuple):
    """Whose weights these are: the name of a baseline, and whether their file was in its own layout."""

    baseline: str
    layout: Literal["original", "transformers"] = "original"


class PlainNetwork(nn.Module):
    """The weights of a plain vision transformer, and its tokens: of whole images, or of their visible patches."""

    rotary_periods: Tensor | None

    def __init__(self, architecture: PlainArchitecture, *, origin: WeightsOrigin | None = None) -> None:
        super().__init__()
        of = architecture
        self.architecture, self.origin = of, origin
        self.patch_embedding = PatchEmbedding(width=of.width, channels=of.channels, patch_size=of.patch_size)
        self.patch_norm = nn.LayerNorm(of.width, eps=of.eps) if of.patch_norm else None
        self.class_token = nn.Parameter(torch.zeros(1, 1, of.width)) if of.class_token else None
        self.registers = nn.Parameter(torch.zeros(1, of.registers, of.width)) if of.registers else None
        length = of.grid**2 + (of.class_token and of.class_position)
        self.positions = nn.Parameter(torch.zeros(1, length, of.width)) if of.positions == "table" else None
        self.relative_bias = RelativeBias(of) if of.relative_bias == "shared" else None
        self.input_norm = nn.LayerNorm(of.width, eps=of.eps) if of.input_norm else None
        self.blocks = nn.ModuleList(PlainBlock(of) for _ in range(of.depth))
        self.final_norm = nn.LayerNorm(of.width, eps=of.eps) if of.final_norm else None
        periods = rotary_periods(of.width // of.heads) if of.rotary else None
        self.register_buffer("rotary_periods", periods, persistent=False)

    @property
    def width(self) -> int:
        return self.architecture.width

    @property
    def patch_size(self) -> int:
        return self.architecture.patch_size

    @property
    def prefix(self) -> int:
        """How many tokens stand before the patches: the class token and the registers."""
        return self.architecture.class_token + self.architecture.registers

    def tokens(
        self,
        images: Float[Tensor, "b c height width"],
        visible_index: Int[Tensor, "b v"] | None = None,
        masked: MaskTokens | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Class token, registers and patches, all of them or the visible ones, then mask tokens where some are given.

        What a patch gets for its place it gets wherever it stands in the sequence: a vector, an angle, the biases of
        its offsets to the others.
        """
        of = self.architecture
        rows, columns = self._grid(images)
        places = visible_index
        if visible_index is not None and masked is not None:
            places = torch.cat([visible_index, masked.hidden], dim=1)
        x = self._embed(images, rows, columns, visible_index, masked, places)
        bias = None if self.relative_bias is None else self.relative_bias(places)
        angles = None if self.rotary_periods is None else _at(rotary_angles(rows, columns, self.rotary_periods), places)
        for block in self.blocks[: of.blocks_used]:
            x = block(x, bias, angles, places)
        return x if self.final_norm is None or of.blocks_used is not None else self.final_norm(x)

    def features(self, images: Float[Tensor, "b c height width"], *, pooled: bool = True) -> Features:
        """What frozen encoders give; `PlainViT` says what stands where."""
        tokens, first = self.tokens(images), int(self.architecture.class_token)
        patches = tokens[:, self.prefix :]
        summary = tokens[:, 0] if first else patches.mean(1)
        return Features(
            pooled=summary if pooled else None,
            registers=tokens[:, first : self.prefix],
            feature_map=patches.unflatten(1, self._grid(images)),
        )

    def _grid(self, images: Float[Tensor, "b c height width"]) -> tuple[int, int]:
        of = self.architecture
        _, channels, height, width = images.shape
        if channels != of.channels:
            raise CapiError(f"this model takes images of {counted(of.channels, 'channel')}, but these have {channels}")
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

    def _embed(
        self,
        images: Float[Tensor, "b c height width"],
        rows: int,
        columns: int,
        visible_index: Int[Tensor, "b v"] | None = None,
        masked: MaskTokens | None = None,
        places: Int[Tensor, "b m"] | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Class token, registers, patches and mask tokens, with positions, before the first block."""
        patches = self.patch_embedding(images, visible_index)
        if self.patch_norm is not None:
            patches = self.patch_norm(patches)
        if masked is not None:
            patches = torch.cat([patches, masked.tokens.to(patches.dtype)], dim=1)
        class_token: Tensor | None = self.class_token
        if self.architecture.positions == "sincos":
            patches = patches + _at(column_first_sincos(rows, columns, self.width)[0].to(patches), places)
        elif self.positions is not None:
            of = self.architecture
            # 1 for a first row that is the class token's.
            first = int(of.class_token and of.class_position)
            placed = resampled(self.positions[:, first:], rows, columns, of.resampling, self.patch_size)
            patches = patches + _at(placed[0].to(patches.dtype), places)
            if class_token is not None and first:
                class_token = class_token + self.positions[:, :1]
        prefix = [token.expand(len(patches), -1, -1) for token in (class_token, self.registers) if token is not None]
        x = torch.cat([*prefix, patches], dim=1)
        return x if self.input_norm is None else self.input_norm(x)


class PlainViT(PlainNetwork):
    """A `VisionEncoder`: features of the patches after the last block that is used, in the order of the image.

    `pooled` is the class token; of a model without one, the mean of the patches. Both have passed the final norm, where
    there is one. `registers` are the register tokens. `statistics` are the mean and std that images are
    normalised with before they come here. `licence` is that of the weights, and `verified` says how the map of their
    names was checked.
    """

    def __init__(
        self,
        architecture: PlainArchitecture,
        *,
        statistics: Statistics = IMAGENET,
        licence: str = "",
        verified: str = "",
        origin: WeightsOrigin | None = None,
    ) -> None:
        super().__init__(architecture, origin=origin)
        self.statistics, self.licence, self.verified = statistics, licence, verified

    def forward(self, images: Float[Tensor, "b c height width"], *, pooled: bool = True) -> Features:
        return self.features(images, pooled=pooled)


class PlainEncoder(PlainNetwork):
    """The same network as a student's encoder (`PatchEncoder`), under the same names of weights.

    The class token counts as a register. Predictors take it for one too: its coordinates are those of the first.
    """

    def __init__(self, architecture: PlainArchitecture, *, origin: WeightsOrigin | None = None) -> None:
        super().__init__(architecture, origin=origin)
        if architecture.causal:
            raise CapiError(
                "this model learnt with attention from each patch to earlier ones alone, so it cannot leave out hidden "
                "patches, and no student can start from it: choose a model of another method, such as DINOv2 or MAE"
            )
        if self.rotary_periods is not None:
            # Published ones are rounded, so that they belong to the weights.
            self.register_buffer("rotary_periods", self.rotary_periods)

    @property
    def num_registers(self) -> int:
        return self.prefix

    def forward(
        self,
        images: Float[Tensor, "b c height width"],
        visible_index: Int[Tensor, "b v"] | None = None,
        masked: MaskTokens | None = None,
    ) -> Encoded:
        everywhere = self.coordinates(images)
        places = everywhere[None] if visible_index is None else everywhere[visible_index]
        if masked is not None:
            places = torch.cat([places, everywhere[masked.hidden]], dim=1)
        coordinates = torch.cat([register_coordinates(places, self.num_registers), places], dim=1)
        return Encoded(self.tokens(images, visible_index, masked), coordinates, everywhere, visible_index)

    def coordinates(self, images: Tensor) -> Float[Tensor, "n 2"]:
        """Where the patches of these images stand, row by row."""
        return patch_coordinates(*self._grid(images), device=images.device)

    def patches(self, encoded: Encoded) -> Float[Tensor, "b v d"]:
        """The patch tokens of an encoding."""
        return encoded.tokens[:, self.num_registers :]


def _at(table: Float[Tensor, "n d"], places: Int[Tensor, "b v"] | None) -> Float[Tensor, "s v d"]:
    """The rows of these places; without places all rows, for all images alike."""
    return table[None] if places is None else table[places]


def _scaled(x: Float[Tensor, "b t d"], scale: Float[Tensor, " d"] | None) -> Float[Tensor, "b t d"]:
    return x if scale is None else x * scale
