"""A cache by number: what was opened or decoded last; the oldest goes when there is too much."""

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Cache(Generic[Value]):
    """Makes a value when it is first asked for. `weigh` says what each counts against the limit."""

    def __init__(
        self,
        make: Callable[[int], Value],
        limit: int,
        *,
        close: Callable[[Value], object] | None = None,
        weigh: Callable[[Value], int] = lambda _: 1,
    ) -> None:
        self.make, self.limit, self.close, self.weigh = make, limit, close, weigh
        self.used, self.process = 0, os.getpid()
        self.values: OrderedDict[int, Value] = OrderedDict()

    def __getitem__(self, number: int) -> Value:
        if self.process != os.getpid():
            # Handles of the parent process are left alone: what they refer to may be shared with it.
            self.used, self.process = 0, os.getpid()
            self.values = OrderedDict()
        if number not in self.values:
            self._add(number, self.make(number))
        self.values.move_to_end(number)
        return self.values[number]

    def _add(self, number: int, value: Value) -> None:
        self.values[number] = value
        self.used += self.weigh(value)
        # The newest stays, however large it is.
        while self.used > self.limit and len(self.values) > 1:
            oldest = self.values.popitem(last=False)[1]
            self.used -= self.weigh(oldest)
            if self.close:
                self.close(oldest)

    def __del__(self) -> None:
        if self.close and self.process == os.getpid():
            for value in self.values.values():
                self.close(value)
