"""Models without weights, which take the tensors of a file as they are: no memory is asked for and nothing is drawn."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_)


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules that are built in here lie on the device `meta`."""
    with torch.device("meta"), _NothingDrawn():
        yield


class _NothingDrawn(TorchFunctionMode):
    """Leaves out random numbers: on `meta`, torch imports its compiler for them, which takes seconds."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        return next(iter((*args, *kwargs.values()))) if func in _DRAWS else func(*args, **kwargs)
