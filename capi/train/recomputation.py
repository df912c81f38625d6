"""Activation checkpointing: memory of the forward pass against time of the backward pass.

What a block computes on the way to its output is discarded and recomputed when its gradient is needed (Chen
et al., 2016). `full` keeps a block's input alone; `selective` also keeps what matrix products and attention gave, so
that only the cheap rest is computed twice. Results do not change: random draws are repeated as they were.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from capi.models.costs import Checkpointing

_ATEN = torch.ops.aten
_KEPT = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]


def recompute(blocks: Iterable[nn.Module], kind: Checkpointing) -> None:
    """Recompute what blocks compute in their backward pass. Changes them in place; names of parameters stay."""
    again = partial(checkpoint, use_reentrant=False)
    if kind == "selective":
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, _KEPT))
    for block in blocks if kind != "off" else ():
        block.forward = partial(again, block.forward)
