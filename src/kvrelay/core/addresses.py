"""Whether an address is reachable from other machines. Pure: no name is resolved."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``: 127.0.0.0/8, ``::1`` or ``localhost``.

    Other names, wildcards and the empty string count as reachable from elsewhere.
    """
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
