from __future__ import annotations

import pytest

from kvrelay.core.addresses import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "127.255.0.9", "localhost", "LOCALHOST", "::1", "[::1]"])
def test_loopback_addresses_are_local(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "node1", "localhost.example.org", "127.0.0.1.example"]
)
def test_other_addresses_are_reachable_from_elsewhere(host: str) -> None:
    assert not is_loopback(host)
