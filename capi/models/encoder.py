"""The vision transformer: registers and patches, all patches or only the visible ones, with mask tokens or without."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.errors import CapiError, counted, expect
from capi.models.layers import Block, final_norm
from capi.models.positions import POSITIONS, AxialPositions, GridSize, patch_coordinates, register_coordinates
from capi.types import Float, Int

INITIAL_TOKEN_STD = 0.02


class Encoded(NamedTuple):
    """Final-normed tokens, registers first, with their coordinates (s is 1 when all images share them).

    A predictor also learns where all patches of the images stand, row by row, and which of them were visible; None for
    all.
    """

    tokens: Float[Tensor, "b t d"]
    coordinates: Float[Tensor, "s t 2"]
    everywhere: Float[Tensor, "n 2"]
    visible_index: Int[Tensor, "b v"] | None = None


class MaskTokens(NamedTuple):
    """Tokens that stand for hidden patches, and which patches of the grid those are."""

    tokens: Float[Tensor, "b m d"]
    hidden: Int[Tensor, "b m"]


@runtime_checkable
class PatchEncoder(Protocol):
    """The contract of a student's encoder, kept by a module: tokens of whole images, or of their visible patches."""

    @property
    def width(self) -> int: ...

    if TYPE_CHECKING:
        # Submodules, which `isinstance` does not see from Python 3.12 on.
        patch_embedding: "PatchEmbedding"
        blocks: nn.ModuleList

    @property
    def num_registers(self) -> int: ...

    def __call__(
        self,
        images: Float[Tensor, "b c height width"],
        visible_index: Int[Tensor, "b v"] | None = None,
        masked: MaskTokens | None = None,
    ) -> Encoded: ...

    def coordinates(self, images: Tensor) -> Float[Tensor, "n 2"]: ...

    def patches(self, encoded: Encoded) -> Float[Tensor, "b v d"]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class PatchEmbedding(nn.Conv2d):
    """A convolution whose kernel and stride are the patch size, computed for the wanted patches only."""

    def __init__(self, *, width: int, channels: int, patch_size: int) -> None:
        super().__init__(channels, width, patch_size, patch_size)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        # Xavier-uniform of the matrix from a patch's pixels to a token.
        width, pixels = self.weight.flatten(1).shape
        bound = math.sqrt(3.0) * math.sqrt(2.0 / (width + pixels))
        nn.init.uniform_(self.weight, -bound, bound)

    @property
    def patch_size(self) -> int:
        return self.weight.shape[-1]

    def grid(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of patches; an image the model cannot take is an error."""
        expect("images", images, Tensor, "a torch.Tensor (capi.transform makes one of files)")
        if images.device != self.weight.device:
            raise CapiError(
                f"the images lie on {images.device} and the model on {self.weight.device}: move one of them with .to()"
            )
        expected, given = (str(kind).removeprefix("torch.") for kind in (self.weight.dtype, images.dtype))
        if images.ndim != 4 or (given != expected and not torch.is_autocast_enabled(images.device.type)):
            raise CapiError(
                f"images must be {expected} of shape (batch, channels, height, width), but these are {given} of shape "
                f"{tuple(images.shape)}: convert and normalise them first"
            )
        _, channels, height, width = images.shape
        size = self.patch_size
        if channels != self.weight.shape[1]:
            raise CapiError(
                f"the model takes images with {counted(self.weight.shape[1], 'channel')}, but these have {channels}: "
                "channels come before height and width"
            )
        if not height or not width or height % size or width % size:
            raise CapiError(
                f"the sides of an image must be multiples of the patch size {size}, but this one is "
                f"{height} x {width}: resize it to {max(height // size, 1) * size} x {max(width // size, 1) * size}"
            )
        return height // size, width // size

    def forward(  # type: ignore[override]
        self, images: Float[Tensor, "b c height width"], visible_index: Int[Tensor, "b v"] | None
    ) -> Float[Tensor, "b v d"]:
        rows, columns = self.grid(images)
        size = self.patch_size
        # (b c rows size columns size) to (b n, c size size): patches row by row, in each one channel after the other.
        patches = images.unflatten(3, (columns, size)).unflatten(2, (rows, size))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        if visible_index is not None:
            patches = patches.gather(1, visible_index[..., None].expand(-1, -1, patches.shape[-1]))
        return F.linear(patches, self.weight.flatten(1), self.bias)


class Encoder(nn.Module):
    """Encodes whole images (teacher, evaluation) or their visible patches (student)."""

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        heads: int,
        patch_size: int,
        registers: int,
        channels: int = 3,
        mlp_width: int,
        positions: str = AxialPositions.kind,
        grid: GridSize | None = None,
        drop_rate: float = 0.0,
    ) -> None:
        """`grid` is the native one in patches; only learned positions need it."""
        super().__init__()
        self.width = width
        self.head_width = width // heads
        self.patch_embedding = PatchEmbedding(width=width, channels=channels, patch_size=patch_size)
        self.registers = nn.Parameter(torch.empty(1, registers, width))
        self.reset_parameters()
        self.blocks = nn.ModuleList(
            Block(width=width, heads=heads, mlp_width=mlp_width, drop_rate=drop_rate) for _ in range(depth)
        )
        self.positions = POSITIONS[positions](width=width, head_width=self.head_width, grid=grid)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.registers, std=INITIAL_TOKEN_STD)

    @property
    def num_registers(self) -> int:
        return self.registers.shape[1]

    def forward(
        self,
        images: Float[Tensor, "b c height width"],
        visible_index: Int[Tensor, "b v"] | None = None,
        masked: MaskTokens | None = None,
    ) -> Encoded:
        """Registers, then patches, then mask tokens where some are given, which belong to the sequence like patches."""
        everywhere = self.coordinates(images)
        patches = self.patch_embedding(images, visible_index)
        places = everywhere[None] if visible_index is None else everywhere[visible_index]
        if masked is not None:
            patches = torch.cat([patches, masked.tokens], dim=1)
            places = torch.cat([places, everywhere[masked.hidden]], dim=1)
        patches = self.positions.place(patches, places)
        coordinates = torch.cat([register_coordinates(places, self.num_registers), places], dim=1)
        rotary = self.positions.rotary(coordinates)
        x = torch.cat([self.registers.expand(images.shape[0], -1, -1), patches], dim=1)
        for block in self.blocks:
            x = block(x, rotary)
        return Encoded(final_norm(x), coordinates, everywhere, visible_index)

    def coordinates(self, images: Tensor) -> Float[Tensor, "n 2"]:
        """Where the patches of these images stand, row by row."""
        return patch_coordinates(*self.patch_embedding.grid(images), device=images.device)

    def patches(self, encoded: Encoded) -> Float[Tensor, "b v d"]:
        """The patch tokens of an encoding, registers left out."""
        return encoded.tokens[:, self.num_registers :]
