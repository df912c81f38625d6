"""A polite end: SIGINT and SIGTERM let the step finish and the state be saved."""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_LOG = logging.getLogger("capi")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Within it the first signal asks for an end; a second one ends at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        # Python lets the main thread alone handle signals.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        _LOG.warning("%s: saving after this step; once more ends at once", self.received.name)
