"""What the baselines' vision transformers differ in, as one list of options."""

from dataclasses import dataclass, replace
from typing import Any, Literal

# How a table of positions comes to another grid than its own:
#   fixed      not at all: the model takes its own size only
#   bicubic    bicubic to the grid that is asked for
#   antialias  the same with torch's antialiasing, which has another kernel also where it enlarges
#   offset     bicubic by the ratio (grid + 0.1) / own grid, as DINO and iBOT do against errors of rounding
#   rows       sines and cosines computed anew, rows first (MoCo v3); on square grids only
Resampling = Literal["fixed", "bicubic", "antialias", "offset", "rows"]


@dataclass(frozen=True)
class Architecture:
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
    channels: int = 3

    @property
    def native_size(self) -> int:
        """Side of the images that the positions are made for, in pixels."""
        return self.grid * self.patch_size

    def changed(self, **changes: Any) -> "Architecture":
        """The same with other options."""
        return replace(self, **changes)


def vit(width: int, depth: int, heads: int, patch_size: int, *, image_size: int = 224, **options: Any) -> Architecture:
    """The usual sizes: an MLP of four times the width, unless told otherwise."""
    options.setdefault("mlp_width", 4 * width)
    return Architecture(
        width=width, depth=depth, heads=heads, patch_size=patch_size, grid=image_size // patch_size, **options
    )


def count_parameters(of: Architecture) -> int:
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
