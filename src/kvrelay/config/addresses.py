"""Hosts and ports as users write them and as URLs show them. Only ``zmq_hosts`` resolves names.

Settings hold a bare host (``::1``); only a text with a port after it has brackets (``[::1]:8000``).
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from urllib.parse import urlsplit

WILDCARDS = ("", "*", "0.0.0.0", "::")
"""All addresses of this machine."""


def bare_host(host: str) -> str:
    """``host`` without the brackets that an IPv6 address has in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_port(host: str, port: int | str) -> str:
    """``HOST:PORT`` as in a URL: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reached_url(url: str, host: str) -> str:
    """``url`` for a client: ``host`` in place of a wildcard address."""
    parts = urlsplit(url)
    if (parts.hostname or "") not in WILDCARDS:
        return url
    return parts._replace(netloc=host_port(host, parts.port or "")).geturl()


def zmq_hosts(host: str) -> tuple[str, str]:
    """Where a server that is to listen on ``host`` listens, and where others reach it. ZMQ looks names up for IPv4
    alone, so the address stands for a name that has only IPv6."""
    if host not in WILDCARDS:
        return (_address_or_name(host),) * 2
    name = socket.gethostname()
    return host, _address_or_name(name) if host == "::" else name


def _address_or_name(name: str) -> str:
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        if all(family == socket.AF_INET6 for family, *_ in found):
            return str(found[0][4][0])
    return name


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``: 127.0.0.0/8, ``::1`` or ``localhost``.

    Other names, wildcards and the empty string count as reachable from elsewhere.
    """
    name = bare_host(host).lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
