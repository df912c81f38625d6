"""torch.compile for what is called over and over: blocks of encoder and predictor, heads, and what a target names.

Each is compiled by itself, and one piece of code serves all that are alike, so that a deep network takes no longer than
a shallow one. Only the forward pass is compiled: what puts sharded weights together (FSDP2) stays around it, as torch
advises. Sizes are constant in a run, so every size has code of its own (`dynamic=False`), but those of a target may
change, as where a queue of the clustering fills.

Where the compiler fails the forward pass is what it was, after one warning.
"""

import copy
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from capi.models.layers import TransformerBlock
from capi.train.step import Learner

_LOG = logging.getLogger("capi")


def wants_compiling(setting: str, device: torch.device) -> bool:
    """`auto` compiles where an accelerator of NVIDIA or AMD computes; elsewhere it hardly pays."""
    return device.type == "cuda" if setting == "auto" else setting == "on"


def compile_networks(learner: Learner, backend: str = "inductor") -> None:
    """Compile blocks and heads of student and teacher, and what the target names, in place; names and copies stay."""
    failures: list[str] = []
    for network in (learner.student, learner.teacher.average):
        for module in (*(part for part in network.modules() if isinstance(part, TransformerBlock)), network.head):
            module.forward = Compiled(module.forward, failures, backend)
    for name, options in learner.target.compiled.items():
        function = getattr(learner.target, name)
        setattr(learner.target, name, Compiled(function, failures, backend, dynamic=None, options=dict(options)))


class Compiled:
    """A forward pass that is compiled when it is first called. A copy of its module is not compiled."""

    def __init__(
        self,
        forward: Callable[..., Any],
        failures: list[str],
        backend: str,
        *,
        dynamic: bool | None = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        # `failures` is shared by all that are compiled: where one fails, no other is tried.
        self.forward, self.failures = forward, failures
        options = options if backend == "inductor" else None
        self.compiled = torch.compile(forward, dynamic=dynamic, backend=backend, options=options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        if not self.failures:
            try:
                return self.compiled(*arguments, **options)
            except TorchDynamoException as error:
                self.failures.append(_reason(error))
                _LOG.warning(_sentence(self.failures[0]))
        return self.forward(*arguments, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A bound method, or a partial of one, that belongs to the copied module.
        return copy.deepcopy(self.forward, memo)


@cache
def compiler_warning(device: torch.device) -> str | None:
    """Why nothing can be compiled for a device, found by compiling a sum."""
    try:
        values = torch.ones(8, device=device, requires_grad=True)
        torch.compile(lambda tensor: tensor.square().sum())(values).backward()
    except Exception as error:
        # Whatever a compiler says, it is no reason not to train.
        return _sentence(_reason(error))
    return None


def _reason(error: BaseException) -> str:
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:200]


def _sentence(reason: str) -> str:
    return (
        f"torch.compile does not work here ({reason}), so the run continues without it: install a C++ compiler (CXX "
        "names it) and the Python headers, or set run.compile=off"
    )
