"""Which names of a host stand for this machine alone: what the servers of pages have to know."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
