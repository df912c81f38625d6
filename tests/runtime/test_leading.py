"""Who leads and who follows; that the words and tensors arrive is seen with real processes (tests/evaluation)."""

from typing import Any

import pytest

from capi.errors import CapiError
from capi.runtime.processes import ALONE, Done, LostProcessError, SharedError, lead
from capi.runtime.processes import follow as follow_main
from tests.runtime.threads import ThreadExchange, exchanges, together


def test__the_others_do_what_is_asked_and_get_the_answer() -> None:
    def act(exchange: ThreadExchange) -> Any:
        done: list[int] = []
        if exchange.rank:
            return follow_main(exchange, done.append), done

        with lead(exchange) as findings:
            exchange.announce(1)
            exchange.announce(2)
            findings.result = "wh"
        return "whole", done

    assert together(3, act) == [("whole", []), ("wh", [1, 2]), ("wh", [1, 2])]


@pytest.mark.parametrize("error", [CapiError("no such folder"), ValueError("no such folder")])
def test__a_failure_of_the_main_process_is_everyone_s(error: Exception) -> None:
    def act(exchange: ThreadExchange) -> Any:
        if exchange.rank:
            return follow_main(exchange, print)
        with lead(exchange):
            raise error

    first, *others = together(3, act)
    assert first is error
    assert [(type(other), str(other)) for other in others] == [(SharedError, "no such folder")] * 2


def test__a_lost_process_gets_no_message() -> None:
    """The announcement would wait for a process that is gone."""

    main, other = exchanges(2)
    with pytest.raises(LostProcessError, match="gone"), lead(main):
        raise LostProcessError("gone")
    assert other.queues["all", 1].empty()


def test__whoever_is_interrupted_waits_for_nobody() -> None:
    main, other = exchanges(2)
    with pytest.raises(KeyboardInterrupt), lead(main):
        raise KeyboardInterrupt
    assert other.queues["all", 1].empty()


def test__a_process_may_be_alone() -> None:
    assert (ALONE.rank, ALONE.size, ALONE.is_main) == (0, 1, True)
    assert Done() == (None, None)
