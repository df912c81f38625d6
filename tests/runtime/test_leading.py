"""Who leads and who follows; that the words and tensors arrive is seen with real processes (tests/evaluation)."""

from typing import Any

import pytest

from capi.errors import CapiError
from capi.runtime.leading import ALONE, Done, lead
from capi.runtime.leading import follow as follow_main
from capi.runtime.processes import LostProcessError, SharedError
from tests.runtime.threads import ThreadExchange, exchanges, together


def test__the_others_do_what_is_asked_and_get_what_is_told() -> None:
    def act(exchange: ThreadExchange) -> Any:
        done: list[int] = []
        if exchange.rank:
            return follow_main(exchange, done.append), done

        def action() -> str:
            exchange.announce(1)
            exchange.announce(2)
            return "whole"

        return lead(exchange, action, told=lambda result: result[:2]), done

    assert together(3, act) == [("whole", []), ("wh", [1, 2]), ("wh", [1, 2])]


@pytest.mark.parametrize("error", [CapiError("no such folder"), ValueError("no such folder")])
def test__a_failure_of_the_main_process_is_everyone_s(error: Exception) -> None:
    def fail() -> None:
        raise error

    def act(exchange: ThreadExchange) -> Any:
        return follow_main(exchange, print) if exchange.rank else lead(exchange, fail, told=lambda result: result)

    first, *others = together(3, act)
    assert first is error
    assert [(type(other), str(other)) for other in others] == [(SharedError, "no such folder")] * 2


def test__of_a_lost_process_nobody_is_told() -> None:
    """The announcement would wait for a process that is gone."""

    def fail() -> None:
        raise LostProcessError("gone")

    main, other = exchanges(2)
    with pytest.raises(LostProcessError, match="gone"):
        lead(main, fail, told=lambda result: result)
    assert other.queues["all", 1].empty()


def test__whoever_is_interrupted_waits_for_nobody() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    main, other = exchanges(2)
    with pytest.raises(KeyboardInterrupt):
        lead(main, interrupt, told=lambda result: result)
    assert other.queues["all", 1].empty()


def test__a_process_may_be_alone() -> None:
    assert (ALONE.rank, ALONE.size, ALONE.is_main) == (0, 1, True)
    assert Done() == (None, None)
