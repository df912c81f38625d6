"""The precision of the two matrix products of the clustering: logits, and the prototypes' gradient.

The factors of a product are rounded; its sums and all that follows are in float32. Nothing is set globally.
Sinkhorn-Knopp amplifies what the logits are rounded by, 17 times at a temperature of 0.06. Nothing amplifies the
gradient, so its product is in bfloat16 where the logits are in TF32: twice as fast, and half the bytes.
"""

from typing import Literal

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.runtime.devices import float32_products, is_accelerator
from capi.types import Float

ProductPrecision = Literal["float32", "tf32", "bfloat16"]


def choose_products(name: str, device: torch.device, run: torch.dtype) -> ProductPrecision:
    """`auto` is TF32 where a run in bfloat16 has a GPU with it, and float32 elsewhere."""
    if device.type == "cuda":
        # torch calls AMD's devices cuda as well.
        has_tf32 = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        # Plans and counts are of a GPU that is elsewhere.
        has_tf32 = device.type in ("cpu", "meta") and is_accelerator(device)
    if name == "auto":
        return "tf32" if has_tf32 and run == torch.bfloat16 else "float32"
    if name == "tf32" and not has_tf32:
        which = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the device {device.type}"
        raise CapiError(
            f"clustering.precision=tf32 needs a CUDA GPU of Ampere or newer, but {which} has no TF32: set "
            "clustering.precision=auto"
        )
    assert name in ("float32", "tf32", "bfloat16")
    return name  # type: ignore[return-value]


def gradient_products(logits: ProductPrecision) -> Literal["float32", "bfloat16"]:
    """The precision of the gradient's product, by that of the logits."""
    return "float32" if logits == "float32" else "bfloat16"


def product(
    left: Float[Tensor, "i j"],
    right: Float[Tensor, "j l"],
    precision: ProductPrecision = "float32",
    plus: Float[Tensor, "*l"] | None = None,
    out: Float[Tensor, "i l"] | None = None,
) -> Float[Tensor, "i l"]:
    """left right, plus what there is to add."""
    if precision == "bfloat16" and is_accelerator(left.device) and left.device.type != "mps":
        products = torch.mm(left.bfloat16(), right.bfloat16(), out_dtype=torch.float32)
        return products if plus is None else torch.add(products, plus, out=out)
    if precision == "bfloat16":
        left, right = left.bfloat16().float(), right.bfloat16().float()
    with float32_products("high" if precision == "tf32" else "highest"):
        return left @ right if plus is None else torch.addmm(plus, left, right, out=out)
