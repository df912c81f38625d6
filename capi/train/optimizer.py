"""The two AdamW optimisers and their parameter groups.

Student: biases are not decayed, norm scales at a tenth; the patch embedding learns five times slower. Prototypes: half
the learning rate, a weight decay of their own that covers their bias too.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import AdamW

from capi.method.health import gradient_norm
from capi.method.student import Student
from capi.method.targets import Target
from capi.models.encoder import PatchEmbedding
from capi.models.norms import RMSNorm

BETAS = (0.9, 0.95)
EPS = 1e-8


def student_optimizer(
    student: Student,
    *,
    weight_decay: float,
    norm_decay_multiplier: float = 0.1,
    patch_embedding_rate_multiplier: float = 0.2,
) -> AdamW:
    """Learning rates start at 0; `set_learning_rate` gives each step its own."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for module, name, parameter in _owned_parameters(student):
        decay = weight_decay
        if name == "bias":
            decay = 0.0
        elif isinstance(module, RMSNorm):
            decay = weight_decay * norm_decay_multiplier
        rate = patch_embedding_rate_multiplier if isinstance(module, PatchEmbedding) else 1.0
        groups.setdefault((rate, decay), []).append(parameter)
    return _adamw(
        {"params": parameters, "rate_multiplier": rate, "weight_decay": decay}
        for (rate, decay), parameters in groups.items()
    )


def target_optimizer(target: Target, *, weight_decay: float, rate_multiplier: float = 0.5) -> AdamW | None:
    """The optimiser of a target's own parameters: the prototypes and their bias. Without parameters there is none."""
    parameters = list(target.parameters())
    group = {"params": parameters, "rate_multiplier": rate_multiplier, "weight_decay": weight_decay}
    return _adamw([group]) if parameters else None


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    """Set the rate of this step, each group at its own multiple."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_multiplier"]


def clip_gradients(optimizer: AdamW, limit: float) -> None:
    """Scale all gradients of an optimiser down until they are no longer than `limit` together, over all processes."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    clip_grads_with_norm_(parameters, limit, gradient_norm(parameters))


def _adamw(groups: Any) -> AdamW:
    return AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, fused=True)


def _owned_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter once, with the module that owns it and its name there."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield owner, name, parameter
