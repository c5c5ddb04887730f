from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvrelay.config import FrontendConfig, MetricsConfig, WorkerConfig
from kvrelay.config.addresses import host_port, is_loopback, reached_url, zmq_hosts


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "127.255.0.9", "localhost", "LOCALHOST", "::1", "[::1]"])
def test_loopback_addresses_are_local(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "node1", "localhost.example.org", "127.0.0.1.example"]
)
def test_other_addresses_are_reachable_from_elsewhere(host: str) -> None:
    assert not is_loopback(host)


def test_a_name_that_has_only_ipv6_gives_way_to_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"six": [socket.AF_INET6], "both": [socket.AF_INET6, socket.AF_INET], "::1": [socket.AF_INET6]}

    def lookup(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, socket.SOCK_STREAM, 6, "", ("fd00::6", 0)) for family in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "gethostname", lambda: "six")
    assert [zmq_hosts(host)[1] for host in ("six", "both", "gone")] == ["fd00::6", "both", "gone"]
    assert zmq_hosts("six")[0] == "fd00::6"
    assert zmq_hosts("::") == ("::", "fd00::6")
    assert zmq_hosts("0.0.0.0") == ("0.0.0.0", "six")


def test_a_port_follows_a_host_as_in_a_url() -> None:
    assert [host_port(host, 80) for host in ("::1", "10.0.0.1", "node1")] == ["[::1]:80", "10.0.0.1:80", "node1:80"]


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_settings_take_an_ipv6_address_with_and_without_brackets(host: str) -> None:
    hosts = (
        FrontendConfig(host=host).host,
        MetricsConfig(metrics_host=host).metrics_host,
        WorkerConfig(model_path=Path("m"), host=host).host,
    )
    assert hosts == ("::1", "::1", "::1")


@pytest.mark.parametrize(
    ("url", "reached"),
    [
        ("http://0.0.0.0:8000", "http://10.0.0.4:8000"),
        ("https://[::]:8443", "https://10.0.0.4:8443"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://gpu1:8000", "http://gpu1:8000"),
    ],
)
def test_a_client_gets_a_host_for_a_wildcard(url: str, reached: str) -> None:
    assert reached_url(url, "10.0.0.4") == reached
