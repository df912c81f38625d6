"""The transformer block of encoder and predictor: pre-norm, no biases, efficient stochastic depth; and its RMSNorm.

RMSNorm has a learned scale in blocks and none at the end of encoder and predictor. On accelerators it is one kernel of
torch's. On a CPU torch makes it of many steps, each over all tokens, and saves a normalized copy for the backward pass:
there it is a function of its own, which saves its input alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from capi.errors import CapiError, counted
from capi.models.positions import RotaryTable, rotate
from capi.runtime.devices import is_accelerator
from capi.types import Float

NORM_EPS = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square norm over channels with a learned scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        # Shards may hand out a rounded weight; norms are computed as their input is.
        return _rms_norm(x, self.weight.to(x.dtype))


def final_norm(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """The norm at the end of encoder and predictor: no learned scale."""
    return _rms_norm(x, None)


def _rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    own = not is_accelerator(x.device) and x.dtype in (torch.float32, torch.float64)
    # What is compiled or exported is fused by whoever reads the graph.
    if not own or torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return F.rms_norm(x, x.shape[-1:], weight, NORM_EPS)
    normed: Tensor = _Norm.apply(x, weight)
    return normed


class _Norm(torch.autograd.Function):
    """x / rms(x) * weight.

    With r = 1 / rms(x) and a gradient g the gradients are

        of x        r g weight - x r^3 (g . (weight x)) / d
        of weight   the sum over tokens of r g x
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse.div_(x.shape[-1]).add_(NORM_EPS).rsqrt_()
        ctx.save_for_backward(x, inverse, weight)
        # Row by row also where x is not: products want it so.
        normed = torch.mul(x, inverse, out=x.new_empty(x.shape))
        return normed if weight is None else normed.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, inverse, weight = ctx.saved_tensors
        # One product serves both: its rows are summed for x, its columns for the weight.
        product = (gradient * x).reshape(-1, x.shape[-1])
        agreement = product.sum(1) if weight is None else product.mv(weight)
        weight_gradient = None if weight is None else product.t().mv(inverse.flatten())
        share = (agreement.view_as(inverse) / -x.shape[-1]).mul_(inverse.pow(3))
        result = torch.mul(gradient, inverse, out=product.view(x.shape))
        if weight is not None:
            result.mul_(weight)
        return result.addcmul_(x, share), weight_gradient


class LinearLayer(nn.Linear):
    """Every linear map of the networks: no bias, xavier-uniform."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        # What is drawn first is drawn over. It stays, so that a seed gives the weights that it always gave.
        super().reset_parameters()
        nn.init.xavier_uniform_(self.weight)


class Attention(nn.Module):
    """Softmax attention from x to a context, with rotary positions on queries and keys where there are any."""

    def __init__(self, *, width: int, heads: int, context_width: int) -> None:
        super().__init__()
        if width % heads or (width // heads) % 4:
            raise CapiError(
                f"a width of {width} with {counted(heads, 'head')} gives a head width of {width / heads:g}, but "
                "rotary positions need a multiple of 4: change the width or the number of heads"
            )
        self.heads = heads
        self.query = LinearLayer(width, width)
        self.key = LinearLayer(context_width, width)
        self.value = LinearLayer(context_width, width)
        self.output = LinearLayer(width, width)

    def forward(
        self,
        x: Float[Tensor, "b q d"],
        context: Float[Tensor, "b t e"],
        query_rotary: RotaryTable | None,
        key_rotary: RotaryTable | None,
    ) -> Float[Tensor, "b q d"]:
        query = rotate(self._split(self.query(x)), query_rotary)
        key = rotate(self._split(self.key(context)), key_rotary)
        value = self._split(self.value(context))
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output

    def _split(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t h w"]:
        return x.unflatten(-1, (self.heads, -1))


class MLP(nn.Module):
    """Two linear maps with an exact GELU between them."""

    def __init__(self, *, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = LinearLayer(width, hidden)
        self.contract = LinearLayer(hidden, width)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        output: Tensor = self.contract(F.gelu(self.expand(x)))
        return output


class TransformerBlock(nn.Module):
    """What is compiled, sharded and computed again by itself: a `Block`, or one of another method's encoder."""

    attention: Any
    mlp: Any
    drop_rate: float = 0.0

    def images_kept(self, images: int) -> int:
        """The number of images of a batch for which a residual branch runs in training."""
        return max(int(images * (1 - self.drop_rate)), 1)


class Block(TransformerBlock):
    """x + attention(norm(x)), then x + mlp(norm(x)); in training each branch runs for a random part of the images.

    Without a context the attention is over x itself; with one it is cross-attention, and the norm before it applies to
    the queries only.
    """

    def __init__(
        self, *, width: int, heads: int, mlp_width: int, drop_rate: float, context_width: int | None = None
    ) -> None:
        super().__init__()
        self.drop_rate = drop_rate
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width=width, heads=heads, context_width=context_width or width)
        self.mlp_norm = RMSNorm(width)
        self.mlp = MLP(width=width, hidden=mlp_width)

    def forward(
        self,
        x: Float[Tensor, "b q d"],
        query_rotary: RotaryTable | None,
        context: Float[Tensor, "b t e"] | None = None,
        key_rotary: RotaryTable | None = None,
    ) -> Float[Tensor, "b q d"]:
        if not self.training or self.drop_rate == 0:
            x = x + self._attend(x, query_rotary, context, key_rotary)
            return x + self.mlp(self.mlp_norm(x))
        rows = self._draw_rows(x)
        branch = self._attend(
            x.index_select(0, rows),
            None if query_rotary is None else query_rotary.select(rows),
            None if context is None else context.index_select(0, rows),
            None if key_rotary is None else key_rotary.select(rows),
        )
        x = _add_to_rows(x, branch, rows)
        rows = self._draw_rows(x)
        return _add_to_rows(x, self.mlp(self.mlp_norm(x.index_select(0, rows))), rows)

    def _attend(
        self, x: Tensor, query_rotary: RotaryTable | None, context: Tensor | None, key_rotary: RotaryTable | None
    ) -> Tensor:
        normed = self.attention_norm(x)
        attended: Tensor = self.attention(
            normed,
            normed if context is None else context,
            query_rotary,
            query_rotary if key_rotary is None else key_rotary,
        )
        return attended

    def _draw_rows(self, x: Tensor) -> Tensor:
        return torch.randperm(len(x), device=x.device)[: self.images_kept(len(x))]


def _add_to_rows(x: Tensor, branch: Tensor, rows: Tensor) -> Tensor:
    """Add a branch that ran for some images only, scaled so that its expectation is that of the full branch."""
    # Under autocast the branch is of lower precision than the residual stream.
    return x.index_add(0, rows, branch.to(x.dtype), alpha=len(x) / len(rows))
