import pytest

from capi.runtime.hosts import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test__loopback_is_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org", "localhost.example.org", ""])  # noqa: S104
def test__any_other_host_may_be_reached_from_elsewhere(host: str) -> None:
    assert not is_loopback(host)
