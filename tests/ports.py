"""TCP ports for servers that cannot choose one themselves and tell it.

A port that the kernel has given (``bind`` to 0) and that is free again goes to whoever asks next, perhaps before the
server binds it. These are below the kernel's own range, so no connection and no other ``bind`` to 0 takes them.
"""

from __future__ import annotations

import contextlib
import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)
_drawn = random.SystemRandom()
"""Processes that run tests side by side draw different ports; the suite's own draws are seeded."""


def free_ports(count: int) -> list[int]:
    """So many different ones that nobody listens at on loopback."""
    ports: list[int] = []
    while len(ports) < count:
        port = _drawn.choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in ports:
                ports.append(port)
    return ports
