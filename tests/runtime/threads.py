"""Threads in the place of processes: what they say to each other goes through queues."""

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

from torch import Tensor

from capi.runtime.processes import Exchange, Processes

PATIENCE = 20.0


class ThreadExchange(Exchange):
    """One end of all queues; a queue for each pair of threads, and one to each for what is said to all."""

    def __init__(self, rank: int, size: int, queues: dict[Any, "Queue[Any]"]) -> None:
        super().__init__(Processes(rank=rank, size=size))
        object.__setattr__(self, "queues", queues)
        object.__setattr__(self, "sent_bytes", 0)

    def announce(self, word: Any) -> None:
        for other in range(1, self.size):
            # As bytes, as between processes: nothing is shared by accident.
            self.queues["all", other].put(pickle.dumps(word))

    def heard(self) -> Any:
        return pickle.loads(self.queues["all", self.rank].get(timeout=PATIENCE))  # noqa: S301

    def send(self, to: int, note: Any, tensors: Sequence[Tensor] = ()) -> None:
        object.__setattr__(self, "sent_bytes", self.sent_bytes + sum(tensor.nbytes for tensor in tensors))
        self.queues[self.rank, to].put((note, [tensor.clone() for tensor in tensors]))

    def receive(self, source: int) -> tuple[Any, list[Tensor]]:
        return self.queues[source, self.rank].get(timeout=PATIENCE)


def exchanges(size: int) -> list[ThreadExchange]:
    """The ends of so many threads."""
    pairs = [(rank, other) for rank in range(size) for other in range(size)]
    queues: dict[Any, Queue[Any]] = {key: Queue() for key in [*pairs, *(("all", rank) for rank in range(size))]}
    return [ThreadExchange(rank, size, queues) for rank in range(size)]


def together(size: int, act: Callable[[ThreadExchange], Any]) -> list[Any]:
    """What each of so many threads gives, or the error that it ends with."""

    def safely(exchange: ThreadExchange) -> Any:
        try:
            return act(exchange)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(safely, exchanges(size)))
