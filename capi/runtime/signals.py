"""A polite end: a signal lets the step finish and the state be saved.

SIGINT comes from a keyboard. SIGTERM, SIGUSR1 and SIGUSR2 come from schedulers that need the machine for something else
and will start the run again; such an end has an exit code of its own.
"""

import logging
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_LOG = logging.getLogger("capi")
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
# Ctrl-C reaches a whole group of processes, and whoever started them passes it on: those are one request.
_SECONDS_OF_ONE_REQUEST = 2.0


class StopRequest:
    """Signals as requests: the first asks for an end, a Ctrl-C after it ends at once, as does one outside of training.

    One within another is the same: whoever ends the whole process has it last until then, so that neither a signal
    before the first step nor one after the last, which torchrun sends when another process has left, ends it otherwise.
    """

    _active: "StopRequest | None" = None

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.training = False
        self._asked_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def preempted(self) -> bool:
        """Whether it was a scheduler that asked."""
        return self.received is not None and self.received != signal.SIGINT

    def __enter__(self) -> "StopRequest":
        if StopRequest._active is not None:
            return StopRequest._active
        # Python lets the main thread alone handle signals.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
            StopRequest._active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if StopRequest._active is not self:
            return
        StopRequest._active = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """Ignore signals, in a process that has saved and is about to end with a code of its own."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before = {}

    def _receive(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and not self.training and self.received is None:
            # There is nothing to save yet, or no more.
            raise KeyboardInterrupt
        if self.received is None:
            self.received, self._asked_at = signal.Signals(number), time.monotonic()
            _LOG.warning("%s: saving after this step; Ctrl-C ends at once", self.received.name)
        elif number == signal.SIGINT and time.monotonic() - self._asked_at > _SECONDS_OF_ONE_REQUEST:
            raise KeyboardInterrupt
