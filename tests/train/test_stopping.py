import os
import signal
import threading
import time

import pytest

from capi.train.stopping import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test__the_first_signal_asks_and_its_echo_is_no_second_one(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.received is None
        assert not stop.preempted
        for _ in range(3):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == number
        assert stop.preempted == (number != signal.SIGINT)
    assert signal.getsignal(number) is before


def test__a_later_interrupt_ends_at_once_and_a_later_signal_of_a_scheduler_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        later = time.monotonic() + 10
        monkeypatch.setattr(time, "monotonic", lambda: later)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.preempted


def test__another_thread_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
