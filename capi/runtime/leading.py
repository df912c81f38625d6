"""One process leads, and the others do what it asks for: words to all of them, tensors from one to another.

The processes that follow hold nothing but their share of the work, and whoever leads decides, writes and fails for all
of them. All of it goes over a group on the CPU that waits for a day: the main process may fit something for hours.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from capi.runtime.processes import LostProcessError, Processes, SharedError, lost_process_is_an_error

ALONE = Processes()
MAIN = 0


class Done(NamedTuple):
    """The last word of the main process: what it found, or why it failed."""

    result: Any = None
    failure: str | None = None


@dataclass(frozen=True)
class Exchange:
    """How the main process talks to the others."""

    processes: Processes

    @property
    def rank(self) -> int:
        return self.processes.rank

    @property
    def size(self) -> int:
        return self.processes.size

    def announce(self, word: Any) -> None:
        """Said by the main process, once all others listen."""
        with lost_process_is_an_error():
            dist.broadcast_object_list([word], src=MAIN, group=self.processes.patient)

    def heard(self) -> Any:
        """What the main process says next."""
        box: list[Any] = [None]
        with lost_process_is_an_error():
            dist.broadcast_object_list(box, src=MAIN, group=self.processes.patient)
        return box[0]

    def send(self, to: int, note: Any, tensors: Sequence[Tensor] = ()) -> None:
        """A small value and tensors of any kind; waits until they are received."""
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        head = torch.frombuffer(bytearray(pickle.dumps((note, shapes))), dtype=torch.uint8)
        with lost_process_is_an_error():
            self._send(torch.tensor([len(head)]), to)
            self._send(head, to)
            for tensor in tensors:
                # Empty ones are known by their shape.
                if tensor.numel():
                    self._send(tensor.detach().cpu().contiguous().flatten().view(torch.uint8), to)

    def receive(self, source: int) -> tuple[Any, list[Tensor]]:
        """The same, on the CPU."""
        with lost_process_is_an_error():
            length = self._receive(1, torch.int64, source)
            head = self._receive(int(length), torch.uint8, source)
            # From a process of the same command, never from a file.
            note, shapes = pickle.loads(head.numpy().tobytes())  # noqa: S301
            return note, [self._tensor(shape, dtype, source) for shape, dtype in shapes]

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        values = torch.empty(shape, dtype=dtype)
        if values.numel():
            dist.recv(values.flatten().view(torch.uint8), src=source, group=self.processes.patient)
        return values

    def _receive(self, count: int, dtype: torch.dtype, source: int) -> Tensor:
        values = torch.empty(count, dtype=dtype)
        dist.recv(values, src=source, group=self.processes.patient)
        return values

    def _send(self, values: Tensor, to: int) -> None:
        dist.send(values, dst=to, group=self.processes.patient)


@dataclass
class Findings:
    """What the others get at the end."""

    result: Any = None


@contextmanager
def lead(exchange: Exchange) -> Iterator[Findings]:
    """The main process works while the others follow; at the end they get the result it leaves here, or its failure."""
    findings = Findings()
    try:
        yield findings
    except LostProcessError:
        # There is nobody left to tell.
        raise
    except Exception as error:
        exchange.announce(Done(failure=str(error)))
        raise
    exchange.announce(Done(findings.result))


def follow(exchange: Exchange, act: Callable[[Any], None]) -> Any:
    """Do whatever the main process asks for, until it is done; what it found."""
    while not isinstance(word := exchange.heard(), Done):
        act(word)
    if word.failure is not None:
        raise SharedError(word.failure)
    return word.result
