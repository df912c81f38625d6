"""The optimizers of a run and their parameter groups.

Student: biases are not decayed, norm scales at a tenth; the patch embedding learns five times slower. Prototypes: AdamW
at half the learning rate, with a weight decay of their own that covers their bias too.

An optimizer of the student is a class that keeps the contract `Optimizer`, and one line in `OPTIMIZERS` of
`capi.train.build`; code outside of the package calls `register_optimizer`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from capi.method.health import gradient_norm
from capi.method.student import Student
from capi.method.targets import Target
from capi.models.encoder import PatchEmbedding, PatchEncoder
from capi.models.layers import RMSNorm, TransformerBlock
from capi.runtime.sharding import local_part
from capi.types import Float

BETAS = (0.9, 0.95)
EPS = 1e-8


class Optimizer(torch.optim.Optimizer):
    """The contract. A subclass is called with the parameter groups, and with `optimization.options` by name.

    A group has `lr` (the rate of this step), `rate_multiplier` (which `set_learning_rate` multiplies it with),
    `weight_decay`, and `matrices`: whether it holds 2-D weights of transformer blocks. Parameters may be sharded over
    processes (DTensor).
    """

    # Whether it reads the `pull` of a group, towards the weights that a run started from.
    pulls: ClassVar[bool] = False
    # Whether `capi adapt` leaves it where a recipe names it: weights that Adam trained are better left with Adam.
    adapts: ClassVar[bool] = True
    # 1 where a step must change no parameter and no state, else 0: a tensor on the device, which nothing may wait for.
    found_inf: Float[Tensor, ""] | None = None

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step: what checkpoints hold of it, and what memory it takes."""
        raise NotImplementedError

    def flop(self) -> int:
        """The FLOP of the matrix products in one step, over all processes together."""
        return 0

    def launches(self) -> int:
        """Operations that a step launches beyond those of AdamW."""
        return 0

    def working_values(self) -> int:
        """About so many float32 values that a step holds beside parameters, gradients and states."""
        return 0


class AdamW(torch.optim.AdamW, Optimizer):
    """AdamW with the constants of the paper.

    A group with a `pull` (L2-SP; Li et al., ICML 2018) decays towards the weights it started from, which are part of
    its state: W <- W - rate pull (W - W0), decoupled from the gradient as weight decay is.
    """

    pulls = True

    def __init__(self, groups: Any, *, betas: Sequence[float] = BETAS, eps: float = EPS) -> None:
        first, second = betas
        super().__init__(groups, lr=0.0, betas=(first, second), eps=eps, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters; where `found_inf` is 1 nothing changes."""
        assert closure is None, "gradients are there before a step"
        for group in self.param_groups:
            if group.get("pull"):
                self._pull(group)
        super().step()

    def _pull(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if not self.state[parameter]:
                self.state[parameter].update(self.initial_state(parameter))
        weights = [local_part(parameter) for parameter in group["params"]]
        origins = [local_part(self.state[parameter]["origin"]) for parameter in group["params"]]
        share = torch.full((), group["lr"] * group["pull"], device=weights[0].device)
        if self.found_inf is not None:
            share = share * (1 - self.found_inf)
        torch._foreach_lerp_(weights, origins, [share] * len(weights))

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state = {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        pulled = (group["params"] for group in self.param_groups if group.get("pull"))
        is_pulled = any(parameter is each for parameters in pulled for each in parameters)
        return state | ({"origin": parameter.detach().clone()} if is_pulled else {})


@dataclass(frozen=True)
class Adaptation:
    """How much an encoder may change that a run starts from."""

    frozen_steps: int = 0
    """First steps in which it is frozen; its rate then rises for as many."""
    rate_multiplier: float = 1.0
    layer_decay: float = 1.0
    """The rate of a block in units of the next one's: block l of L has decay^(L - l), the embedding decay^(L + 1)."""
    pull: float = 0.0
    """Towards the weights it started from, in place of weight decay."""

    def rates(self, encoder: PatchEncoder) -> dict[int, float]:
        """The multiple of the rate for each of its parameters, by identity."""
        depth = len(encoder.blocks)
        rates = {id(each): self.layer_decay ** (depth + 1) for each in encoder.parameters()}
        for number, block in enumerate(encoder.blocks):
            rates |= {id(each): self.layer_decay ** (depth - number) for each in block.parameters()}
        last = getattr(encoder, "final_norm", None)
        rates |= {id(each): 1.0 for each in last.parameters()} if last is not None else {}
        return {key: self.rate_multiplier * rate for key, rate in rates.items()}


MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


def student_optimizer(
    student: Student,
    *,
    optimizer: MakeOptimizer = AdamW,
    weight_decay: float,
    norm_decay_multiplier: float = 0.1,
    patch_embedding_rate_multiplier: float = 0.2,
    matrix_rate_multiplier: float = 1.0,
    adaptation: Adaptation | None = None,
) -> Optimizer:
    """Learning rates start at 0; `set_learning_rate` gives each step its own. What has no gradient is left out."""
    adaptation = adaptation or Adaptation()
    matrices, rates = {id(weight) for weight in block_matrices(student)}, adaptation.rates(student.encoder)
    groups: dict[tuple[float, float, bool, int, float], list[nn.Parameter]] = {}
    modules = student.modules()
    owned = ((module, *pair) for module in modules for pair in module.named_parameters(recurse=False))
    for module, name, parameter in owned:
        if not parameter.requires_grad:
            continue
        decay, rate = weight_decay, 1.0
        if name == "bias":
            decay = 0.0
        elif isinstance(module, RMSNorm | nn.LayerNorm) or name in ("attention_scale", "mlp_scale"):
            decay = weight_decay * norm_decay_multiplier
        if isinstance(module, PatchEmbedding):
            rate = patch_embedding_rate_multiplier
        elif id(parameter) in matrices:
            rate = matrix_rate_multiplier
        frozen_steps, pull = 0, 0.0
        if id(parameter) in rates:
            rate, frozen_steps, pull = rate * rates[id(parameter)], adaptation.frozen_steps, adaptation.pull
        key = rate, 0.0 if pull else decay, id(parameter) in matrices, frozen_steps, pull
        groups.setdefault(key, []).append(parameter)
    names = ("rate_multiplier", "weight_decay", "matrices", "frozen_steps", "pull")
    return optimizer(
        [{"params": parameters, **dict(zip(names, key, strict=True))} for key, parameters in groups.items()]
    )


def target_optimizer(target: Target, *, weight_decay: float, rate_multiplier: float = 0.5) -> AdamW | None:
    """The optimizer of a target's own parameters: the prototypes and their bias. Without parameters there is none."""
    parameters = list(target.parameters())
    group = {"params": parameters, "rate_multiplier": rate_multiplier, "weight_decay": weight_decay}
    return AdamW([group]) if parameters else None


def block_matrices(student: Student) -> list[nn.Parameter]:
    """The 2-D weights inside the blocks of encoder and predictor."""
    blocks = (module for module in student.modules() if isinstance(module, TransformerBlock))
    return [parameter for block in blocks for parameter in block.parameters() if parameter.ndim == 2]


def set_learning_rate(optimizer: Optimizer, rate: float, step: int = 0) -> None:
    """Set the rate of this step, each group at its own multiple, or 0 while it is frozen."""
    for group in optimizer.param_groups:
        frozen = group.get("frozen_steps", 0)
        risen = min(max((step - frozen + 1) / frozen, 0.0), 1.0) if frozen else 1.0
        group["lr"] = rate * group["rate_multiplier"] * risen


def clip_gradients(optimizer: Optimizer, limit: float) -> None:
    """Scale all gradients of an optimizer down until they are no longer than `limit` together, over all processes."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    clip_grads_with_norm_(parameters, limit, gradient_norm(parameters))
