"""Muon (Jordan et al. 2024) on the matrices of transformer blocks, AdamW on everything else.

A matrix moves along the orthogonal matrix that is nearest to its averaged gradient (Nesterov's), so that all
directions of a weight learn alike, also those in which gradients are small:

    B <- m B + (1 - m) G,   U = orthogonal((1 - m) G + m B),   W <- (1 - rate decay) W - rate 0.2 sqrt(max(r, c)) U

for a matrix of r rows and c columns, with m = 0.95. The last factor gives the update the root mean square of AdamW's
(Liu et al. 2025), so that both share one learning rate and one weight decay. It is `torch.optim.Muon` with
`adjust_lr_fn="match_rms_adamw"`, which can neither skip a step on the device nor read sharded weights.

Query, key and value are matrices of their own, as are both layers of the MLP. Matrices of one shape are computed
together. Sharded ones are put together and orthogonalized once, each in one process.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capi.errors import CapiError
from capi.runtime.devices import is_accelerator
from capi.runtime.sharding import local_part, map_whole
from capi.train.optimizer import AdamW, Optimizer
from capi.types import Float

MOMENTUM = 0.95
# Newton-Schulz: so many steps of x <- a x + (b x x^T + c (x x^T)^2) x, which bring singular values near 1.
STEPS, COEFFICIENTS, EPS = 5, (3.4445, -4.7750, 2.0315), 1e-7


class Muon(Optimizer):
    """One momentum for each matrix; the groups that are no matrices of blocks are AdamW's."""

    adapts = False

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0})
        if not any(group["matrices"] for group in self.param_groups):
            raise CapiError(
                "optimization.optimizer=muon is for 2-D weights inside transformer blocks, and this student has none: "
                "set optimization.optimizer=adamw"
            )
        # It works on the same groups and the same states.
        self.adamw = AdamW([group for group in self.param_groups if not group["matrices"]])
        self.adamw.state = self.state

    @property
    def _matrices(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """Matrices of one shape together, with the group they are in."""
        groups: list[tuple[dict[str, Any], list[Tensor]]] = []
        for group in self.param_groups:
            if group["matrices"]:
                shapes = dict.fromkeys(weight.shape for weight in group["params"])
                groups += [
                    (group, [parameter for parameter in group["params"] if parameter.shape == shape])
                    for shape in shapes
                ]
        return groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the matrices; where `found_inf` is 1 nothing changes."""
        assert closure is None, "gradients are there before a step"
        self.adamw.found_inf = self.found_inf
        self.adamw.step()
        for group, weights in self._matrices:
            self._move(weights, group["lr"], group["weight_decay"])

    def _move(self, weights: list[Tensor], rate: float, decay: float) -> None:
        """All of one shape, as stacks of the rows that this process has."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight].update(self.initial_state(weight))
        momenta = [local_part(self.state[weight]["momentum_buffer"]) for weight in weights]
        momentum = torch.stack(momenta)
        gradient = torch.stack([local_part(weight.grad) for weight in weights if weight.grad is not None])
        moving = gradient.new_ones(())
        if self.found_inf is not None:
            moving = 1 - self.found_inf
            # Chosen, not weighted: a bad gradient may be NaN. The momentum's average with itself is itself.
            gradient = torch.where(moving > 0, gradient, momentum)
        momentum = momentum.lerp(gradient, 1 - MOMENTUM)
        torch._foreach_copy_(momenta, list(momentum.unbind()))
        update = map_whole(orthogonal, gradient.lerp(momentum, MOMENTUM), like=weights[0])
        ours, rate_now = [local_part(weight) for weight in weights], rate * moving
        torch._foreach_mul_(ours, 1 - rate_now * decay)
        torch._foreach_sub_(ours, list((update * (rate_now * 0.2 * max(weights[0].shape) ** 0.5)).unbind()))

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        if any(parameter is weight for _, weights in self._matrices for weight in weights):
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return self.adamw.initial_state(parameter)

    def flop(self) -> int:
        return sum(len(weights) * orthogonal_flop(*weights[0].shape) for _, weights in self._matrices)

    def launches(self) -> int:
        # The Newton-Schulz steps and what is beside them, for all matrices of a shape at once.
        return (3 * STEPS + 20) * len(self._matrices)

    def working_values(self) -> int:
        # Stacks of gradients, momenta and updates, and two in the Newton-Schulz steps.
        return max(5 * len(weights) * weights[0].numel() for _, weights in self._matrices)


def orthogonal(matrices: Float[Tensor, "m r c"]) -> Float[Tensor, "m r c"]:
    """Nearly the orthogonal matrix nearest to each one: singular values between about 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    # Noise of rounding does no harm, as Muon's authors found; a CPU would be slower in bfloat16.
    x = matrices.bfloat16() if is_accelerator(matrices.device) else matrices.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def orthogonal_flop(rows: int, columns: int) -> int:
    """FLOP of one matrix: in each step one product of the short sides alone, two with the long one."""
    short, long = sorted((rows, columns))
    return STEPS * 2 * (2 * short * short * long + short**3)
