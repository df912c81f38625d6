"""The optimizers of a run and their parameter groups.

Student: biases are not decayed, norm scales at a tenth; the patch embedding learns five times slower. Prototypes: AdamW
at half the learning rate, with a weight decay of their own that covers their bias too.

An optimizer of the student is a class that keeps the contract `Optimizer`, and one line in `OPTIMIZERS` of
`capi.train.build`; code outside of the package calls `register_optimizer`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from capi.method.health import gradient_norm
from capi.method.student import Student
from capi.method.targets import Target
from capi.models.encoder import PatchEmbedding
from capi.models.layers import Block, RMSNorm
from capi.types import Float

BETAS = (0.9, 0.95)
EPS = 1e-8


class Optimizer(torch.optim.Optimizer):
    """The contract. A subclass is called with the parameter groups alone.

    A group has `lr` (the rate of this step), `rate_multiplier` (which `set_learning_rate` multiplies it with),
    `weight_decay`, and `matrices`: whether it holds 2-D weights of transformer blocks. Parameters may be sharded over
    processes (DTensor).
    """

    # 1 where a step must change no parameter and no state, else 0: a tensor on the device, which nothing may wait for.
    found_inf: Float[Tensor, ""] | None = None

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step: what checkpoints hold of it, and what memory it takes."""
        raise NotImplementedError

    def flop(self) -> int:
        """The FLOP of the matrix products in one step, over all processes together."""
        return 0

    def working_values(self) -> int:
        """About so many float32 values that a step holds beside parameters, gradients and states."""
        return 0


class AdamW(torch.optim.AdamW, Optimizer):
    """AdamW with the constants of the paper."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.0, betas=BETAS, eps=EPS, fused=True)

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


OptimizerClass = Callable[[list[dict[str, Any]]], Optimizer]


def student_optimizer(
    student: Student,
    *,
    optimizer: OptimizerClass = AdamW,
    weight_decay: float,
    norm_decay_multiplier: float = 0.1,
    patch_embedding_rate_multiplier: float = 0.2,
    matrix_rate_multiplier: float = 1.0,
) -> Optimizer:
    """Learning rates start at 0; `set_learning_rate` gives each step its own."""
    matrices = {id(weight) for weight in block_matrices(student)}
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for module, name, parameter in _owned_parameters(student):
        decay, rate = weight_decay, 1.0
        if name == "bias":
            decay = 0.0
        elif isinstance(module, RMSNorm):
            decay = weight_decay * norm_decay_multiplier
        if isinstance(module, PatchEmbedding):
            rate = patch_embedding_rate_multiplier
        elif id(parameter) in matrices:
            rate = matrix_rate_multiplier
        groups.setdefault((rate, decay, id(parameter) in matrices), []).append(parameter)
    return optimizer(
        [
            {"params": parameters, "rate_multiplier": rate, "weight_decay": decay, "matrices": in_blocks}
            for (rate, decay, in_blocks), parameters in groups.items()
        ]
    )


def target_optimizer(target: Target, *, weight_decay: float, rate_multiplier: float = 0.5) -> AdamW | None:
    """The optimizer of a target's own parameters: the prototypes and their bias. Without parameters there is none."""
    parameters = list(target.parameters())
    group = {"params": parameters, "rate_multiplier": rate_multiplier, "weight_decay": weight_decay}
    return AdamW([group]) if parameters else None


def block_matrices(student: Student) -> list[nn.Parameter]:
    """The 2-D weights inside the blocks of encoder and predictor."""
    blocks = (module for module in student.modules() if isinstance(module, Block))
    return [parameter for block in blocks for parameter in block.parameters() if parameter.ndim == 2]


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the rate of this step, each group at its own multiple."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_multiplier"]


def clip_gradients(optimizer: Optimizer, limit: float) -> None:
    """Scale all gradients of an optimizer down until they are no longer than `limit` together, over all processes."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    clip_grads_with_norm_(parameters, limit, gradient_norm(parameters))


def _owned_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter once, with the module that owns it and its name there."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield owner, name, parameter
