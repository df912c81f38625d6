"""Sums and maxima over all processes."""

import torch.distributed as dist
from torch import Tensor


class AllProcesses:
    """The reduction of a run with many processes: what each of them sees becomes that of the global batch.

    Every process must reduce the same tensors in the same order, which equal batch sizes ensure.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def sum(self, value: Tensor) -> Tensor:
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: Tensor) -> Tensor:
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        result = value.contiguous().clone()
        dist.all_reduce(result, op=operation, group=self.group)
        return result
