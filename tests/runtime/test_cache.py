import os

from capi.runtime.cache import Cache


def test__values_are_made_once_and_the_oldest_goes() -> None:
    made, closed = [], []

    def make(number: int) -> str:
        made.append(number)
        return f"value {number}"

    cache = Cache(make, 2, close=closed.append)
    assert [cache[number] for number in (1, 2, 1, 3, 1, 2)] == [f"value {number}" for number in (1, 2, 1, 3, 1, 2)]
    assert made == [1, 2, 3, 2]
    assert closed == ["value 2", "value 3"]
    del cache
    assert sorted(closed) == ["value 1", "value 2", "value 2", "value 3"]


def test__weights_count_and_the_newest_stays_however_heavy() -> None:
    cache = Cache(lambda number: number, 10, weigh=lambda value: value)
    for number in (3, 4, 5):
        assert cache[number] == number
    assert list(cache.values) == [4, 5]
    assert cache[50] == 50
    assert list(cache.values) == [50]
    assert cache.used == 50


def test__another_process_starts_with_nothing_and_closes_nothing() -> None:
    closed: list[int] = []
    cache = Cache(lambda number: number, 5, close=closed.append)
    assert cache[1] == 1
    cache.process = os.getpid() + 1
    assert cache[2] == 2
    assert list(cache.values) == [2]
    assert closed == []
