import os
import signal

from capi.errors import INTERRUPTED, PREEMPTED


def test__codes_are_those_that_shells_and_schedulers_know() -> None:
    assert INTERRUPTED == 128 + signal.SIGINT
    assert getattr(os, "EX_TEMPFAIL", 75) == PREEMPTED
