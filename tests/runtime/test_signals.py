import os
import signal
import threading
import time

import pytest

from capi.runtime.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test__the_first_signal_asks_and_its_echo_is_no_second_one(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.training = True
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
        stop.training = True
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


def test__one_within_another_is_the_same_so_that_an_early_request_is_not_lost() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as outer:
        os.kill(os.getpid(), signal.SIGTERM)
        with StopRequest() as inner:
            assert inner is outer
            assert inner.preempted
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test__before_and_after_training_an_interrupt_ends_at_once_unless_it_echoes_an_earlier_one() -> None:
    with StopRequest() as stop:
        stop.training = True
        os.kill(os.getpid(), signal.SIGINT)
        stop.training = False
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
    with StopRequest() as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is None


def test__a_process_that_is_about_to_end_heeds_no_signal_any_more() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with StopRequest() as stop:
            stop.ignore()
        for number in before:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert stop.received is None
